#include "model/language_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "kernels/device.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/linear.h"
#include "kernels/rms_norm.h"
#include "kernels/trace.h"
#include "model/expert_balance.h"
#include "model/head.h"
#include "model/mixers.h"
#include "model/mlp.h"
#include "model/moe.h"
#include "model/residual.h"
#include "model/tensor_parallel.h"
#include "parallel/agreement.h"

namespace palimpsest {

struct LanguageModel::Block {
  std::string kind;
  std::unique_ptr<TokenMixer> mixer;
  std::unique_ptr<FeedForward> mlp;
  std::vector<ParameterStack*> stacks;  // of both and their norms
  Parameter* mixer_norm;                // [D]
  Parameter* mlp_norm;                  // [D]
  int64_t mixer_product_elements;       // weights in matrix products, for the FLOP count
  int64_t mlp_product_elements;
  bool has_experts = false;
  std::string forward_trace, backward_trace;  // names on a profiler's timeline

  Residual mixer_half(const ModelConfig& config) const { return {*mixer, *mixer_norm, config.norm_eps, config.norm}; }
  Residual mlp_half(const ModelConfig& config) const { return {*mlp, *mlp_norm, config.norm_eps, config.norm}; }
};

struct LanguageModel::SavedBlock {
  SavedResidual mixer, mlp;
};

namespace {

// Slots of parameter groups. Blocks take turns, so that one's values or gradients can be under way while the next one
// runs; embedding and head are used at the two ends of a forward, unless they are the same.
constexpr int64_t kSlotOfEnds = 0, kSlotOfBlocks = 1, kNumBlockSlots = 2;
constexpr int64_t kSlotOfTiedHead = kSlotOfBlocks + kNumBlockSlots;

ParameterSpec block_norm(const ModelConfig& config, std::string name) {
  return norm_weight(std::move(name), config.hidden_size, TensorSplit::kPartialOverTokens, config.norm);
}

// The input where the stream runs: its tensors, or copies of them on the stack of activations.
ModelInput on_device(Context& context, const ModelInput& input) {
  const auto place = [&](const Tensor& tensor) {
    if (!tensor.defined() || tensor.device() == context.stream.device()) return tensor;
    const Tensor copy = context.activations.allocate(tensor.dtype(), tensor.shape());
    transfer(context.stream, copy, tensor);
    return copy;
  };
  ModelInput placed = input;
  for (Tensor* tensor : {&placed.tokens, &placed.targets, &placed.sequence.positions}) *tensor = place(*tensor);
  return placed;
}

}  // namespace

LanguageModel::LanguageModel(const ModelConfig& config, ParameterRegistry& registry) : config_(config) {
  validate(config);
  const Shape vocab_shape = {config.vocab_size, config.hidden_size};
  embedding_group_ = registry.begin_group(kSlotOfEnds);
  embedding_ = &registry.declare({.name = "model.embed_tokens.weight",
                                  .shape = vocab_shape,
                                  .in_product = config.tie_embeddings ? InProduct::kYes : InProduct::kNo});
  for (int64_t i = 0; i < config.num_layers; ++i) {
    const std::string prefix = fmt::format("model.layers.{}.", i);
    registry.begin_group(kSlotOfBlocks + i % kNumBlockSlots);
    Block block;
    block.kind = config.layer_kind(i);
    const int64_t before = registry.num_product_elements();
    block.mixer = make_mixer(block.kind, config, prefix, registry);
    const int64_t between = registry.num_product_elements();
    if (config.has_experts(i)) {
      auto moe = std::make_unique<Moe>(config, static_cast<int64_t>(routed_layers_.size()), prefix + "mlp.", registry);
      routed_layers_.push_back({i, moe->selection_bias()});
      block.mlp = std::move(moe);
      block.has_experts = true;
    } else {
      block.mlp = std::make_unique<Mlp>(config.mlp.intermediate_size, "model.mlp.intermediate_size", config.hidden_size,
                                        prefix + "mlp.", registry);
    }
    block.mixer_product_elements = between - before;
    block.mlp_product_elements = registry.num_product_elements() - between;
    block.mixer_norm = &registry.declare(block_norm(config, prefix + "input_layernorm.weight"));
    block.mlp_norm = &registry.declare(block_norm(config, prefix + "post_attention_layernorm.weight"));
    block.stacks = registry.groups().back().stacks;
    block.forward_trace = fmt::format("forward of layer {}, {}", i, block.kind);
    block.backward_trace = fmt::format("backward of layer {}, {}", i, block.kind);
    blocks_.push_back(std::move(block));
  }
  head_group_ = registry.begin_group(config.tie_embeddings ? kSlotOfTiedHead : kSlotOfEnds);
  final_norm_ = &registry.declare(block_norm(config, "model.norm.weight"));
  head_ = config.tie_embeddings ? embedding_ : &registry.declare({.name = "lm_head.weight", .shape = vocab_shape});
}

LanguageModel::~LanguageModel() = default;

RoundedWeights LanguageModel::need_block(Context& context, size_t i, int64_t next) const {
  context.hooks->need_values(context, group_of_block(i), next);
  return {context, blocks_[i].stacks};
}

void LanguageModel::need_embedding(Context& context) const {
  context.hooks->need_values(context, embedding_group_, group_of_block(0));
}

void LanguageModel::need_head(Context& context, int64_t next) const {
  if (head_ == embedding_) context.hooks->need_values(context, embedding_group_, head_group_);
  context.hooks->need_values(context, head_group_, next);
}

void LanguageModel::embed(Context& context, const Tensor& tokens, Tensor x) const {
  need_embedding(context);
  Arena::Scope scope(context.stream.scratch());
  PartialSum out(context, x, tokens.dim(0));
  embedding_forward(context.stream, out.all(), tokens, embedding_->value,
                    {.begin = embedding_->block.start[0], .total = config_.vocab_size});
  out.scatter();
}

void LanguageModel::forward_backward(Context& context, const ModelInput& given, const LossOptions& options,
                                     Tensor loss_sum, Tensor z_sum) const {
  Stream& stream = context.stream;
  Arena& keep = context.activations;
  Arena::Scope scope(keep);
  const ModelInput input = on_device(context, given);
  const int64_t N = input.tokens.dim(0), D = config_.hidden_size, n = tokens_of_rank(context, N);
  const Keep keep_mixer = options.checkpointing == ActivationCheckpointing::kFull ? Keep::kRecompute : Keep::kSaved;
  const Keep keep_mlp = options.checkpointing == ActivationCheckpointing::kNone ? Keep::kSaved : Keep::kRecompute;

  ExpertBalance experts(context, config_.moe, static_cast<int64_t>(routed_layers_.size()));
  // 1. embedding
  const Tensor x = keep.allocate(context.residual, {n, D});
  embed(context, input.tokens, x);
  // 2. blocks
  std::vector<SavedBlock> saved;
  saved.reserve(blocks_.size());
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const TraceRange range(blocks_[i].forward_trace.c_str());
    const RoundedWeights weights = need_block(context, i, group_of_block(i) + 1);
    SavedBlock saved_block;
    saved_block.mixer = blocks_[i].mixer_half(config_).forward(context, input.sequence, x, keep_mixer);
    saved_block.mlp = blocks_[i].mlp_half(config_).forward(context, input.sequence, x, keep_mlp);
    saved.push_back(std::move(saved_block));
  }
  experts.finish_forward(z_sum, options.expert_load, options.grad_scale);
  // 3. and 4. final norm and head, forward and backward
  const bool tied = head_ == embedding_;
  ParameterHooks& hooks = *context.hooks;
  need_head(context, head_group_ - 1);
  if (tied) hooks.before_backward(context, embedding_group_);
  hooks.before_backward(context, head_group_);
  StreamGradient d(context, N, D);
  {
    const TraceRange range("head and loss");
    Arena::Scope inner(stream.scratch());
    const Tensor rstd = stream.scratch().allocate(final_norm_->value.dtype(), {n});
    const Tensor hidden = stream.scratch().allocate(context.dtype, {n, D});
    rms_norm_forward(stream, hidden, rstd, x, final_norm_->value, config_.norm_eps, config_.norm);
    PartialSum d_hidden(context, d.own(), N);
    head_loss_forward_backward(
        context, {.loss_sum = loss_sum, .z_sum = z_sum, .d_hidden = d_hidden.all(), .d_weight = head_->grad},
        gather_tokens(context, hidden, N), {.weight = head_->value, .vocab_begin = head_->block.start[0]},
        input.targets, options.z_loss, options.grad_scale);
    d_hidden.scatter();
    rms_norm_backward(stream, d.own(), final_norm_->grad, d.own(), x, final_norm_->value, rstd, config_.norm);
    d.changed(context);
  }
  hooks.after_backward(context, head_group_);
  // 2. blocks in reverse
  for (size_t i = blocks_.size(); i-- > 0;) {
    const TraceRange range(blocks_[i].backward_trace.c_str());
    const RoundedWeights weights = need_block(context, i, i > 0 ? group_of_block(i - 1) : ParameterHooks::kNoGroup);
    hooks.before_backward(context, group_of_block(i));
    blocks_[i].mlp_half(config_).backward(context, input.sequence, saved[i].mlp, d);
    blocks_[i].mixer_half(config_).backward(context, input.sequence, saved[i].mixer, d);
    hooks.after_backward(context, group_of_block(i));
  }
  // 1.
  const TraceRange range("embedding backward");
  if (!tied) hooks.before_backward(context, embedding_group_);
  Arena::Scope inner(stream.scratch());
  embedding_backward(stream, embedding_->grad, d.take_all(context), input.tokens,
                     {.begin = embedding_->block.start[0], .total = config_.vocab_size});
  hooks.after_backward(context, embedding_group_);
}

