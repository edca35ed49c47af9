#include "kernels/cuda/attention_cudnn.h"

#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

#include <algorithm>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/check.h"
#include "kernels/cuda/check.h"

namespace palimpsest::cuda {

namespace {

namespace graph = cudnn_frontend::graph;
using cudnn_frontend::DataType_t;
// The library's own handle of a tensor.
using TensorHandle = decltype(std::declval<graph::Graph>().tensor(graph::Tensor_attributes()));

#define CUDNN_CHECK(call)                                                                                           \
  do {                                                                                                              \
    const cudnnStatus_t cudnn_check_status = (call);                                                                \
    CHECK(cudnn_check_status == CUDNN_STATUS_SUCCESS, #call, " failed: ", cudnnGetErrorString(cudnn_check_status)); \
  } while (false)

enum Operand : int64_t { kQ = 1, kK, kV, kO, kLse, kDO, kDQ, kDK, kDV, kQueryLengths, kKeyLengths };

// A graph under construction: tensors in the library's order of dimensions, [B, heads, S, size].
class GraphMaker {
 public:
  explicit GraphMaker(const FusedShape& shape) : shape_(shape), graph_(std::make_unique<graph::Graph>()) {
    graph_->set_io_data_type(DataType_t::BFLOAT16)
        .set_intermediate_data_type(DataType_t::FLOAT)
        .set_compute_data_type(DataType_t::FLOAT);
  }

  std::unique_ptr<graph::Graph> take() {
    if (shape_.is_backward)
      add_backward();
    else
      add_forward();
    return std::move(graph_);
  }

 private:
  void describe(graph::Tensor_attributes& tensor, Operand operand, int64_t heads, int64_t size, int64_t row) const {
    const bool is_of_keys = operand == kK || operand == kV || operand == kDK || operand == kDV;
    const int64_t S = is_of_keys ? shape_.S_keys : shape_.S;
    tensor.set_uid(operand)
        .set_dim({shape_.B, heads, S, size})
        .set_stride({S * row, size, row, 1})
        .set_data_type(DataType_t::BFLOAT16);
  }
  void describe_lse(graph::Tensor_attributes& tensor) const {
    tensor.set_uid(kLse)
        .set_dim({shape_.B, shape_.H, shape_.S, 1})
        .set_stride({shape_.H * shape_.S, shape_.S, 1, 1})
        .set_data_type(DataType_t::FLOAT);
  }
  TensorHandle input(Operand operand, int64_t heads, int64_t size, int64_t row) {
    graph::Tensor_attributes tensor;
    describe(tensor, operand, heads, size, row);
    return graph_->tensor(tensor);
  }
  TensorHandle lengths(Operand operand) {
    return graph_->tensor(graph::Tensor_attributes()
                              .set_uid(operand)
                              .set_dim({shape_.B, 1, 1, 1})
                              .set_stride({1, 1, 1, 1})
                              .set_data_type(DataType_t::INT32));
  }
  template <class Attributes>
  void set_common(Attributes& attributes) {
    attributes.set_attn_scale(shape_.scale).set_causal_mask(shape_.is_causal);
    if (shape_.ends_early)
      attributes.set_padding_mask(true).set_seq_len_q(lengths(kQueryLengths)).set_seq_len_kv(lengths(kKeyLengths));
  }

  void add_forward() {
    const FusedShape& s = shape_;
    graph::SDPA_attributes attributes;
    attributes.set_name("attention_forward").set_generate_stats(true);
    set_common(attributes);
    const auto outputs = graph_->sdpa(input(kQ, s.H, s.K, s.q_row), input(kK, s.HKV, s.K, s.k_row),
                                      input(kV, s.HKV, s.V, s.v_row), attributes);
    describe(outputs[0]->set_output(true), kO, s.H, s.V, s.o_row);
    describe_lse(outputs[1]->set_output(true));
  }

  void add_backward() {
    const FusedShape& s = shape_;
    graph::SDPA_backward_attributes attributes;
    attributes.set_name("attention_backward").set_deterministic_algorithm(true);
    set_common(attributes);
    graph::Tensor_attributes lse;
    describe_lse(lse);
    const auto outputs = graph_->sdpa_backward(input(kQ, s.H, s.K, s.q_row), input(kK, s.HKV, s.K, s.k_row),
                                               input(kV, s.HKV, s.V, s.v_row), input(kO, s.H, s.V, s.o_row),
                                               input(kDO, s.H, s.V, s.d_o_row), graph_->tensor(lse), attributes);
    describe(outputs[0]->set_output(true), kDQ, s.H, s.K, s.dq_row);
    describe(outputs[1]->set_output(true), kDK, s.HKV, s.K, s.dk_row);
    describe(outputs[2]->set_output(true), kDV, s.HKV, s.V, s.dv_row);
  }

  const FusedShape& shape_;
  std::unique_ptr<graph::Graph> graph_;
};

struct Plan {
  std::unique_ptr<graph::Graph> graph;  // null where the library has none
  int64_t workspace_bytes = 0;
  int64_t last_use = 0;
};

Plan make_plan(cudnnHandle_t handle, const FusedShape& shape) {
  Plan plan = {.graph = GraphMaker(shape).take()};
  if (plan.graph->build(handle, {cudnn_frontend::HeurMode_t::A}).is_bad() ||
      plan.graph->get_workspace_size(plan.workspace_bytes).is_bad())
    return {};
  return plan;
}

}  // namespace

struct FusedAttention::Parts {
  cudaStream_t queue;
  cudnnHandle_t handle = nullptr;  // null where the library does not start
  int64_t most_plans = 0, uses = 0;
  std::map<FusedShape, Plan> plans;

