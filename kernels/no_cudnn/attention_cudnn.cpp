// In builds without cuDNN.
#include "kernels/cuda/attention_cudnn.h"

#include "kernels/check.h"

namespace palimpsest::cuda {

struct FusedAttention::Parts {};

bool FusedAttention::is_built_in() {
  return false;
}

FusedAttention::FusedAttention(CUstream_st*, int64_t) {}
FusedAttention::~FusedAttention() = default;

bool FusedAttention::serves(const FusedShape&, int64_t) {
  return false;
}

int64_t FusedAttention::num_plans() const {
  return 0;
}

void FusedAttention::run(const FusedShape&, const FusedOperands&, void*) {
  CHECK(false, "this build has no cuDNN");
}

}  // namespace palimpsest::cuda
