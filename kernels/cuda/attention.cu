// Causal attention, forward, in the manner of FlashAttention (Dao et al., 2022): a block keeps kBlock queries of a head
// and walks over the keys that they see with a running maximum and sum.
//
// Grid: x blocks of queries, the latest first, times query heads. A warp owns 16 queries. Keys and values come kBlock
// at a time, in bf16 copied while those before them are worked on. Scores, probabilities, O and the statistics of rows
// are f32 in registers; probabilities are rounded as operands of the second product.
#include "kernels/attention.h"

#include <optional>

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/attention_fused.h"

namespace palimpsest::cuda {

namespace {

constexpr int kScoreUnits = kBlock / kUnitColumns;

template <class T>
struct ForwardProblem {
  HeadRows<T> o, q, k, v;
  float* lse;
  float scale;
  int64_t H, group;
  int Kp, Vp;
  BlockList queries;
  DocumentList keys;
};

template <class T, class Units>
__global__ void __launch_bounds__(kAttentionThreads) attention_fwd_kernel(const __grid_constant__ ForwardProblem<T> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const WalkMemory<T, kBlock> s(shared, p.Kp, p.Vp, false);
  const int first_row = static_cast<int>(threadIdx.x) / kWarp * kUnitRows;
  const int64_t head = blockIdx.x % p.H, kv_head = head / p.group;
  int64_t first = 0;
  const int64_t document = p.queries.find(p.queries.num_blocks - 1 - blockIdx.x / p.H, &first);
  const int64_t start = p.queries.documents.begin(document), length = p.queries.documents.length(document);
  const int64_t key_start = p.keys.begin(document), ahead = p.keys.length(document) - length;
  const int64_t n = min(static_cast<int64_t>(kBlock), length - first);
  const int64_t seen = first + n + ahead;  // keys that the last query sees

  const auto copy = [&](int64_t i) {
    const int64_t begin = i * kBlock, width = min(static_cast<int64_t>(kBlock), seen - begin);
    p.k.copy(s.keys(i), s.key_row, kBlock, p.Kp, key_start + begin, kv_head, width);
    p.v.copy(s.values(i), s.value_row, kBlock, p.Vp, key_start + begin, kv_head, width);
    commit_copies();
  };
  p.q.copy(s.first, s.key_row, kBlock, p.Kp, start + first, head, n);

  Unit o[Units::kValueUnits];
  RunningSoftmax softmax;
  s.walk(ceil_div(seen, kBlock), copy, [&](int64_t i) {
    Unit scores[kScoreUnits];
#pragma unroll
    for (int unit = 0; unit < kScoreUnits; ++unit)
      multiply_rows(scores[unit], s.first + first_row * s.key_row, s.keys(i) + unit * kUnitColumns * s.key_row,
                    s.key_row, p.Kp);
    // Only the last keys are hidden from some queries. Rows past the last query see what it sees.
    const bool hides = (i + 1) * kBlock > first + ahead + 1;
#pragma unroll
    for (int unit = 0; unit < kScoreUnits; ++unit)
      for_each_element([&](int pair, int e) {
        float& score = scores[unit].value[pair][e];
        score *= p.scale;
        if (hides) {
          const int64_t row = min(static_cast<int64_t>(first_row + Unit::row(pair)), n - 1);
          if (i * kBlock + unit * kUnitColumns + Unit::column(pair) + e > first + row + ahead) score = -INFINITY;
        }
      });
    softmax.absorb(scores, o);  // key 0 is seen by every query
#pragma unroll
    for (int unit = 0; unit < kScoreUnits; ++unit)
      multiply_held(o, scores[unit], s.values(i) + unit * kUnitColumns * s.value_row, s.value_row, p.Vp);
  });

  float norm[2];
  softmax.finish(p.lse + (start + first) * p.H + head, p.H, first_row, n, norm);
  store_rows(p.o, o, start + first, head, first_row, n, norm);
}

void run_forward(Stream& stream, const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                 double scale, const Documents& queries, const Documents& keys, const std::vector<bool>& taken) {
  const Arena::Scope scope(stream.scratch());
  const BlockList blocks = make_blocks(stream, queries, taken);
  if (blocks.num_blocks == 0) return;
  const DocumentList key_documents = upload(stream, keys);
  with_head_units(q.dtype(), q.dim(2), v.dim(2), [&](auto zero, auto units) {
    using T = decltype(zero);
    const ForwardProblem<T> problem = {.o = HeadRows<T>(o),
                                       .q = HeadRows<T>(q),
                                       .k = HeadRows<T>(k),
                                       .v = HeadRows<T>(v),
                                       .lse = lse.data<float>(),
                                       .scale = static_cast<float>(scale),
                                       .H = q.dim(1),
                                       .group = q.dim(1) / k.dim(1),
                                       .Kp = padded_size(q.dim(2)),
                                       .Vp = padded_size(v.dim(2)),
                                       .queries = blocks,
                                       .keys = key_documents};
    launch(stream, attention_fwd_kernel<T, decltype(units)>,
           {.grid_x = blocks.num_blocks * problem.H,
            .threads = kAttentionThreads,
            .shared_bytes = WalkMemory<T, kBlock>::bytes(problem.Kp, problem.Vp, false)},
           problem);
  });
}

}  // namespace

void attention_forward(Stream& stream, Tensor o, Tensor lse, const Tensor& q, const Tensor& k, const Tensor& v,
                       double scale, const Documents& queries, const Documents& keys) {
  std::optional<FusedDocuments> fused;
  if (queries.offsets() == keys.offsets())
    fused.emplace(
        stream,
        AttentionBackwardArgs{
            .dq = {}, .dk = {}, .dv = {}, .d_o = {}, .q = q, .k = k, .v = v, .o = o, .lse = lse, .scale = scale},
        queries);
  run_forward(stream, o, lse, q, k, v, scale, queries, keys, fused ? fused->taken() : std::vector<bool>{});
  if (fused) fused->run(stream);
  note_attention_path(stream, fused ? fused->taken() : std::vector<bool>{});
}

}  // namespace palimpsest::cuda
