#include "trainer/flops.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "kernels/device.h"
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

double measure_matmul_flops(Device device, DType activations, Arena& memory) {
  constexpr int kTries = 5;
  const bool cuda = device == Device::kCuda;
  const int64_t size = cuda ? 4096 : 2048;
  const DType dtype = cuda ? activations : DType::kF32;
  // Three matrices of whole alignment units, so their sum is what the arena hands out.
  const int64_t bytes = 3 * size * size * size_of(dtype);
  std::optional<Arena> own;
  if (memory.capacity() - memory.used() < bytes) own.emplace("matrix product", device, bytes);
  Arena& arena = own ? *own : memory;
  Arena::Scope scope(arena);
  const Tensor x = arena.allocate(dtype, {size, size});
  const Tensor w = arena.allocate(dtype, {size, size});
  const Tensor y = arena.allocate(dtype, {size, size});
  const auto multiply = [&](Stream& stream) { linear_forward(stream, y, x, w, Write::kOverwrite); };
  Arena planned = Arena::planning("scratch", device);
  Stream planning(device, planned);
  multiply(planning);
  Arena scratch("scratch", device, planned.peak());
  Stream stream(device, scratch);
  for (const Tensor& operand : {x, w}) {
    fill_zero(stream, operand);
    if (!cuda) continue;
    // A GPU multiplies zeros faster than numbers.
    HostCopy values(operand);
    auto* words = static_cast<uint32_t*>(values.tensor().raw());
    uint32_t state = 1;
    for (int64_t i = 0; i < operand.bytes() / 4; ++i) {
      state = state * 1664525U + 1013904223U;
      words[i] = (state & 0x807f807fU) | 0x3f803f80U;  // two bf16, or an f32, of size 1 to 2
    }
    values.store();
  }
  double best_seconds = 0.0;
  for (int i = 0; i < kTries; ++i) {
    synchronize(stream);
    const auto begin = std::chrono::steady_clock::now();
    multiply(stream);
    synchronize(stream);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    best_seconds = i == 0 ? taken.count() : std::min(best_seconds, taken.count());
  }
  const auto n = static_cast<double>(size);
  return 2.0 * n * n * n / best_seconds;
}

}  // namespace palimpsest
