// Where whole values come from, and where whole gradients go, when a rank holds shards of them. The model says what it
// comes to, group by group (parameters.h), and knows nothing else of it.
#pragma once

#include <cstdint>

namespace palimpsest {

struct Context;

class ParameterHooks {
 public:
  static constexpr int64_t kNoGroup = -1;

  // Everything is whole and there: does nothing.
  static ParameterHooks& none() {
    static ParameterHooks hooks;
    return hooks;
  }
  virtual ~ParameterHooks() = default;

  // Returns when the whole values of the group are there; they stay until another group of its slot is asked for.
  // `next` will be asked for after it, so that its values can come meanwhile.
  virtual void need_values(Context&, int64_t /*group*/, int64_t /*next*/ = kNoGroup) {}
  // From here on the micro-batch adds to the group's gradients ...
  virtual void before_backward(Context&, int64_t /*group*/) {}
  // ... and here all of its own is in them.
  virtual void after_backward(Context&, int64_t /*group*/) {}
  // The shards' values are new (an optimizer step, a loaded checkpoint): whole values are no longer what they were.
  // Those that this rank keeps whole are right again when it returns, on a GPU when they are needed next.
  virtual void values_changed(Context&) {}
};

}  // namespace palimpsest
