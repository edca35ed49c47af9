#include "parallel/communicator.h"

#include <algorithm>
#include <utility>

#include "kernels/elementwise.h"
#include "kernels/trace.h"

namespace palimpsest {

namespace {

// What has nothing to wait for: a group of one, a rehearsal.
class Done : public Pending {
 public:
  void wait() override {}
};

void check_parts(const char* what, const Tensor& whole, const Tensor& part, int64_t size) {
  CHECK(whole.dtype() == part.dtype() && whole.numel() == size * part.numel(), what, ": ", whole.str(), " is not ",
        size, " times ", part.str());
  check_contiguous(what, whole);
  check_contiguous(what, part);
}

// A copy between tensors whose shapes may differ.
void copy_flat(Stream& stream, const Tensor& to, const Tensor& from) {
  if (to.raw() != from.raw()) copy(stream, to.view({to.numel()}), from.view({from.numel()}));
}

}  // namespace

std::unique_ptr<Pending> Communicator::start_all_reduce(Stream& stream, Tensor x, ReduceOp op) {
  return start_all_reduce(stream, std::vector<Tensor>{x}, op);
}

std::unique_ptr<Pending> Communicator::start_all_reduce(Stream& stream, std::vector<Tensor> tensors, ReduceOp op) {
  std::erase_if(tensors, [](const Tensor& x) { return x.numel() == 0; });
  for (const Tensor& x : tensors) {
    check_contiguous("all_reduce", x);
    bytes_sent_ += 2 * x.bytes() * (size_ - 1) / size_;
  }
  if (size_ == 1 || tensors.empty() || stream.is_planning()) return std::make_unique<Done>();
  const TraceRange range("all_reduce");
  return launch_all_reduce(stream, tensors, op);
}

std::unique_ptr<Pending> Communicator::start_all_gather(Stream& stream, std::vector<Parts> tensors) {
  if (!prepare("all_gather", stream, tensors, [](const Parts& t) { return std::pair(t.whole, t.part); }))
    return std::make_unique<Done>();
  const TraceRange range("all_gather");
  return launch_all_gather(stream, tensors);
}

std::unique_ptr<Pending> Communicator::start_reduce_scatter(Stream& stream, std::vector<Parts> tensors) {
  const bool goes_on =
      prepare("reduce_scatter", stream, tensors, [](const Parts& t) { return std::pair(t.part, t.whole); });
  if (size_ > 1 && !tensors.empty())
    workspace_bytes_ = std::max(workspace_bytes_, workspace_of_reduce_scatter(tensors));
  if (!goes_on) return std::make_unique<Done>();
  const TraceRange range("reduce_scatter");
  return launch_reduce_scatter(stream, tensors);
}

// Whether there is something to launch. Leaves the tensors that are not empty. copy_of gives {to, from} of what a group
// of one copies.
template <class Copy>
bool Communicator::prepare(const char* what, Stream& stream, std::vector<Parts>& tensors, Copy&& copy_of) {
  for (const Parts& tensor : tensors) check_parts(what, tensor.whole, tensor.part, size_);
  std::erase_if(tensors, [](const Parts& tensor) { return tensor.part.numel() == 0; });
  for (const Parts& tensor : tensors) {
    bytes_sent_ += tensor.part.bytes() * (size_ - 1);
    if (size_ > 1) continue;
    const auto [to, from] = copy_of(tensor);
    copy_flat(stream, to, from);
  }
  return size_ > 1 && !tensors.empty() && !stream.is_planning();
}

std::unique_ptr<Pending> Communicator::start_send_receive(Stream& stream, const Tensor& out, int64_t to, Tensor in,
                                                          int64_t from) {
  CHECK(to < size_ && from < size_ && to != rank_ && from != rank_, "send to ", to, ", receive from ", from,
        " on rank ", rank_, " of ", size_);
  if (to >= 0) bytes_sent_ += out.bytes();
  if (stream.is_planning() || (to < 0 && from < 0)) return std::make_unique<Done>();
  return launch_send_receive(stream, out, to, in, from);
}

std::unique_ptr<Pending> Communicator::start_shift(Stream& stream, const Tensor& out, Tensor in, int64_t by) {
  CHECK(by > 0 && by < size_, "a shift by ", by, " of ", size_, " ranks");
  CHECK(out.bytes() == in.bytes(), "a shift of ", out.str(), " to ", in.str());
  check_contiguous("shift", out);
  check_contiguous("shift", in);
  bytes_sent_ += out.bytes();
  if (stream.is_planning() || out.numel() == 0) return std::make_unique<Done>();
  const TraceRange range("shift");
  return launch_shift(stream, out, in, by);
}

void Communicator::all_reduce(Stream& stream, Tensor x, ReduceOp op) {
  start_all_reduce(stream, x, op)->wait();
}

void Communicator::all_gather(Stream& stream, Tensor out, const Tensor& in) {
  start_all_gather(stream, {{.whole = out, .part = in}})->wait();
}

void Communicator::reduce_scatter(Stream& stream, Tensor out, const Tensor& in) {
  start_reduce_scatter(stream, {{.whole = in, .part = out}})->wait();
}

void Communicator::broadcast(Stream& stream, Tensor x, int64_t root) {
  check_contiguous("broadcast", x);
  CHECK(root >= 0 && root < size_, "broadcast from rank ", root, " of ", size_);
  if (size_ == 1 || x.numel() == 0) return;
  if (rank_ == root) bytes_sent_ += x.bytes();
  if (!stream.is_planning()) launch_broadcast(stream, x, root)->wait();
}

void Communicator::send_receive(Stream& stream, const Tensor& out, int64_t to, Tensor in, int64_t from) {
  start_send_receive(stream, out, to, in, from)->wait();
}

void Communicator::barrier(Stream& stream) {
  if (size_ > 1 && !stream.is_planning()) launch_barrier(stream)->wait();
}

void Communicator::take_workspace() {}

void Communicator::leave_others_memory() noexcept {}

std::string Communicator::notice() const {
  return {};
}

void Communicator::set_step(int64_t) {}

// A group of one never comes here; a backend overrides all of them.
std::unique_ptr<Pending> Communicator::launch_all_reduce(Stream&, std::span<const Tensor>, ReduceOp) {
  return std::make_unique<Done>();
}
std::unique_ptr<Pending> Communicator::launch_all_gather(Stream&, std::span<const Parts>) {
  return std::make_unique<Done>();
}
std::unique_ptr<Pending> Communicator::launch_reduce_scatter(Stream&, std::span<const Parts>) {
  return std::make_unique<Done>();
}
std::unique_ptr<Pending> Communicator::launch_broadcast(Stream&, const Tensor&, int64_t) {
  return std::make_unique<Done>();
}
std::unique_ptr<Pending> Communicator::launch_send_receive(Stream&, const Tensor&, int64_t, const Tensor&, int64_t) {
  return std::make_unique<Done>();
}
std::unique_ptr<Pending> Communicator::launch_shift(Stream& stream, const Tensor& out, const Tensor& in, int64_t by) {
  return launch_send_receive(stream, out, (rank_ + by) % size_, in, (rank_ + size_ - by) % size_);
}
std::unique_ptr<Pending> Communicator::launch_barrier(Stream&) {
  return std::make_unique<Done>();
}
int64_t Communicator::workspace_of_reduce_scatter(std::span<const Parts>) const {
  return 0;
}

}  // namespace palimpsest
