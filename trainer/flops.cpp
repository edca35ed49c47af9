#include "trainer/flops.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "kernels/elementwise.h"
#include "kernels/linear.h"

namespace palimpsest {

std::string flops_table(const LanguageModel& model, int64_t row_length) {
  std::string text = fmt::format(
      "model FLOPs of a token, forward and backward, in rows of T = {} tokens: 6 x weights of matrix products\n"
      "  + 3 x (6 K V a head of delta-rule layers, 2 H (dqk + dv) (T + 1) / 2 of attention layers,\n"
      "  2 x weights of the experts that a token is sent to)\n",
      row_length);
  const double total = model.flops_per_token(row_length);
  for (const LanguageModel::FlopsOfKind& kind : model.flops_by_kind(row_length))
    text += fmt::format("  {:<10} x {:<4} {:>12.4f} MFLOP  {:>5.1f} %\n", kind.kind, kind.count, kind.per_token / 1e6,
                        100.0 * kind.per_token / total);
  return text + fmt::format("  {:<17} {:>12.4f} MFLOP\n", "total", total / 1e6);
}

double measure_matmul_flops(Device device, Arena& memory) {
  constexpr int64_t kSize = 2048;
  constexpr int kTries = 5;
  // Three matrices of whole alignment units, so their sum is what the arena hands out.
  std::optional<Arena> own;
  if (memory.capacity() - memory.used() < kMatmulBytes) own.emplace("matrix product", device, kMatmulBytes);
  Arena& arena = own ? *own : memory;
  Arena::Scope scope(arena);
  Arena scratch("scratch", device, 0);
  Stream stream(device, scratch);
  const Tensor x = arena.allocate(DType::kF32, {kSize, kSize});
  const Tensor w = arena.allocate(DType::kF32, {kSize, kSize});
  const Tensor y = arena.allocate(DType::kF32, {kSize, kSize});
  fill_zero(stream, x);
  fill_zero(stream, w);
  double best_seconds = 0.0;
  for (int i = 0; i < kTries; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    linear_forward(stream, y, x, w, Write::kOverwrite);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    best_seconds = i == 0 ? taken.count() : std::min(best_seconds, taken.count());
  }
  return 2.0 * kSize * kSize * kSize / best_seconds;
}

}  // namespace palimpsest
