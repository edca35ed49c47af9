// SwiGLU feed-forward: y = Wdown ( silu(Wgate x) * (Wup x) ).
#pragma once

#include <string>

#include "model/layer.h"
#include "model/parameters.h"

namespace palimpsest {

class Mlp : public FeedForward {
 public:
  // Declares <prefix>{gate,up,down}_proj.weight. `field` of the config holds the size, for messages.
  Mlp(int64_t intermediate_size, const std::string& field, int64_t hidden_size, const std::string& prefix,
      ParameterRegistry& registry);

  std::unique_ptr<Saved> forward(Context& context, const Sequence& sequence, const LateTensor& x, const AwaitedRows& y,
                                 Write write) const override;
  void backward(Context& context, const Sequence& sequence, const Saved& saved, const LateTensor& x, const Tensor& dy,
                const AwaitedTensor& dx) const override;

 private:
  int64_t intermediate_size_;
  ParameterStack* gate_up_;  // [2F, D]
  Parameter* down_;          // [D, F]
};

}  // namespace palimpsest
