#!/usr/bin/env bash
# Trains a small hybrid language model on this machine, from nothing: installs, builds, prepares a corpus, trains half of
# the steps, resumes, evaluates on held-out text and prints a sample. At most ten minutes on two cores.
#
# usage: launch/quickstart.sh                  the King James Bible; every 20th chapter is held out
#        launch/quickstart.sh my.txt ...       your own text; every 20th piece of about 2 kB is held out
# Results: runs/quickstart/summary.json. A previous quickstart is replaced.
set -euo pipefail
inputs=()
for file in "$@"; do
  [[ -r $file && -f $file ]] || { echo "launch/quickstart.sh: cannot read '$file'; arguments are text files" >&2; exit 2; }
  inputs+=("$(realpath "$file")")
done
cd "$(dirname "$0")/.."
source launch/phases.sh
# Threads that wait sleep, so that a busy machine slows the run by what it takes and no more.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

run=runs/quickstart
config=configs/quickstart.yaml
for file in "${inputs[@]}"; do
  [[ $file != "$(realpath -m "$run")"/* ]] ||
    { echo "launch/quickstart.sh: '$file' lies in $run, which is cleared first; move it elsewhere" >&2; exit 2; }
done
if command -v nvidia-smi > /dev/null && nvidia-smi -L 2> /dev/null | grep -q GPU; then
  build=build with_cuda=ON
else
  build=build-cpu with_cuda=OFF
fi
palimpsest=$build/palimpsest

build_program() {
  cmake -S . -B "$build" -G Ninja -DWITH_CUDA=$with_cuda -DBUILD_TESTING=OFF > "$run/cmake.log" ||
    { cat "$run/cmake.log" >&2; return 1; }
  ninja -C "$build" palimpsest
}

# One file a chapter, "Ge1:1 In the beginning ..." a line; every 20th chapter goes to the held-out set.
split_bible() {
  bible -f gen1:1-rev22:21 | awk -v out="$run/corpus" '
    match($1, /:[0-9]+$/) {
      chapter = substr($1, 1, RSTART - 1)
      if (chapter != current) {
        if (file) close(file)
        current = chapter
        count += 1
        file = sprintf("%s/%s/%04d.txt", out, count % 20 == 0 ? "held-out" : "train", count)
      }
    }
    { print > file }'
}

# Pieces of about 2 kB that end with a line.
split_text() {
  cat -- "${inputs[@]}" | LC_ALL=C awk -v out="$run/corpus" '
    function next_piece() {
      if (file) close(file)
      count += 1
      size = 0
      file = sprintf("%s/%s/%06d.txt", out, count % 20 == 0 ? "held-out" : "train", count)
    }
    BEGIN { next_piece() }
    { print > file; size += length($0) + 1; if (size >= 2000) next_piece() }'
}

prepare_corpus() {
  mkdir -p "$run/corpus/train" "$run/corpus/held-out"
  if ((${#inputs[@]})); then split_text; else split_bible; fi
  held_out_bytes=$(cat "$run"/corpus/held-out/*.txt 2> /dev/null | wc -c)
  ((held_out_bytes > 0)) || { echo "launch/quickstart.sh: the text is too short: at least 40 kB are needed" >&2; return 2; }
  echo "train $(cat "$run"/corpus/train/*.txt | wc -c) bytes, held out $held_out_bytes bytes"
}

tokenize() {
  "$palimpsest" tokenize --train-sentencepiece 2048 --tokenizer "$run/tokenizer.model" --out "$run/shards/train" "$run/corpus/train"
  "$palimpsest" tokenize --tokenizer "$run/tokenizer.model" --out "$run/shards/held-out" "$run/corpus/held-out"
}

train_args=(train "$config" run.dir="$run")
train() { "$palimpsest" "${train_args[@]}"; }

# Asks the run to save and stop once half of its steps are done, as one would by hand.
train_first_half() {
  local half=$(($("$palimpsest" "${train_args[@]}" --print train.steps) / 2))
  "$palimpsest" "${train_args[@]}" &
  local child=$!
  while kill -0 $child 2> /dev/null; do
    if [[ -f $run/metrics.jsonl ]] && (($(wc -l < "$run/metrics.jsonl") >= half)); then
      kill -USR1 $child
      break
    fi
    sleep 0.2
  done
  wait $child
}

evaluate() { "$palimpsest" eval "$config" run.dir="$run" from="$run" --json "$run/eval.json"; }

sample() { "$palimpsest" generate "$config" run.dir="$run" from="$run" --prompt "${1:-In the beginning}" --max-tokens 120 --temperature 0.8 --seed 1; }

json_number() { sed -n "s/.*\"$2\": *\([-0-9.eE+]*\).*/\1/p" "$1" | head -n 1; }

write_summary() {
  local gzip_bytes tokens_per_second
  gzip_bytes=$(cat "$run"/corpus/held-out/*.txt | gzip -9 | wc -c)
  # The median over all steps.
  tokens_per_second=$(sed -n 's/.*"tokens_per_second": *\([0-9.eE+]*\).*/\1/p' "$run/metrics.jsonl" | sort -g |
    awk '{ value[NR] = $1 } END { print value[int((NR + 1) / 2)] }')
  cat > "$run/summary.json" << JSON
{
  "perplexity": $(json_number "$run/eval.json" perplexity),
  "bits_per_byte": $(json_number "$run/eval.json" bits_per_byte),
  "gzip_bits_per_byte": $(awk -v z="$gzip_bytes" -v n="$held_out_bytes" 'BEGIN { printf "%.4f", 8 * z / n }'),
  "tokens_per_second": $tokens_per_second,
  "seconds": $((SECONDS - script_start))
}
JSON
  cat "$run/summary.json"
}

rm -rf "$run"
mkdir -p "$run"
groups=(build)
((${#inputs[@]})) || groups+=(quickstart)
phase "install packages" launch/setup.sh "${groups[@]}"
phase "build" build_program
phase "prepare the corpus" prepare_corpus
phase "tokenize" tokenize
phase "train, first half" train_first_half
phase "resume, second half" train
phase "evaluate held-out text" evaluate
phase "sample" sample
phase "summary" write_summary
print_phases