  const Plan& plan_of(const FusedShape& shape) {
    auto found = plans.find(shape);
    if (found == plans.end()) {
      if (static_cast<int64_t>(plans.size()) >= most_plans) drop_oldest();
      found = plans.emplace(shape, make_plan(handle, shape)).first;
    }
    found->second.last_use = ++uses;
    return found->second;
  }
  void drop_oldest() {
    const auto used_before = [](const auto& a, const auto& b) { return a.second.last_use < b.second.last_use; };
    CUDA_CHECK(cudaStreamSynchronize(queue));  // its kernels may still run
    plans.erase(std::min_element(plans.begin(), plans.end(), used_before));
  }
};

bool FusedAttention::is_built_in() {
  return true;
}

FusedAttention::FusedAttention(CUstream_st* queue, int64_t most_plans) : parts_(std::make_unique<Parts>()) {
  parts_->queue = queue;
  parts_->most_plans = most_plans;
  if (cudnnCreate(&parts_->handle) != CUDNN_STATUS_SUCCESS) {
    parts_->handle = nullptr;
    return;
  }
  CUDNN_CHECK(cudnnSetStream(parts_->handle, queue));
}

FusedAttention::~FusedAttention() {
  parts_->plans.clear();
  if (parts_->handle != nullptr) cudnnDestroy(parts_->handle);
}

bool FusedAttention::serves(const FusedShape& shape, int64_t workspace_bytes) {
  if (parts_->handle == nullptr) return false;
  const Plan& plan = parts_->plan_of(shape);
  return plan.graph != nullptr && plan.workspace_bytes <= workspace_bytes;
}

int64_t FusedAttention::num_plans() const {
  return static_cast<int64_t>(parts_->plans.size());
}

void FusedAttention::run(const FusedShape& shape, const FusedOperands& operands, void* workspace) {
  std::unordered_map<int64_t, void*> addresses = {
      {kQ, operands.q}, {kK, operands.k}, {kV, operands.v}, {kO, operands.o}, {kLse, operands.lse}};
  if (shape.ends_early)
    addresses.insert({{kQueryLengths, operands.query_lengths}, {kKeyLengths, operands.key_lengths}});
  if (shape.is_backward)
    addresses.insert({{kDO, operands.d_o}, {kDQ, operands.dq}, {kDK, operands.dk}, {kDV, operands.dv}});
  auto status = parts_->plan_of(shape).graph->execute(parts_->handle, addresses, workspace);
  CHECK(status.is_good(), "cuDNN's attention failed: ", status.get_message());
}

}  // namespace palimpsest::cuda