Tensor LanguageModel::forward_hidden(Context& context, const ModelInput& input) const {
  Stream& stream = context.stream;
  Arena& keep = context.activations;
  const int64_t N = input.tokens.dim(0), D = config_.hidden_size, n = tokens_of_rank(context, N);
  Arena::Scope all(keep);
  const Tensor x = keep.allocate(context.residual, {n, D});
  embed(context, input.tokens, x);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    Arena::Scope scope(keep);
    const RoundedWeights weights = need_block(context, i, group_of_block(i) + 1);
    blocks_[i].mixer_half(config_).forward(context, input.sequence, x, Keep::kNothing);
    blocks_[i].mlp_half(config_).forward(context, input.sequence, x, Keep::kNothing);
  }
  need_head(context, ParameterHooks::kNoGroup);
  const Tensor hidden = stream.scratch().allocate(context.dtype, {n, D});
  const Tensor rstd = stream.scratch().allocate(final_norm_->value.dtype(), {n});
  rms_norm_forward(stream, hidden, rstd, x, final_norm_->value, config_.norm_eps, config_.norm);
  return gather_tokens(context, hidden, N);
}

void LanguageModel::project_logits(Context& context, const Tensor& hidden, Tensor logits) const {
  Stream& stream = context.stream;
  Communicator& tensor = context.mesh.tensor();
  if (tensor.size() == 1) {
    linear_forward(stream, logits, hidden, head_->value, Write::kOverwrite);
    return;
  }
  // Each rank's columns, padded to the first rank's number, side by side.
  Arena::Scope scope(stream.scratch());
  const int64_t N = hidden.dim(0), V = config_.vocab_size;
  const int64_t width = (V + tensor.size() - 1) / tensor.size();
  const Tensor own = stream.scratch().allocate(context.dtype, {N, width});
  const Tensor all = stream.scratch().allocate(context.dtype, {tensor.size() * N, width});
  fill_zero(stream, own);
  linear_forward(stream, own.columns(0, head_->value.dim(0)), hidden, head_->value, Write::kOverwrite);
  tensor.all_gather(stream, all, own);
  for (int64_t rank = 0; rank * width < V; ++rank) {
    const int64_t columns = std::min(width, V - rank * width);
    copy(stream, logits.columns(rank * width, columns), all.rows(rank * N, N).columns(0, columns));
  }
}

