// Tensors on their way between ranks while a layer computes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "parallel/communicator.h"

namespace palimpsest {

struct RowPart {
  int64_t first = 0, count = 0;
};

// One that may still be coming: who takes it as a tensor waits for it, so that it can be asked for early and cost
// nothing when it is used late. Some rows may be here from the start.
class LateTensor {
 public:
  LateTensor(const Tensor& tensor) : tensor_(tensor) {}  // NOLINT: one that is here stands for itself in calls
  LateTensor(const Tensor& tensor, std::unique_ptr<Pending> pending, RowPart here)
      : tensor_(tensor), pending_(std::move(pending)), here_(here) {}

  operator const Tensor&() const {  // NOLINT: stands for the tensor in calls
    if (pending_) pending_->wait();
    return tensor_;
  }
  int64_t dim(int i) const { return tensor_.dim(i); }

  // Calls body(part, rows) for parts that together are all rows, those that are here before it waits for the others.
  bool in_parts() const { return pending_ != nullptr && here_.count > 0; }
  template <class Body>
  void for_each_part(Body&& body) const {
    const auto call = [&](RowPart rows) {
      if (rows.count > 0) body(tensor_.rows(rows.first, rows.count), rows);
    };
    const int64_t end = here_.first + here_.count;
    call(here_);
    if (pending_) pending_->wait();
    call({0, here_.first});
    call({end, tensor_.dim(0) - end});
  }

 private:
  Tensor tensor_;
  std::unique_ptr<Pending> pending_;
  RowPart here_;
};

// One of whose rows each part has others who wait for it.
class AwaitedRows {
 public:
  AwaitedRows() = default;                                // absent
  AwaitedRows(const Tensor& tensor) : tensor_(tensor) {}  // NOLINT: nobody waits for it
  // send(i) when part i is filled. The parts are best filled in their order.
  AwaitedRows(const Tensor& tensor, std::vector<RowPart> parts, std::function<void(size_t)> send)
      : tensor_(tensor), parts_(std::move(parts)), send_(std::move(send)) {}

  // For who fills it without saying so.
  operator const Tensor&() const { return tensor_; }  // NOLINT: stands for the tensor in calls
  bool defined() const { return tensor_.defined(); }
  bool in_parts() const { return !parts_.empty(); }
  // Calls body(part, rows) for the parts and sends each.
  template <class Body>
  void fill(Body&& body) const {
    for (size_t i = 0; i < parts_.size(); ++i) {
      const RowPart rows = parts_[i];
      if (rows.count > 0) body(tensor_.rows(rows.first, rows.count), rows);
      send_(i);
    }
  }

 private:
  Tensor tensor_;
  std::vector<RowPart> parts_;
  std::function<void(size_t)> send_;
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
