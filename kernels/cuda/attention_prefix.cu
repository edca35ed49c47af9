// Attention to keys that all lie before the queries, of one document: nothing is hidden. Forward goes on from o and lse
// of the keys before, backward adds its share; the equations stand in attention.cu and attention_backward.cu.
//
// Forward: blocks keep kBlock queries of a head and walk over the keys. Backward: delta (a warp a token and head); dk
// and dv, whose blocks keep keys and walk over all queries, head after head of a group; dq, whose blocks keep queries
// and walk over the keys: every sum has one owner and a fixed order. A warp owns 16 of the kept rows; the others come
// kWalk at a time, in bf16 copied while those before them are worked on. Scores, results and statistics are f32 in
// registers; probabilities and dS are rounded as operands.
#include "kernels/attention.h"

#include <algorithm>

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/attention_fused.h"
#include "kernels/cuda/engine.h"

namespace palimpsest::cuda {

namespace {

// Absent in forward: dq, dk, dv, d_o, delta.
template <class T>
struct PrefixProblem {
  HeadRows<T> o, q, k, v, dq, dk, dv, d_o;
  float *lse, *delta;  // [N, H]
  float scale;
  int64_t N, H, group, num_keys;
  int Kp, Vp;
};

// Calls body(element, its place in the tensor) for a warp's rows of a head, as far as they are in the tensor.
template <int kCount, class T, class Body>
__device__ inline void for_each_of_rows(const HeadRows<T>& rows, Unit (&units)[kCount], int64_t token, int64_t head,
                                        int first_row, int64_t n, Body body) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    for_each_element([&](int pair, int e) {
      const int row = first_row + Unit::row(pair), column = i * kUnitColumns + Unit::column(pair) + e;
      if (row < n && column < rows.size) body(units[i].value[pair][e], rows.at(token + row, head)[column]);
    });
}

template <int kCount, class T>
__device__ inline void add_rows(const HeadRows<T>& to, Unit (&units)[kCount], int64_t token, int64_t head,
                                int first_row, int64_t n) {
  for_each_of_rows(to, units, token, head, first_row, n,
                   [](float value, T& element) { element = from_f32<T>(to_f32(element) + value); });
}

template <class T, class Units>
__global__ void __launch_bounds__(kAttentionThreads) prefix_fwd_kernel(const __grid_constant__ PrefixProblem<T> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const WalkMemory<T, kWalk> s(shared, p.Kp, p.Vp, false);
  const int first_row = static_cast<int>(threadIdx.x) / kWarp * kUnitRows;
  const int64_t head = blockIdx.x % p.H, kv_head = head / p.group, first = blockIdx.x / p.H * kBlock;
  const int64_t n = min(static_cast<int64_t>(kBlock), p.N - first);
  p.q.copy(s.first, s.key_row, kBlock, p.Kp, first, head, n);
  // What the keys before left: a sum of 1 at the maximum lse. Of the four lanes of a row the first has it.
  Unit o[Units::kValueUnits];
  for_each_of_rows(p.o, o, first, head, first_row, n, [](float& value, const T& element) { value = to_f32(element); });
  float* lse = p.lse + first * p.H + head;
  RunningSoftmax softmax;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + Unit::row(r);
    softmax.maximum[r] = row < n ? lse[row * p.H] : 0.0F;
    softmax.sum[r] = Unit::column(0) == 0 ? 1.0F : 0.0F;
  }
  const auto copy = [&](int64_t i) {
    const int64_t key = i * kWalk, width = min(static_cast<int64_t>(kWalk), p.num_keys - key);
    p.k.copy(s.keys(i), s.key_row, kWalk, p.Kp, key, kv_head, width);
    p.v.copy(s.values(i), s.value_row, kWalk, p.Vp, key, kv_head, width);
    commit_copies();
  };
  s.walk(ceil_div(p.num_keys, kWalk), copy, [&](int64_t i) {
    Unit scores[1];
    multiply_rows(scores[0], s.first + first_row * s.key_row, s.keys(i), s.key_row, p.Kp);
    for_each_element([&](int pair, int e) {
      float& score = scores[0].value[pair][e];
      score = i * kWalk + Unit::column(pair) + e < p.num_keys ? score * p.scale : -INFINITY;
    });
    softmax.absorb(scores, o);
    multiply_held(o, scores[0], s.values(i), s.value_row, p.Vp);
  });