void LanguageModel::forward_loss(Context& context, const ModelInput& given, Tensor token_loss) const {
  Arena::Scope scope(context.stream.scratch()), input_scope(context.activations);
  const ModelInput input = on_device(context, given);
  const Tensor hidden = forward_hidden(context, input);
  head_loss_forward(context, token_loss, hidden, {.weight = head_->value, .vocab_begin = head_->block.start[0]},
                    input.targets);
}

void LanguageModel::forward_logits(Context& context, const ModelInput& given, Tensor logits) const {
  Arena::Scope scope(context.stream.scratch()), input_scope(context.activations);
  project_logits(context, forward_hidden(context, on_device(context, given)), logits);
}

std::string LanguageModel::first_non_finite_output(Context& context, const ModelInput& given) const {
  Arena& keep = context.activations;
  Arena::Scope scope(keep);
  Communicator& world = context.mesh.world();
  const ModelInput input = on_device(context, given);
  const Tensor x = keep.allocate(context.residual, {tokens_of_rank(context, input.tokens.dim(0)), config_.hidden_size});
  std::string first;
  // Goes on to the end, so that all ranks send each other the same whatever each of them finds.
  const auto look_at = [&](const Tensor& output, const std::string& name) {
    if (!first.empty()) return;
    const std::optional<int64_t> rank = first_rank_where(world, !all_finite(HostCopy(output).fetch().tensor()));
    if (rank) first = "output of " + name + (world.size() > 1 ? fmt::format(" on rank {}", *rank) : "");
  };
  embed(context, input.tokens, x);
  look_at(x, "the embedding");
  for (size_t i = 0; i < blocks_.size(); ++i) {
    Arena::Scope block_scope(keep);
    const RoundedWeights weights = need_block(context, i, group_of_block(i) + 1);
    blocks_[i].mixer_half(config_).forward(context, input.sequence, x, Keep::kNothing);
    look_at(x, fmt::format("the {} mixer of model.layers.{}", blocks_[i].kind, i));
    blocks_[i].mlp_half(config_).forward(context, input.sequence, x, Keep::kNothing);
    look_at(x, fmt::format("the feed-forward of model.layers.{}", i));
  }
  return first;
}

