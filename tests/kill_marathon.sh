#!/usr/bin/env bash
# Kills training (kill -9) at N random file operations of its saves. After each kill the run goes on to its end, and its
# losses must equal those of the run that nobody killed.
# With RANKS=4 four ranks train, and each kill strikes one of them.
# usage: [RANKS=n] tests/kill_marathon.sh N [PALIMPSEST [SEED]]
set -euo pipefail
cd "$(dirname "$0")/.."
kills=${1:?usage: tests/kill_marathon.sh N [PALIMPSEST [SEED]]}
palimpsest=${2:-build/palimpsest}
RANDOM=${3:-$$}
ranks=${RANKS:-1}
export OMP_NUM_THREADS=1

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
seq 1 4000 | sed 's/$/ blind mice, see how they run/' > "$work/text.txt"
"$palimpsest" tokenize --out "$work/shards" "$work/text.txt" > /dev/null
cat > "$work/config.yaml" << YAML
hardware: {peak_tflops: 1, threads: 1}
model:
  vocab_size: 258
  hidden_size: 16
  num_layers: 2
  layers: [kda, mla]
  tie_embeddings: true
  kda: {num_heads: 2, head_dim: 8, gate_lower_bound: -5}
  mla: {num_heads: 2, kv_lora_rank: 8, qk_nope_head_dim: 8, qk_rope_head_dim: 4, v_head_dim: 8}
  mlp: {intermediate_size: 24}
data: {train: $work/shards, eval: $work/shards, sequence_length: 32}
train: {steps: 6, sequences_per_step: 4, micro_batch: 2, eval_every: 3, eval_rows: 4}
checkpoint: {every: 1, keep_last: 2}
YAML

# train FOLDER VICTIM OPERATION [key=value...]: the rank VICTIM is killed at OPERATION of its files, if there are so many.
train() {
  local command=("$palimpsest" train "$work/config.yaml" run.dir="$1" "${@:4}") victim=$2
  local kill=PALIMPSEST_KILL_AT_FILE_OPERATION=$3 job=()
  if ((ranks == 1)); then
    env "$kill" "${command[@]}" > "$work/log" 2>&1
    return
  fi
  command+=(parallel.tensor=2 parallel.zero=$((ranks / 2 > 1 ? 3 : 1)))
  ((victim > 0)) && job+=(-n "$victim" "${command[@]}" :)
  job+=(-n 1 -x "$kill" "${command[@]}")
  ((victim < ranks - 1)) && job+=(: -n $((ranks - 1 - victim)) "${command[@]}")
  launch/mpirun.sh --oversubscribe "${job[@]}" > "$work/log" 2>&1
}
never=1000000000

# What the steps computed, without what depends on the clock or on where a process began.
results() { sed 's/"tokens_per_second":[^,]*,"mfu":[^,]*,//; s/,"bytes_sent":{[^}]*}//' "$1/metrics.jsonl"; }

train "$work/straight" 0 $never
results "$work/straight" > "$work/expected"

# Kills further and further apart until one comes after the last operation.
survives() {
  rm -rf "$work/probe"
  train "$work/probe" 0 "$1"
}
operations=64
while ! survives $operations 2> /dev/null; do operations=$((operations * 2)); done
low=$((operations / 2))
while ((operations - low > 1)); do
  middle=$(((low + operations) / 2))
  if survives $middle 2> /dev/null; then operations=$middle; else low=$middle; fi
done
echo "a run of 6 saves has $low file operations"

for ((kill = 1; kill <= kills; ++kill)); do
  run=$work/killed
  rm -rf "$run"
  points=()
  # Up to three kills in one run, the later ones in what is left of it.
  for ((again = 0; again <= RANDOM % 3; ++again)); do
    point=$((RANDOM % low + 1))
    victim=$((RANDOM % ranks))
    points+=("$point of rank $victim")
    status=0
    train "$run" $victim $point "checkpoint.background=$( ((RANDOM % 2)) && echo true || echo false)" || status=$?
    ((status == 137 || status == 0 || ranks > 1)) || { echo "kill $kill at ${points[*]}: exit code $status"; cat "$work/log"; exit 1; }
  done 2> /dev/null
  train "$run" 0 $never || { echo "kill $kill at ${points[*]}: the next start failed"; cat "$work/log"; exit 1; }
  results "$run" | cmp -s - "$work/expected" ||
    { echo "kill $kill at ${points[*]}: the losses differ"; diff <(results "$run") "$work/expected"; exit 1; }
  ((kill % 10)) || echo "$kill of $kills"
done
echo "passed: after $kills kills every run went on to the same losses"
