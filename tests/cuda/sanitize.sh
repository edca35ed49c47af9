#!/bin/bash
# Runs the tests of ops under compute-sanitizer, several at once, on all GPUs that are visible.
#
#   tests/cuda/sanitize.sh BUILD OUT [SECONDS [TOOL...]]
#
# BUILD: a build folder with cuda_test, golden_ops_test and delta_rule_sm90_check. OUT: folder for a log each. SECONDS: the
# most that one case may take (default 300). TOOL: memcheck, racecheck, initcheck (default: all). A line a case tells the
# tool's own summary; the status is 1 where one found something, or did not end.
#
# initcheck finds reads of memory that nobody wrote to, so the tests do not fill theirs with NaN then. Kernels of cuDNN are
# compiled while they are watched, which takes longest; only memcheck sees them, and the choice between algorithms of large
# products: initcheck does not know what cuBLASLt stores by TMA, and racecheck is too slow for them. It follows every access
# to shared memory, some microseconds each and one after the other within a block: kernels that live on it have cases of
# their own for it (small_cases_test.cpp), and each kernel is among some.
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
of_every_tool="
experts cuda_test CudaRouter.*:CudaExpertRows.*:CudaTokenGate.*
linear cuda_test CudaLinear.*:CudaEmbedding.*-CudaLinear.AChoice*
norms cuda_test CudaRmsNorm.*:CudaGatedRmsNorm.*
conv cuda_test CudaShortConv.*
elementwise cuda_test CudaElementwise.*
affine cuda_test CudaAffineState.*
small cuda_test CudaSwiglu.*:CudaMlaHeads.*:CudaRotary.*:CudaCrossEntropy.*:CudaAdamw.*"
of_others="
delta_rows cuda_test CudaDeltaRule.StatesLieInRowsThatDocumentsName
delta_kinds cuda_test CudaDeltaRule.EveryKindMatchesTheCpu
delta_sizes cuda_test CudaDeltaRule.OddSizesMatchTheCpu
delta_levels cuda_test CudaDeltaRule.ChunkSizes*:CudaDeltaRule.First*
delta_limits cuda_test CudaDeltaRuleLimits.*
delta_long cuda_test CudaDeltaRule.ALongDocumentOfFewHeadsMatchesTheCpu
golden_kda golden_ops_test *kda_*
golden_others golden_ops_test -*kda_*
attention cuda_test CudaAttention.*
prefix cuda_test CudaAttentionPrefix.*
grouped cuda_test CudaGroupedLinear.*"
of_memcheck="
choice cuda_test CudaLinear.AChoice*
fused cuda_test FusedAttention.RowsInPlace*:FusedAttention.Shares*"
of_racecheck="
delta_vector cuda_test *CudaSmallDeltaRule*/VectorDecay
delta_long_keys cuda_test *CudaSmallDeltaRule*/LongKeys
delta_scalar cuda_test *CudaSmallDeltaRule*/ScalarDecay
delta_off cuda_test *CudaSmallDeltaRule*/NoDeltaRule
delta_few_keys cuda_test *CudaSmallDeltaRule*/FewKeys
delta_fixed cuda_test *CudaSmallDeltaRule*/FixedDecay
attention_packed cuda_test *CudaSmallAttention.MatchesTheCpu/Packed
attention_unpacked cuda_test *CudaSmallAttention.MatchesTheCpu/Unpacked
attention_128 cuda_test *CudaSmallAttention.MatchesTheCpu/KeysBeyond128
attention_192 cuda_test *CudaSmallAttention.MatchesTheCpu/KeysBeyond192
prefix_packed cuda_test *CudaSmallAttention.ToEarlier*/Packed
prefix_unpacked cuda_test *CudaSmallAttention.ToEarlier*/Unpacked
prefix_128 cuda_test *CudaSmallAttention.ToEarlier*/KeysBeyond128
prefix_192 cuda_test *CudaSmallAttention.ToEarlier*/KeysBeyond192
grouped_packed cuda_test *CudaSmallGroupedLinear*/Packed
grouped_unpacked cuda_test *CudaSmallGroupedLinear*/Unpacked
hopper_65 delta_rule_sm90_check T 65
hopper_63 delta_rule_sm90_check T 63
hopper_documents delta_rule_sm90_check documents 1 3
hopper_scalar delta_rule_sm90_check scalar, grouped
hopper_segments delta_rule_sm90_check segments of 1
hopper_states delta_rule_sm90_check rows of states"

watch() { # tool name program filter gpu
  local log="$out/$1_$2.txt" begin=$SECONDS status what=(--gtest_filter="$4")
  [ "$3" = delta_rule_sm90_check ] && what=(check "$4")
  local -x CUDA_VISIBLE_DEVICES=$5 PALIMPSEST_DEVICE=cuda
  [ "$1" = initcheck ] && local -x PALIMPSEST_LEAVE_MEMORY=1
  timeout -k 2 "$seconds" compute-sanitizer --tool "$1" --print-limit 1000 --error-exitcode 9 \
    "$build/tests/$3" "${what[@]}" > "$log" 2>&1
  status=$?
  printf '%-10s %-17s %4d s  status %d  %s\n' "$1" "$2" $((SECONDS - begin)) "$status" \
    "$(grep -E 'SUMMARY|PASSED|FAILED|all checks' "$log" | tail -2 | tr '\n' ' ')"
  return "$status"
}

IFS=',' read -ra visible <<< "${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}"
jobs=()
number=0
for tool in $tools; do
  cases=$of_every_tool
  if [ "$tool" = racecheck ]; then cases=$of_racecheck$cases; else cases=$of_others$cases; fi
  [ "$tool" = memcheck ] && cases+=$of_memcheck
  while read -r name program filter; do
    [ -z "$name" ] && continue
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do sleep 0.2; done
    watch "$tool" "$name" "$program" "$filter" "${visible[$((number % gpus))]}" &
    jobs+=($!)
    number=$((number + 1))
  done <<< "$cases"
done
failed=0
for job in "${jobs[@]}"; do wait "$job" || failed=1; done
exit $failed