  float norm[2];
  softmax.finish(lse, p.H, first_row, n, norm);
  store_rows(p.o, o, first, head, first_row, n, norm);
}

template <class T, class Units>
__global__ void __launch_bounds__(kAttentionThreads)
    prefix_bwd_keys_kernel(const __grid_constant__ PrefixProblem<T> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const WalkMemory<T, kWalk> s(shared, p.Kp, p.Vp, true);
  const int first_row = static_cast<int>(threadIdx.x) / kWarp * kUnitRows;
  const int64_t kv_heads = p.H / p.group, kv_head = blockIdx.x % kv_heads, first = blockIdx.x / kv_heads * kBlock;
  const int64_t n = min(static_cast<int64_t>(kBlock), p.num_keys - first), steps = ceil_div(p.N, kWalk);  // of a head
  p.k.copy(s.first, s.key_row, kBlock, p.Kp, first, kv_head, n);
  p.v.copy(s.second, s.value_row, kBlock, p.Vp, first, kv_head, n);
  Unit dk[Units::kKeyUnits], dv[Units::kValueUnits];
  const auto copy = [&](int64_t i) {
    const int64_t head = kv_head * p.group + i / steps, query = i % steps * kWalk;
    const int64_t count = min(static_cast<int64_t>(kWalk), p.N - query);
    p.q.copy(s.keys(i), s.key_row, kWalk, p.Kp, query, head, count);
    p.d_o.copy(s.values(i), s.value_row, kWalk, p.Vp, query, head, count);
    commit_copies();
  };
  s.walk(p.group * steps, copy, [&](int64_t i) {
    const int64_t head = kv_head * p.group + i / steps, query = i % steps * kWalk;
    Unit scores, d_p;  // [keys, queries]
    multiply_rows(scores, s.first + first_row * s.key_row, s.keys(i), s.key_row, p.Kp);
    multiply_rows(d_p, s.second + first_row * s.value_row, s.values(i), s.value_row, p.Vp);
    const int64_t at = query * p.H + head;
    differentiate_keys(scores, d_p, {p.lse + at, p.delta + at, p.H}, p.N - query, p.scale,
                       [](int, int) { return true; });
    multiply_held(dv, scores, s.values(i), s.value_row, p.Vp);
    multiply_held(dk, d_p, s.keys(i), s.key_row, p.Kp);
  });
  add_rows(p.dk, dk, first, kv_head, first_row, n);
  add_rows(p.dv, dv, first, kv_head, first_row, n);
}

template <class T, class Units>
__global__ void __launch_bounds__(kAttentionThreads)
    prefix_bwd_queries_kernel(const __grid_constant__ PrefixProblem<T> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const WalkMemory<T, kWalk> s(shared, p.Kp, p.Vp, true);
  const int first_row = static_cast<int>(threadIdx.x) / kWarp * kUnitRows;
  const int64_t head = blockIdx.x % p.H, kv_head = head / p.group, first = blockIdx.x / p.H * kBlock;
  const int64_t n = min(static_cast<int64_t>(kBlock), p.N - first);
  p.q.copy(s.first, s.key_row, kBlock, p.Kp, first, head, n);
  p.d_o.copy(s.second, s.value_row, kBlock, p.Vp, first, head, n);
  const int64_t at = first * p.H + head;
  const QueryRows queries({p.lse + at, p.delta + at, p.H}, first_row, n);
  Unit dq[Units::kKeyUnits];
  const auto copy = [&](int64_t i) {
    const int64_t key = i * kWalk, width = min(static_cast<int64_t>(kWalk), p.num_keys - key);
    p.k.copy(s.keys(i), s.key_row, kWalk, p.Kp, key, kv_head, width);
    p.v.copy(s.values(i), s.value_row, kWalk, p.Vp, key, kv_head, width);
    commit_copies();
  };
  s.walk(ceil_div(p.num_keys, kWalk), copy, [&](int64_t i) {
    Unit scores, d_p;  // [queries, keys]
    multiply_rows(scores, s.first + first_row * s.key_row, s.keys(i), s.key_row, p.Kp);
    multiply_rows(d_p, s.second + first_row * s.value_row, s.values(i), s.value_row, p.Vp);
    queries.differentiate_queries(scores, d_p, p.scale, [&](int, int key) { return i * kWalk + key < p.num_keys; });
    multiply_held(dq, d_p, s.keys(i), s.key_row, p.Kp);
  });
  add_rows(p.dq, dq, first, head, first_row, n);
}

