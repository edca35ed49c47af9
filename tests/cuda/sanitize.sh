#!/bin/bash
# Runs the tests of ops under compute-sanitizer, several at once, on all GPUs that are visible.
#
#   tests/cuda/sanitize.sh BUILD OUT [SECONDS [TOOL...]]
#
# BUILD: a build folder with cuda_test and golden_ops_test. OUT: folder for a log each. SECONDS: the most that one case
# may take (default 300). TOOL: memcheck, racecheck, initcheck (default: all). A line a case tells the tool's own
# summary; the status is 1 where one found something, or did not end.
#
# initcheck finds reads of memory that nobody wrote to, so the tests do not fill theirs with NaN then. Kernels of cuDNN are
# compiled while they are watched, which takes longest; only memcheck sees them.
set -u
build=$1
out=$2
seconds=${3:-300}
shift 3 || shift $#
tools=${*:-memcheck racecheck initcheck}
export PATH=$PATH:/usr/local/cuda/bin OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} OMP_WAIT_POLICY=passive
at_once=${AT_ONCE:-$(($(nproc) / 2))}
gpus=$(nvidia-smi --list-gpus | wc -l)
[ -n "${CUDA_VISIBLE_DEVICES:-}" ] && gpus=$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | wc -l)
mkdir -p "$out"

# name, program, cases
cases="
delta_rows cuda_test CudaDeltaRule.StatesLieInRowsThatDocumentsName
delta_kinds cuda_test CudaDeltaRule.EveryKindMatchesTheCpu
delta_sizes cuda_test CudaDeltaRule.OddSizesMatchTheCpu
delta_levels cuda_test CudaDeltaRule.ChunkSizes*:CudaDeltaRule.First*
delta_long cuda_test CudaDeltaRule.ALongDocumentOfFewHeadsMatchesTheCpu
golden_kda golden_ops_test *kda_*
golden_others golden_ops_test -*kda_*
attention cuda_test CudaAttention.*
prefix cuda_test CudaAttentionPrefix.*:CudaAffineState.*
grouped cuda_test CudaGroupedLinear.*
experts cuda_test CudaRouter.*:CudaExpertRows.*:CudaTokenGate.*
linear cuda_test CudaLinear.*:CudaEmbedding.*
norms cuda_test CudaRmsNorm.*:CudaGatedRmsNorm.*
conv cuda_test CudaShortConv.*
elementwise cuda_test CudaElementwise.*
small cuda_test CudaSwiglu.*:CudaMlaHeads.*:CudaRotary.*:CudaCrossEntropy.*:CudaAdamw.*
fused cuda_test FusedAttention.RowsInPlace*:FusedAttention.Shares*"

watch() { # tool name program filter gpu
  local log="$out/$1_$2.txt" begin=$SECONDS status
  local -x CUDA_VISIBLE_DEVICES=$5 PALIMPSEST_DEVICE=cuda
  [ "$1" = initcheck ] && local -x PALIMPSEST_LEAVE_MEMORY=1
  timeout -k 2 "$seconds" compute-sanitizer --tool "$1" --print-limit 1000 --error-exitcode 9 \
    "$build/tests/$3" --gtest_filter="$4" > "$log" 2>&1
  status=$?
  printf '%-10s %-14s %4d s  status %d  %s\n' "$1" "$2" $((SECONDS - begin)) "$status" \
    "$(grep -E 'SUMMARY|PASSED|FAILED' "$log" | tail -2 | tr '\n' ' ')"
  return "$status"
}

IFS=',' read -ra visible <<< "${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}"
jobs=()
number=0
for tool in $tools; do
  while read -r name program filter; do
    [ -z "$name" ] && continue
    [ "$name" = fused ] && [ "$tool" != memcheck ] && continue
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do sleep 0.2; done
    watch "$tool" "$name" "$program" "$filter" "${visible[$((number % gpus))]}" &
    jobs+=($!)
    number=$((number + 1))
  done <<< "$cases"
done
failed=0
for job in "${jobs[@]}"; do wait "$job" || failed=1; done
exit $failed
