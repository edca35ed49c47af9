// Causal attention, backward. With P = exp(scale q k^T - lse) and delta_i = d_o_i . o_i:
//   dv = P^T d_o      dS = P * (d_o v^T - delta) * scale      dq = dS k      dk = dS^T q
//
// Three kernels: delta (a warp a token and head); dk and dv, whose blocks keep kBlock keys and walk over the queries
// that see them, head after head of a group; dq, whose blocks keep kBlock queries and walk over their keys. P and dS
// are computed in both, so that every sum has one owner and a fixed order. A warp owns 16 of the rows that are kept;
// the others come kWalk at a time, in bf16 copied while those before them are worked on. Scores and results are f32 in
// registers; P and dS are rounded as operands.
#include "kernels/attention.h"
#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/attention_fused.h"
#include "kernels/cuda/reduce.cuh"

namespace palimpsest::cuda {

namespace {

template <class T>
struct BackwardProblem {
  HeadRows<T> dq, dk, dv, d_o, q, k, v;
  const float *lse, *delta;  // [N, H]
  float scale;
  int64_t H, group;
  int Kp, Vp;
  BlockList blocks;
};

template <class T>
__global__ void attention_delta_kernel(float* delta, HeadRows<T> d_o, HeadRows<T> o, int64_t N, int64_t H) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  if (i >= N * H) return;
  const T *a = d_o.at(i / H, i % H), *b = o.at(i / H, i % H);
  float dot = 0.0F;
  for (int64_t c = lane; c < o.size; c += kWarp) dot += to_f32(a[c]) * to_f32(b[c]);
  dot = warp_sum(dot);
  if (lane == 0) delta[i] = dot;
}

template <class T, class Units>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_bwd_keys_kernel(const __grid_constant__ BackwardProblem<T> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const WalkMemory<T, kWalk> s(shared, p.Kp, p.Vp, true);
  const int first_row = static_cast<int>(threadIdx.x) / kWarp * kUnitRows;
  const int64_t kv_heads = p.H / p.group, kv_head = blockIdx.x % kv_heads;
  int64_t first_key = 0;
  const int64_t document = p.blocks.find(blockIdx.x / kv_heads, &first_key);
  const int64_t start = p.blocks.documents.begin(document), length = p.blocks.documents.length(document);
  const int64_t num_keys = min(static_cast<int64_t>(kBlock), length - first_key);
  const int64_t steps = ceil_div(length - first_key, kWalk);  // of a head
  p.k.copy(s.first, s.key_row, kBlock, p.Kp, start + first_key, kv_head, num_keys);
  p.v.copy(s.second, s.value_row, kBlock, p.Vp, start + first_key, kv_head, num_keys);
  Unit dk[Units::kKeyUnits], dv[Units::kValueUnits];
  const auto copy = [&](int64_t i) {
    const int64_t head = kv_head * p.group + i / steps, query = first_key + i % steps * kWalk;
    const int64_t n = min(static_cast<int64_t>(kWalk), length - query);
    p.q.copy(s.keys(i), s.key_row, kWalk, p.Kp, start + query, head, n);
    p.d_o.copy(s.values(i), s.value_row, kWalk, p.Vp, start + query, head, n);
    commit_copies();
  };
  s.walk(p.group * steps, copy, [&](int64_t i) {
    const int64_t head = kv_head * p.group + i / steps, query = first_key + i % steps * kWalk;
    Unit scores, d_p;  // [keys, queries]
    multiply_rows(scores, s.first + first_row * s.key_row, s.keys(i), s.key_row, p.Kp);
    multiply_rows(d_p, s.second + first_row * s.value_row, s.values(i), s.value_row, p.Vp);
    const int64_t at = (start + query) * p.H + head, first_seer = first_key + first_row - query;
    differentiate_keys(scores, d_p, {p.lse + at, p.delta + at, p.H}, length - query, p.scale,
                       [&](int key, int column) { return first_seer + key <= column; });
    multiply_held(dv, scores, s.values(i), s.value_row, p.Vp);
    multiply_held(dk, d_p, s.keys(i), s.key_row, p.Kp);
  });
  const float one[2] = {1.0F, 1.0F};
  store_rows(p.dk, dk, start + first_key, kv_head, first_row, num_keys, one);
  store_rows(p.dv, dv, start + first_key, kv_head, first_row, num_keys, one);
}

template <class T, class Units>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_bwd_queries_kernel(const __grid_constant__ BackwardProblem<T> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const WalkMemory<T, kWalk> s(shared, p.Kp, p.Vp, true);
  const int first_row = static_cast<int>(threadIdx.x) / kWarp * kUnitRows;
  const int64_t head = blockIdx.x % p.H, kv_head = head / p.group;
  int64_t first_query = 0;
  const int64_t document = p.blocks.find(p.blocks.num_blocks - 1 - blockIdx.x / p.H, &first_query);
  const int64_t start = p.blocks.documents.begin(document), length = p.blocks.documents.length(document);
  const int64_t num_queries = min(static_cast<int64_t>(kBlock), length - first_query);
  const int64_t seen = first_query + num_queries;
  p.q.copy(s.first, s.key_row, kBlock, p.Kp, start + first_query, head, num_queries);
  p.d_o.copy(s.second, s.value_row, kBlock, p.Vp, start + first_query, head, num_queries);
  const int64_t at = (start + first_query) * p.H + head;
  const QueryRows queries({p.lse + at, p.delta + at, p.H}, first_row, num_queries);
  Unit dq[Units::kKeyUnits];
  const auto copy = [&](int64_t i) {
    const int64_t key = i * kWalk, n = min(static_cast<int64_t>(kWalk), seen - key);
    p.k.copy(s.keys(i), s.key_row, kWalk, p.Kp, start + key, kv_head, n);
    p.v.copy(s.values(i), s.value_row, kWalk, p.Vp, start + key, kv_head, n);
    commit_copies();
  };
  s.walk(ceil_div(seen, kWalk), copy, [&](int64_t i) {
    Unit scores, d_p;  // [queries, keys]
    multiply_rows(scores, s.first + first_row * s.key_row, s.keys(i), s.key_row, p.Kp);
    multiply_rows(d_p, s.second + first_row * s.value_row, s.values(i), s.value_row, p.Vp);
    queries.differentiate_queries(scores, d_p, p.scale,
                                  [&](int query, int key) { return i * kWalk + key <= first_query + query; });
    multiply_held(dq, d_p, s.keys(i), s.key_row, p.Kp);
  });
  const float one[2] = {1.0F, 1.0F};
  store_rows(p.dq, dq, start + first_query, head, first_row, num_queries, one);
}

void run_backward(Stream& stream, const AttentionBackwardArgs& args, const Documents& documents,
                  const std::vector<bool>& taken) {
  const Arena::Scope scope(stream.scratch());
  const BlockList blocks = make_blocks(stream, documents, taken);
  if (blocks.num_blocks == 0) return;
  const Tensor delta = attention_delta(stream, args);
  with_head_units(args.q.dtype(), args.q.dim(2), args.v.dim(2), [&](auto zero, auto units) {
    using T = decltype(zero);
    using Units = decltype(units);
    const BackwardProblem<T> problem = {.dq = HeadRows<T>(args.dq),
                                        .dk = HeadRows<T>(args.dk),
                                        .dv = HeadRows<T>(args.dv),
                                        .d_o = HeadRows<T>(args.d_o),
                                        .q = HeadRows<T>(args.q),
                                        .k = HeadRows<T>(args.k),
                                        .v = HeadRows<T>(args.v),
                                        .lse = args.lse.data<float>(),
                                        .delta = delta.data<float>(),
                                        .scale = static_cast<float>(args.scale),
                                        .H = args.q.dim(1),
                                        .group = args.q.dim(1) / args.k.dim(1),
                                        .Kp = padded_size(args.q.dim(2)),
                                        .Vp = padded_size(args.v.dim(2)),
                                        .blocks = blocks};
    const auto shape = [&](int64_t heads) {
      return LaunchShape{.grid_x = blocks.num_blocks * heads,
                         .threads = kAttentionThreads,
                         .shared_bytes = WalkMemory<T, kWalk>::bytes(problem.Kp, problem.Vp, true)};
    };
    launch(stream, attention_bwd_keys_kernel<T, Units>, shape(problem.H / problem.group), problem);
    launch(stream, attention_bwd_queries_kernel<T, Units>, shape(problem.H), problem);
  });
}

}  // namespace

Tensor attention_delta(const Stream& stream, const AttentionBackwardArgs& args) {
  const Tensor delta = stream.scratch().allocate(DType::kF32, args.lse.shape());
  constexpr int kThreads = 256;
  with_float(args.o.dtype(), [&](auto zero) {
    using T = decltype(zero);
    launch(stream, attention_delta_kernel<T>,
           {.grid_x = ceil_div(delta.numel(), kThreads / kWarp), .threads = kThreads}, delta.data<float>(),
           HeadRows<T>(args.d_o), HeadRows<T>(args.o), delta.dim(0), delta.dim(1));
  });
  return delta;
}

void attention_backward(Stream& stream, const AttentionBackwardArgs& args, const Documents& documents) {
  const FusedDocuments fused(stream, args, documents);
  run_backward(stream, args, documents, fused.taken());
  fused.run(stream);
  note_attention_path(stream, fused.taken());
}

}  // namespace palimpsest::cuda
