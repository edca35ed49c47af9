// Tensors on their way between ranks while a layer computes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "parallel/communicator.h"

namespace palimpsest {

// One that may still be coming: who takes it as a tensor waits for it, so that it can be asked for early and cost
// nothing when it is used late.
class LateTensor {
 public:
  LateTensor(const Tensor& tensor) : tensor_(tensor) {}  // NOLINT: one that is here stands for itself in calls
  LateTensor(const Tensor& tensor, std::unique_ptr<Pending> pending) : tensor_(tensor), pending_(std::move(pending)) {}

  operator const Tensor&() const {  // NOLINT: stands for the tensor in calls
    if (pending_) pending_->wait();
    return tensor_;
  }
  int64_t dim(int i) const { return tensor_.dim(i); }

 private:
  Tensor tensor_;
  std::unique_ptr<Pending> pending_;
};

// One that others wait for: who has filled it says so, and goes on with what they need not wait for. Then he may say
// that there is no more than such work left, so that what has become of it meanwhile is taken and sent on under that.
class AwaitedTensor {
 public:
  AwaitedTensor(const Tensor& tensor) : tensor_(tensor) {}  // NOLINT: nobody waits for it
  AwaitedTensor(const Tensor& tensor, std::function<void()> send, std::function<void()> take)
      : tensor_(tensor), send_(std::move(send)), take_(std::move(take)) {}

  operator const Tensor&() const { return tensor_; }  // NOLINT: stands for the tensor in calls
  void filled() const {
    if (send_) send_();
  }
  void may_be_taken() const {
    if (take_) take_();
  }

 private:
  Tensor tensor_;
  std::function<void()> send_, take_;
};

}  // namespace palimpsest
