#include "model/local_input.h"

#include <algorithm>

#include "kernels/device.h"
#include "kernels/elementwise.h"

namespace palimpsest {

namespace {

// The tokens at these places of [N] i32, or nothing of an absent tensor.
Tensor take(const Tensor& whole, const std::vector<int64_t>& places, std::vector<int32_t>& values) {
  if (!whole.defined()) return {};
  const int32_t* from = whole.data<int32_t>();
  values.reserve(places.size());
  for (const int64_t place : places) values.push_back(from[place]);
  return {values.data(), DType::kI32, {static_cast<int64_t>(values.size())}};
}

}  // namespace

LocalInput::LocalInput(const ModelInput& whole, const SequenceCut& cut, int64_t rank) : input_(whole) {
  if (cut.num_ranks() == 1) return;
  const std::vector<int64_t> places = cut.tokens_of(rank);
  auto [documents, crossings] = cut.part_of(rank, whole.sequence.documents);
  input_ = {.tokens = take(whole.tokens, places, tokens_),
            .targets = take(whole.targets, places, targets_),
            .sequence = {.documents = std::move(documents),
                         .positions = take(whole.sequence.positions, places, positions_),
                         .crossings = std::move(crossings)}};
}

void gather_token_values(Context& context, Tensor whole, const Tensor& local, const SequenceCut& cut) {
  Stream& stream = context.stream;
  if (cut.num_ranks() == 1) {
    copy(stream, whole, local);
    return;
  }
  Arena::Scope scope(stream.scratch());
  const int64_t most = cut.max_tokens();
  const Tensor padded = stream.scratch().allocate(local.dtype(), {most});
  const Tensor all = stream.scratch().allocate(local.dtype(), {cut.num_ranks() * most});
  fill_zero(stream, padded);
  copy(stream, padded.rows(0, local.dim(0)), local);
  context.mesh.sequence().all_gather(stream, all, padded);
  if (stream.is_planning()) return;
  HostCopy all_here(all), whole_here(whole);
  all_here.fetch();
  const int64_t size = size_of(whole.dtype());
  auto* to = static_cast<std::byte*>(whole_here.tensor().raw());
  for (int64_t rank = 0; rank < cut.num_ranks(); ++rank) {
    const std::vector<int64_t> places = cut.tokens_of(rank);
    const auto* from = static_cast<const std::byte*>(all_here.tensor().raw()) + rank * most * size;
    for (size_t i = 0; i < places.size(); ++i)
      std::copy_n(from + static_cast<int64_t>(i) * size, size, to + places[i] * size);
  }
  whole_here.store();
}

}  // namespace palimpsest
