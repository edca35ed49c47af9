// Model FLOPs and what they are a fraction of. The one formula behind mfu everywhere:
//   FLOPs of a token = 6 * weights of matrix products (the head once, the embedding not)
//                    + 3 * (6 K V a head of a delta-rule layer, 2 H (dqk + dv) (T + 1) / 2 of an attention layer,
//                           2 * weights of the experts that a token is sent to)
// forward and backward together, in rows of T tokens; recomputation is not counted.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/arena.h"
#include "model/language_model.h"

namespace palimpsest {

// The formula, a line for each layer type with its share, and the total of a token.
std::string flops_table(const LanguageModel& model, int64_t row_length);

// FLOP/s of a matrix product: the best of five products of square matrices, of 2048 rows in f32 on all threads of a
// CPU, of 4096 rows in the dtype of activations on a GPU. The matrices lie in `memory` for the time, where it has room
// for them, or in memory of their own.
double measure_matmul_flops(Device device, DType dtype, Arena& memory);
constexpr int64_t kMatmulBytes = int64_t{3} * 2048 * 2048 * 4;  // of those matrices on a CPU

}  // namespace palimpsest
