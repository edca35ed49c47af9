// The language model: embedding, pre-norm blocks (mixer and feed-forward), final norm, head with its loss.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/layer.h"
#include "model/parameters.h"
#include "model/rounded_weights.h"

namespace palimpsest {

// What backward recomputes in place of keeping: nothing; the feed-forward half of each block; everything but the input
// of each half.
enum class ActivationCheckpointing : uint8_t { kNone, kSelective, kFull };
template <>
struct EnumNames<ActivationCheckpointing> {
  static constexpr const char* values[] = {"none", "selective", "full"};
};

// The tensors may lie in host memory whatever the device.
struct ModelInput {
  Tensor tokens;   // [N] i32
  Tensor targets;  // [N] i32, kIgnoreTarget where nothing is scored; absent when only logits are wanted
  Sequence sequence;
};

struct LossOptions {
  double grad_scale = 1.0;  // 1 / targets of the whole step
  double z_loss = 0.0;      // weight of lse^2
  ActivationCheckpointing checkpointing = ActivationCheckpointing::kNone;
  // [layers with experts, E] f64, += tokens that this rank sent to each expert; absent: not counted.
  Tensor expert_load;
};

// A layer with routed experts.
struct RoutedLayer {
  int64_t layer = 0;
  Parameter* selection_bias = nullptr;  // [E], of sigmoid routers; has no gradient
};

class LanguageModel {
 public:
  // Declares every parameter in the registry, which must outlive the model. Throws a UserError on a bad config.
  LanguageModel(const ModelConfig& config, ParameterRegistry& registry);
  ~LanguageModel();

  const ModelConfig& config() const { return config_; }
  const std::vector<RoutedLayer>& routed_layers() const { return routed_layers_; }

  // Forward and backward of one micro-batch: adds the losses of its targets to loss_sum [1] f64 (without the z terms)
  // and the z terms, with the balance term of routed experts, to z_sum [1] f64, and the gradient of grad_scale * (both
  // sums) to the registry. With a balance term the ranks of the replica group take their micro-batches together, and
  // its load is that of all of them.
  void forward_backward(Context& context, const ModelInput& input, const LossOptions& options, Tensor loss_sum,
                        Tensor z_sum) const;
  // token_loss [N] f32 (f64): loss of each target, 0 where nothing is scored; overwritten.
  void forward_loss(Context& context, const ModelInput& input, Tensor token_loss) const;
  // logits [N, vocab], overwritten. For tests and small inputs.
  void forward_logits(Context& context, const ModelInput& input, Tensor logits) const;

  // For finding faults: runs forward and names the first output that holds a number that is not finite, for example
  // "output of the kda mixer of model.layers.3 on rank 5"; empty when there is none. Every rank of the mesh calls it,
  // each with tokens of its own, and gets the same answer.
  std::string first_non_finite_output(Context& context, const ModelInput& input) const;

  // Decoding of one sequence: the state of every block.
  struct DecodeStates {
    std::vector<std::unique_ptr<DecodeState>> blocks;
    int64_t num_tokens = 0;  // taken in so far
  };
  DecodeStates make_decode_states(Context& context, int64_t max_tokens) const;
  // Continues by tokens [n] i32 and gives the logits [m, vocab] after each of the last m <= n.
  void extend(Context& context, DecodeStates& states, const Tensor& tokens, Tensor logits) const;

  // Forward and backward FLOPs of one token in rows of row_length tokens: 6 * weights of products + 3 * the mixers'
  // own. Recomputation is not counted.
  double flops_per_token(int64_t row_length) const;
  struct FlopsOfKind {
    std::string kind;  // "kda", "mla", ..., "mlp", "moe", "head"
    int64_t count;     // layers of the kind
    double per_token;  // forward and backward, all layers of the kind
  };
  std::vector<FlopsOfKind> flops_by_kind(int64_t row_length) const;  // adds up to flops_per_token

 private:
  struct Block;
  struct SavedBlock;

  // Groups of parameters are numbered embedding, blocks, head.
  int64_t group_of_block(size_t i) const { return embedding_group_ + 1 + static_cast<int64_t>(i); }
  // The values of block i, of the embedding or of final norm and head are there; the next ones may come. A block's are
  // rounded.
  RoundedWeights need_block(Context& context, size_t i, int64_t next) const;
  void need_embedding(Context& context) const;
  void need_head(Context& context, int64_t next) const;

  // Embeddings of the tensor rank's tokens, x [n, D].
  void embed(Context& context, const Tensor& tokens, Tensor x) const;
  // norm(blocks(embedding)) [N, D] of all tokens without keeping anything for backward; lies in scratch memory.
  Tensor forward_hidden(Context& context, const ModelInput& input) const;
  // logits [N, V] of the whole vocabulary from hidden [N, D].
  void project_logits(Context& context, const Tensor& hidden, Tensor logits) const;

  ModelConfig config_;
  std::vector<Block> blocks_;
  std::vector<RoutedLayer> routed_layers_;
  Parameter* embedding_ = nullptr;
  Parameter* final_norm_ = nullptr;
  Parameter* head_ = nullptr;  // the embedding when tied
  int64_t embedding_group_ = 0;
  int64_t head_group_ = 0;  // final norm, and the head when it is not the embedding
};

}  // namespace palimpsest