template <class T>
PrefixProblem<T> make_problem(const Tensor& o, const Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                              double scale) {
  PrefixProblem<T> p = {};
  p.o = HeadRows<T>(o);
  p.q = HeadRows<T>(q);
  p.k = HeadRows<T>(k);
  p.v = HeadRows<T>(v);
  p.lse = lse.data<float>();
  p.scale = static_cast<float>(scale);
  p.N = q.dim(0);
  p.H = q.dim(1);
  p.group = q.dim(1) / k.dim(1);
  p.num_keys = k.dim(0);
  p.Kp = padded_size(q.dim(2));
  p.Vp = padded_size(v.dim(2));
  return p;
}

// Blocks of kBlock rows times heads.
template <class T>
LaunchShape walk_shape(const PrefixProblem<T>& p, int64_t rows, int64_t heads, bool has_second) {
  return {.grid_x = ceil_div(rows, kBlock) * heads,
          .threads = kAttentionThreads,
          .shared_bytes = WalkMemory<T, kWalk>::bytes(p.Kp, p.Vp, has_second)};
}

void piece_backward(Stream& stream, const AttentionBackwardArgs& args) {
  const FusedPrefix fused(stream, args);
  fused.run(stream);
  note_path(stream, fused.is_served() ? "cuDNN" : "plain");
  if (fused.is_served()) return;
  const Arena::Scope scope(stream.scratch());
  const Tensor delta = attention_delta(stream, args);
  with_head_units(args.q.dtype(), args.q.dim(2), args.v.dim(2), [&](auto zero, auto units) {
    using T = decltype(zero);
    using Units = decltype(units);
    PrefixProblem<T> problem = make_problem<T>(args.o, args.lse, args.q, args.k, args.v, args.scale);
    problem.dq = HeadRows<T>(args.dq);
    problem.dk = HeadRows<T>(args.dk);
    problem.dv = HeadRows<T>(args.dv);
    problem.d_o = HeadRows<T>(args.d_o);
    problem.delta = delta.data<float>();
    launch(stream, prefix_bwd_keys_kernel<T, Units>,
           walk_shape(problem, problem.num_keys, problem.H / problem.group, true), problem);
    launch(stream, prefix_bwd_queries_kernel<T, Units>, walk_shape(problem, problem.N, problem.H, true), problem);
  });
}

}  // namespace

void attention_prefix_forward(Stream& stream, Tensor o, Tensor lse, const Tensor& q, const Tensor& k, const Tensor& v,
                              double scale) {
  if (q.dim(0) == 0 || k.dim(0) == 0) return;
  const FusedPrefix fused(
      stream, {.dq = {}, .dk = {}, .dv = {}, .d_o = {}, .q = q, .k = k, .v = v, .o = o, .lse = lse, .scale = scale});
  fused.run(stream);
  note_path(stream, fused.is_served() ? "cuDNN" : "plain");
  if (fused.is_served()) return;
  with_head_units(q.dtype(), q.dim(2), v.dim(2), [&](auto zero, auto units) {
    using T = decltype(zero);
    const PrefixProblem<T> problem = make_problem<T>(o, lse, q, k, v, scale);
    launch(stream, prefix_fwd_kernel<T, decltype(units)>, walk_shape(problem, problem.N, problem.H, false), problem);
  });
}

void attention_prefix_backward(Stream& stream, const AttentionBackwardArgs& args) {
  if (args.q.dim(0) == 0 || args.k.dim(0) == 0) return;
  const int64_t step = FusedPrefix::longest_piece(args);
  FusedPrefix::make_plans(stream, rows_of(args, 0, std::min(step, args.q.dim(0)), 0, std::min(step, args.k.dim(0))));
  for (int64_t query = 0; query < args.q.dim(0); query += step)
    for (int64_t key = 0; key < args.k.dim(0); key += step)
      piece_backward(stream, rows_of(args, query, std::min(step, args.q.dim(0) - query), key,
                                     std::min(step, args.k.dim(0) - key)));
}

}  // namespace palimpsest::cuda