LanguageModel::DecodeStates LanguageModel::make_decode_states(Context& context, int64_t max_tokens) const {
  DecodeStates states;
  for (const Block& block : blocks_) states.blocks.push_back(block.mixer->make_decode_state(context, max_tokens));
  return states;
}

void LanguageModel::extend(Context& context, DecodeStates& states, const Tensor& tokens, Tensor logits) const {
  Stream& stream = context.stream;
  Arena& scratch = stream.scratch();
  Arena::Scope scope(scratch);
  const int64_t N = tokens.dim(0), D = config_.hidden_size, num_logits = logits.dim(0);
  CHECK(num_logits <= N, "logits of ", num_logits, " tokens wanted from ", N);
  const Tensor positions = scratch.allocate(DType::kI32, {N});
  std::vector<int32_t> counted(static_cast<size_t>(N));
  std::iota(counted.begin(), counted.end(), static_cast<int32_t>(states.num_tokens));
  transfer(stream, positions, Tensor(counted.data(), DType::kI32, {N}));
  const Sequence sequence{.documents = Documents::single(N), .positions = positions};
  const Tensor rstd = scratch.allocate(final_norm_->value.dtype(), {N});
  const Tensor x = scratch.allocate(context.residual, {N, D});
  const Tensor normed = scratch.allocate(context.dtype, {N, D});
  const Tensor y = scratch.allocate(context.dtype, {N, D});
  // Every tensor rank holds all of the few tokens here; partial sums are added in place.
  Communicator& tensor = context.mesh.tensor();
  need_embedding(context);
  embedding_forward(stream, x, tokens, embedding_->value,
                    {.begin = embedding_->block.start[0], .total = config_.vocab_size});
  tensor.all_reduce(stream, x, ReduceOp::kSum);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const Block& block = blocks_[i];
    const RoundedWeights weights = need_block(context, i, group_of_block(i) + 1);
    rms_norm_forward(stream, normed, rstd, x, block.mixer_norm->value, config_.norm_eps, config_.norm);
    block.mixer->extend(context, *states.blocks[i], sequence, normed, y);
    tensor.all_reduce(stream, y, ReduceOp::kSum);
    add(stream, x, x, y);
    Arena::Scope inner(context.activations);
    rms_norm_forward(stream, normed, rstd, x, block.mlp_norm->value, config_.norm_eps, config_.norm);
    block.mlp->forward(context, sequence, normed, y, Write::kOverwrite);
    tensor.all_reduce(stream, y, ReduceOp::kSum);
    add(stream, x, x, y);
  }
  need_head(context, ParameterHooks::kNoGroup);
  rms_norm_forward(stream, y, rstd, x, final_norm_->value, config_.norm_eps, config_.norm);
  project_logits(context, y.rows(N - num_logits, num_logits), logits);
  states.num_tokens += N;
}

std::vector<LanguageModel::FlopsOfKind> LanguageModel::flops_by_kind(int64_t row_length) const {
  std::map<std::string, FlopsOfKind> kinds;
  const auto count = [&](const std::string& kind, double flops) {
    FlopsOfKind& entry = kinds[kind];
    entry.kind = kind;
    entry.count += 1;
    entry.per_token += flops;
  };
  for (const Block& block : blocks_) {
    count(block.kind,
          6.0 * static_cast<double>(block.mixer_product_elements) + 3.0 * block.mixer->flops_per_token(row_length));
    count(block.has_experts ? "moe" : "mlp",
          6.0 * static_cast<double>(block.mlp_product_elements) + 3.0 * block.mlp->flops_per_token());
  }
  count("head", 6.0 * static_cast<double>(head_->spec.shape.numel()));
  std::vector<FlopsOfKind> result;
  result.reserve(kinds.size());
  for (auto& [kind, entry] : kinds) result.push_back(std::move(entry));
  return result;
}

double LanguageModel::flops_per_token(int64_t row_length) const {
  double total = 0.0;
  for (const FlopsOfKind& kind : flops_by_kind(row_length)) total += kind.per_token;
  return total;
}

}  // namespace palimpsest
