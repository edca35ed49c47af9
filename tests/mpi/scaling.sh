#!/bin/bash
# Speed of two ranks of one thread each against one, on the same global batch: data, sequence (rows of 2048 tokens) and
# tensor. One and two ranks take turns, and the best of each is compared. Prints tokens/s and efficiencies; fails below
# 85 % for data and sequence and 75 % for tensor. Needs two processors that nothing else uses.
#   tests/mpi/scaling.sh [build/palimpsest] [turns] [steps]
set -eu
program=$(realpath "${1:-build/palimpsest}")
turns=${2:-3}
steps=${3:-3}
cd "$(dirname "$0")/../.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1

# tokens/s of NUMBER ranks with these overrides
measure() {
  local ranks=$1
  shift
  launch/mpirun.sh --oversubscribe --bind-to core -n "$ranks" "$program" bench train configs/bench_cpu.yaml \
    hardware.threads=1 "$@" --steps "$steps" --json "$folder/bench.json" >"$folder/log" 2>&1 ||
    { cat "$folder/log" >&2; exit 1; }
  grep -o '"tokens_per_second":[0-9.]*' "$folder/bench.json" | cut -d: -f2
}

larger() { awk -v a="$1" -v b="$2" 'BEGIN { print (a > b ? a : b) }'; }

status=0
compare() {
  local axis=$1 least=$2
  shift 2
  local one=0 two=0
  for _ in $(seq "$turns"); do
    one=$(larger "$one" "$(measure 1 "$@")")
    two=$(larger "$two" "$(measure 2 "parallel.$axis=2" "$@")")
  done
  local efficiency
  efficiency=$(awk -v one="$one" -v two="$two" 'BEGIN { printf "%.1f", 100 * two / (2 * one) }')
  printf '%-9s one rank %8.1f tokens/s, two ranks %8.1f tokens/s, efficiency %s %%\n' "$axis" "$one" "$two" "$efficiency"
  awk -v got="$efficiency" -v least="$least" 'BEGIN { exit got >= least ? 0 : 1 }' ||
    { echo "$axis: below $least %" >&2; status=1; }
}

compare data 85
compare sequence 85 data.sequence_length=2048 train.sequences_per_step=1 train.micro_batch=1
compare tensor 75
exit $status
