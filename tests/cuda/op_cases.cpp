#include "tests/cuda/op_cases.h"

#include <string>

#include "kernels/attention.h"
#include "kernels/expert_rows.h"

namespace palimpsest::support {

void run_attention(Lab& lab, const AttentionSizes& sizes, const Documents& documents) {
  const auto& [H, HKV, K, V, gap, scale] = sizes;
  const int64_t N = documents.num_tokens();
  const Tensor q = lab.input("q", {N, H, K}, 1, gap), k = lab.input("k", {N, HKV, K}, 1, gap);
  const Tensor v = lab.input("v", {N, HKV, V}, 1, gap), d_o = lab.input("d_o", {N, H, V});
  const Tensor o = lab.output("o", {N, H, V}, gap), lse = lab.statistics("lse", {N, H});
  attention_forward(lab.stream(), o, lse, q, k, v, scale, documents, documents);
  attention_backward(lab.stream(),
                     {.dq = lab.output("dq", {N, H, K}),
                      .dk = lab.output("dk", {N, HKV, K}, gap),
                      .dv = lab.output("dv", {N, HKV, V}),
                      .d_o = d_o,
                      .q = q,
                      .k = k,
                      .v = v,
                      .o = o,
                      .lse = lse,
                      .scale = scale},
                     documents);
}

void run_attention_prefix(Lab& lab, const AttentionSizes& sizes, int64_t N, int64_t num_keys) {
  const auto& [H, HKV, K, V, gap, scale] = sizes;
  const Tensor q = lab.input("q", {N, H, K}, 1, gap), d_o = lab.input("d_o", {N, H, V});
  const Tensor o = lab.in_place("o", {N, H, V}, 1, gap), lse = lab.accumulated("lse", {N, H});
  const Tensor k = lab.input("k", {num_keys, HKV, K}, 1, gap), v = lab.input("v", {num_keys, HKV, V}, 1, gap);
  attention_prefix_forward(lab.stream(), o, lse, q, k, v, scale);
  attention_prefix_backward(lab.stream(), {.dq = lab.in_place("dq", {N, H, K}),
                                           .dk = lab.in_place("dk", {num_keys, HKV, K}, 1, gap),
                                           .dv = lab.in_place("dv", {num_keys, HKV, V}),
                                           .d_o = d_o,
                                           .q = q,
                                           .k = k,
                                           .v = v,
                                           .o = o,
                                           .lse = lse,
                                           .scale = scale});
}

void run_grouped_linear(Lab& lab, const std::vector<int64_t>& offsets, int64_t O, int64_t I, int64_t gap) {
  const int64_t R = offsets.back(), E = static_cast<int64_t>(offsets.size()) - 1;
  const Tensor at = lab.integers("offsets", offsets);
  const Tensor x = lab.input("x", {R, I}, 1, gap), dy = lab.input("dy", {R, O}, 1, gap);
  const auto with_weight = [&](const std::string& kind, const Tensor& w) {
    grouped_linear_forward(lab.stream(), lab.output("y" + kind, {R, O}, gap), x, w, at);
    grouped_linear_backward_input(lab.stream(), lab.output("dx" + kind, {R, I}), dy, w, at);
  };
  with_weight(" own", lab.input("w", {E * O, I}, 0.2, gap));
  with_weight(" wide", lab.weight("wide w", {E * O, I}, 0.2));
  grouped_linear_backward_weight(lab.stream(), lab.accumulated("dw", {E * O, I}), dy, x, at);
}

}  // namespace palimpsest::support
