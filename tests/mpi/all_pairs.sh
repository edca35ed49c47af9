#!/usr/bin/env bash
# Training that goes on in another layout after every step, from each of twelve layouts to each of the others: 132
# checkpoints, each loaded in another layout than it was saved in. What it computes must equal one rank's straight run.
# usage: tests/mpi/all_pairs.sh [MPI_TEST]
set -euo pipefail
cd "$(dirname "$0")/../.."
mpi_test=${1:-build/tests/mpi_test}
export OMP_NUM_THREADS=1 PALIMPSEST_ALL_PAIRS=1
exec launch/mpirun.sh --oversubscribe -n 8 "$mpi_test" --gtest_filter='Resume.InAnyLayout*'
