#!/usr/bin/env bash
# Runs fuzz targets of a build for some seconds each, from the corpus beside this script: all of them, one a core, or one.
# usage: tests/fuzz/run.sh BUILD [SECONDS] [TARGET]
set -euo pipefail
cd "$(dirname "$0")/../.."
build=$1 seconds=${2:-60}
least=10000 # executions; fewer means that the target does not do its work

if (($# < 3)); then
  basename -s _fuzz.cpp -a tests/fuzz/*_fuzz.cpp | xargs -P "$(nproc)" -I{} tests/fuzz/run.sh "$build" "$seconds" {}
  exit
fi

target=$3
scratch=$(mktemp -d)
log=$scratch/log
mkdir "$scratch/found"
if ! "$build/tests/${target}_fuzz" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=4096 -print_final_stats=1 \
  -artifact_prefix="$scratch/" "$scratch/found" "tests/fuzz/corpus/$target" > "$log" 2>&1; then
  tail -n 40 "$log" >&2
  echo "fuzzing $target FAILED; the input is in $scratch" >&2
  exit 1
fi
executions=$(sed -n 's/stat::number_of_executed_units: *//p' "$log")
coverage=$(grep -o 'cov: [0-9]*' "$log" | tail -n 1)
echo "fuzzing $target: $executions executions in $seconds s, $coverage"
if ((executions < least)); then
  echo "fuzzing $target: fewer than $least executions" >&2
  exit 1
fi
rm -r "$scratch"
