// A sequence rank's part of a batch. Every sequence rank of a data rank is given the same whole rows.
#pragma once

#include <cstdint>
#include <vector>

#include "model/language_model.h"
#include "parallel/sequence_cut.h"

namespace palimpsest {

class LocalInput {
 public:
  // `whole` lies in host memory. With one rank it is passed on as it is, and its tensors must outlive this.
  LocalInput(const ModelInput& whole, const SequenceCut& cut, int64_t rank);
  LocalInput(LocalInput&&) = default;  // vectors keep their elements where they are
  LocalInput(const LocalInput&) = delete;

  const ModelInput& input() const { return input_; }

 private:
  std::vector<int32_t> tokens_, targets_, positions_;  // [n]
  ModelInput input_;
};

// Puts together what the sequence ranks computed for their tokens: whole [N] from local [n] of each, f32 or f64.
void gather_token_values(Context& context, Tensor whole, const Tensor& local, const SequenceCut& cut);

}  // namespace palimpsest
