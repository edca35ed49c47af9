#include "trainer/bench_attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/mla_heads.h"
#include "model/rope.h"

namespace palimpsest {

namespace {

void add_attention(std::vector<BenchOp>& ops, const BenchSizes& s) {
  const MlaConfig& mla = s.model.mla;
  const int64_t N = s.N, H = mla.num_heads, K = mla.qk_nope_head_dim + mla.qk_rope_head_dim, V = mla.v_head_dim;
  const double scale = 1.0 / std::sqrt(static_cast<double>(K));
  const double flops = static_cast<double>(N * H * (K + V)) * static_cast<double>(s.T + 1);
  const std::string sizes = fmt::format("{} x {} tokens, {} heads of {} / {}", s.rows, s.T, H, K, V);
  ops.push_back({"attention_forward", "", [=](BenchPlace& place) {
                   const Tensor q = place.random({N, H, K}), k = place.random({N, H, K}), v = place.random({N, H, V});
                   const Tensor o = place.zeros({N, H, V}), lse = place.wide_zeros({N, H});
                   return PreparedOp{sizes, flops, {q, k, v}, {o}, [=, &place] {
                                       attention_forward(place.stream(), o, lse, q, k, v, scale, s.documents(),
                                                         s.documents());
                                     }};
                 }});
  ops.push_back(
      {"attention_backward", "", [=](BenchPlace& place) {
         const Tensor q = place.random({N, H, K}), k = place.random({N, H, K}), v = place.random({N, H, V});
         const Tensor o = place.zeros({N, H, V}), lse = place.wide_zeros({N, H}), d_o = place.random({N, H, V});
         const Tensor dq = place.zeros({N, H, K}), dk = place.zeros({N, H, K}), dv = place.zeros({N, H, V});
         attention_forward(place.stream(), o, lse, q, k, v, scale, s.documents(), s.documents());
         return PreparedOp{
             sizes, 2 * flops, {q, k, v, o, d_o}, {dq, dk, dv}, [=, &place] {
               attention_backward(place.stream(), {dq, dk, dv, d_o, q, k, v, o, lse, scale}, s.documents());
             }};
       }});
}

void add_earlier_keys(std::vector<BenchOp>& ops, const MlaConfig& mla, int64_t T) {
  const int64_t H = mla.num_heads, K = mla.qk_nope_head_dim + mla.qk_rope_head_dim, V = mla.v_head_dim;
  const double scale = 1.0 / std::sqrt(static_cast<double>(K));
  const double flops = 2.0 * static_cast<double>(H * (K + V)) * static_cast<double>(T) * static_cast<double>(T);
  const std::string sizes = fmt::format("{} queries and earlier keys, {} heads of {} / {}", T, H, K, V);
  ops.push_back({"attention_prefix_forward", "", [=](BenchPlace& place) {
                   const Tensor q = place.random({T, H, K}), k = place.random({T, H, K}), v = place.random({T, H, V});
                   const Tensor o = place.random({T, H, V}), lse = place.wide_random({T, H});
                   return PreparedOp{sizes, flops, {q, k, v, o}, {o}, [=, &place] {
                                       attention_prefix_forward(place.stream(), o, lse, q, k, v, scale);
                                     }};
                 }});
  ops.push_back({"attention_prefix_backward", "", [=](BenchPlace& place) {
                   const Tensor q = place.random({T, H, K}), k = place.random({T, H, K}), v = place.random({T, H, V});
                   const Tensor o = place.random({T, H, V}), lse = place.wide_random({T, H});
                   const Tensor dq = place.zeros({T, H, K}), dk = place.zeros({T, H, K}), dv = place.zeros({T, H, V});
                   const Tensor d_o = place.random({T, H, V});
                   attention_prefix_forward(place.stream(), o, lse, q, k, v, scale);
                   return PreparedOp{
                       sizes, 2 * flops, {q, k, v, o, d_o, dq, dk, dv}, {dq, dk, dv}, [=, &place] {
                         attention_prefix_backward(place.stream(), {dq, dk, dv, d_o, q, k, v, o, lse, scale});
                       }};
                 }});
}

void add_mla_heads(std::vector<BenchOp>& ops, const BenchSizes& s) {
  const MlaConfig& mla = s.model.mla;
  const int64_t N = s.N, H = mla.num_heads, K = mla.qk_nope_head_dim, R = mla.qk_rope_head_dim, V = mla.v_head_dim;
  const std::string sizes = fmt::format("[{}, {}, {} + {} + {}]", N, H, K, R, V);
  ops.push_back({"mla_keys_values_forward", "", [=](BenchPlace& place) {
                   const Tensor kv = place.random({N, H, K + V}), k_pe = place.random({N, R});
                   const Tensor k = place.zeros({N, H, K + R}), v = place.zeros({N, H, V});
                   return PreparedOp{sizes, 0, {kv, k_pe}, {k, v}, [=, &place] {
                                       mla_keys_values_forward(place.stream(), k, v, kv, k_pe);
                                     }};
                 }});
  ops.push_back({"mla_keys_values_backward", "", [=](BenchPlace& place) {
                   const Tensor dk = place.random({N, H, K + R}), dv = place.random({N, H, V});
                   const Tensor dkv = place.zeros({N, H, K + V}), dk_pe = place.zeros({N, R});
                   return PreparedOp{sizes, 0, {dk, dv}, {dkv, dk_pe}, [=, &place] {
                                       mla_keys_values_backward(place.stream(), dkv, dk_pe, dk, dv);
                                     }};
                 }});
}

void add_rotary(std::vector<BenchOp>& ops, const BenchSizes& s) {
  const MlaConfig& mla = s.model.mla;
  const int64_t N = s.N, H = mla.num_heads, size = std::max<int64_t>(2, mla.qk_rope_head_dim / 2 * 2);
  const auto rope = std::make_shared<const Rope>(RopeKind::kInterleaved, 0, size, mla.rope_theta, mla.rope_scaling);
  const std::string sizes = fmt::format("[{}, {}, {}]", N, H, size);
  ops.push_back({"rotary_forward", "", [=](BenchPlace& place) {
                   const Tensor x = place.random({N, H, size}), positions = place.ids(N, s.T);
                   return PreparedOp{sizes, 0, {x}, {x}, [=, &place] { rope->forward(place.stream(), x, positions); }};
                 }});
  ops.push_back(
      {"rotary_backward", "", [=](BenchPlace& place) {
         const Tensor dx = place.random({N, H, size}), positions = place.ids(N, s.T);
         return PreparedOp{sizes, 0, {dx}, {dx}, [=, &place] { rope->backward(place.stream(), dx, positions); }};
       }});
}

void add_output_gate(std::vector<BenchOp>& ops, const BenchSizes& s) {
  const AttentionConfig& attention = s.model.attention;
  const Shape shape = {s.N, attention.num_heads * attention.head_dim};
  const std::string sizes = fmt::format("[{}, {}]", shape[0], shape[1]);
  ops.push_back(
      {"sigmoid_gate_forward", "", [=](BenchPlace& place) {
         const Tensor x = place.random(shape), z = place.random(shape), y = place.zeros(shape);
         return PreparedOp{sizes, 0, {x, z}, {y}, [=, &place] { sigmoid_gate_forward(place.stream(), y, x, z); }};
       }});
  ops.push_back({"sigmoid_gate_backward", "", [=](BenchPlace& place) {
                   const Tensor dy = place.random(shape), x = place.random(shape), z = place.random(shape);
                   const Tensor dx = place.zeros(shape), dz = place.zeros(shape);
                   return PreparedOp{sizes, 0, {dy, x, z}, {dx, dz}, [=, &place] {
                                       sigmoid_gate_backward(place.stream(), dx, dz, dy, x, z);
                                     }};
                 }});
}

}  // namespace

void add_attention_ops(std::vector<BenchOp>& ops, const BenchSizes& sizes) {
  add_attention(ops, sizes);
  add_earlier_keys(ops, sizes.model.mla, sizes.T);
  add_mla_heads(ops, sizes);
  add_rotary(ops, sizes);
  add_output_gate(ops, sizes);
}

}  // namespace palimpsest
