#include "parallel/nccl_communicator.h"

#include <nccl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <utility>

#include "kernels/cuda/engine.h"
#include "parallel/agreement.h"
#include "parallel/mpi_communicator.h"
#include "parallel/nccl/collective_queue.h"
#include "parallel/nccl/peer_copies.h"

namespace palimpsest {

namespace {

[[noreturn]] void throw_nccl_failure(const char* file, int line, const char* expression, ncclResult_t result,
                                     ncclComm_t comm) {
  detail::throw_check_failure(file, line, expression,
                              detail::concatenate(ncclGetErrorString(result), ": ", ncclGetLastError(comm)));
}

#define NCCL_CHECK(comm, call)                                                                                    \
  do {                                                                                                            \
    const ncclResult_t nccl_check_result = (call);                                                                \
    if (nccl_check_result != ncclSuccess) throw_nccl_failure(__FILE__, __LINE__, #call, nccl_check_result, comm); \
  } while (false)

class NcclPending : public Pending {
 public:
  NcclPending(CollectiveQueue& queue, int64_t number, cudaStream_t caller)
      : queue_(queue), number_(number), caller_(caller) {}
  void wait() override { queue_.wait(number_, caller_); }

 private:
  CollectiveQueue& queue_;
  int64_t number_;
  cudaStream_t caller_;
};

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ncclFloat32;
    case DType::kF64:
      return ncclFloat64;
    case DType::kBF16:
      return ncclBfloat16;
    case DType::kI32:
      return ncclInt32;
    case DType::kI64:
      return ncclInt64;
    case DType::kU8:
      break;
  }
  CHECK(false, "NCCL does not reduce ", name_of(dtype));
  return ncclUint8;
}

size_t count_of(const Tensor& tensor) {
  return static_cast<size_t>(tensor.numel());
}
size_t bytes_of(const Tensor& tensor) {
  return static_cast<size_t>(tensor.bytes());
}

// Calls that start together, also where one of them fails: the library would hold back all later ones.
class NcclGroup {
 public:
  explicit NcclGroup(ncclComm_t comm) { NCCL_CHECK(comm, ncclGroupStart()); }
  ~NcclGroup() {
    if (is_open_) ncclGroupEnd();
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  ncclResult_t end() {
    is_open_ = false;
    return ncclGroupEnd();
  }

 private:
  bool is_open_ = true;
};

class NcclCommunicator : public MpiCommunicator, private Watchdog::Source {
 public:
  NcclCommunicator(std::string axis, MPI_Comm comm, Watchdog& watchdog, const GpuLinks& links)
      : MpiCommunicator(std::move(axis), comm, watchdog) {
    const Watchdog::Guard guard(watchdog, "the start of NCCL", this->axis());
    if (links.share_gpus) pass_for_own_host();
    agree_on_memory_of_peers();
    ncclUniqueId id = {};
    if (rank() == 0) NCCL_CHECK(nullptr, ncclGetUniqueId(&id));
    const std::string bytes = broadcast_text(*this, std::string(id.internal, sizeof(id.internal)));
    std::memcpy(id.internal, bytes.data(), sizeof(id.internal));
    NCCL_CHECK(nullptr, ncclCommInitRank(&nccl_, static_cast<int>(size()), id, static_cast<int>(rank())));
    if (may_map_) {
      auto [copies, obstacle] = PeerCopies::make(comm, this->axis(), links.least_copied_bytes);
      copies_ = std::move(copies);
      obstacle_ = obstacle;
    }
    watchdog.add(*this);
  }

  // The end in good order waits for the other ranks, which are not there when something failed.
  ~NcclCommunicator() override {
    watchdog().remove(*this);
    const Watchdog::Guard guard(watchdog(), "the end of NCCL", axis());
    if (std::uncaught_exceptions() == 0 && queue_.drain()) {
      if (copies_) copies_->unmap_all();
      ncclCommDestroy(nccl_);
    } else {
      ncclCommAbort(nccl_);
      static_cast<void>(copies_.release());  // memory is not given back while somebody may still write to it
    }
  }

  void take_workspace() override {
    if (!copies_) return;
    const Watchdog::Guard guard(watchdog(), "the start of copies", axis());
    copies_->reserve(workspace_bytes());
  }
  void leave_others_memory() noexcept override {
    if (!copies_) return;
    const Watchdog::Guard guard(watchdog(), "the end of copies", axis());
    if (queue_.drain()) copies_->unmap_tensors();
  }
  std::string notice() const override {
    if (copies_ || obstacle_ == PeerCopies::Obstacle::kSeveralHosts) return {};
    return detail::concatenate("axis ", axis(), " sends all by NCCL, nothing as copies: ",
                               may_map_ ? PeerCopies::text_of(obstacle_) : "NCCL_P2P_DISABLE is set");
  }

 protected:
  std::unique_ptr<Pending> launch_all_reduce(Stream& stream, std::span<const Tensor> tensors, ReduceOp op) override {
    if (tensors.front().device() == Device::kCpu) return MpiCommunicator::launch_all_reduce(stream, tensors, op);
    return start("all_reduce", stream, [&](cudaStream_t queue) {
      return together(tensors, [&](const Tensor& x) {
        return ncclAllReduce(x.raw(), x.raw(), count_of(x), nccl_type(x.dtype()),
                             op == ReduceOp::kSum ? ncclSum : ncclMax, nccl_, queue);
      });
    });
  }

  std::unique_ptr<Pending> launch_all_gather(Stream& stream, std::span<const Parts> tensors) override {
    if (tensors.front().whole.device() == Device::kCpu) return MpiCommunicator::launch_all_gather(stream, tensors);
    return start("all_gather", stream, [&](cudaStream_t queue) {
      if (copies_ && copies_->all_gather(queue, tensors)) return ncclSuccess;
      return together(tensors, [&](const Parts& tensor) {
        return ncclAllGather(tensor.part.raw(), tensor.whole.raw(), bytes_of(tensor.part), ncclUint8, nccl_, queue);
      });
    });
  }

  std::unique_ptr<Pending> launch_reduce_scatter(Stream& stream, std::span<const Parts> tensors) override {
    if (tensors.front().whole.device() == Device::kCpu) return MpiCommunicator::launch_reduce_scatter(stream, tensors);
    return start("reduce_scatter", stream, [&](cudaStream_t queue) {
      if (copies_ && copies_->reduce_scatter(queue, tensors)) return ncclSuccess;
      return together(tensors, [&](const Parts& tensor) {
        return ncclReduceScatter(tensor.whole.raw(), tensor.part.raw(), count_of(tensor.part),
                                 nccl_type(tensor.part.dtype()), ncclSum, nccl_, queue);
      });
    });
  }

  std::unique_ptr<Pending> launch_broadcast(Stream& stream, const Tensor& x, int64_t root) override {
    if (x.device() == Device::kCpu) return MpiCommunicator::launch_broadcast(stream, x, root);
    return start("broadcast", stream, [&](cudaStream_t queue) {
      return ncclBroadcast(x.raw(), x.raw(), bytes_of(x), ncclUint8, static_cast<int>(root), nccl_, queue);
    });
  }

  std::unique_ptr<Pending> launch_send_receive(Stream& stream, const Tensor& out, int64_t to, const Tensor& in,
                                               int64_t from) override {
    if ((to >= 0 ? out : in).device() == Device::kCpu)
      return MpiCommunicator::launch_send_receive(stream, out, to, in, from);
    if (to >= 0) check_contiguous("send", out);
    if (from >= 0) check_contiguous("receive", in);
    return start("send_receive", stream, [&](cudaStream_t queue) { return send_receive(queue, out, to, in, from); });
  }

  std::unique_ptr<Pending> launch_shift(Stream& stream, const Tensor& out, const Tensor& in, int64_t by) override {
    if (out.device() == Device::kCpu) return MpiCommunicator::launch_shift(stream, out, in, by);
    return start("shift", stream, [&](cudaStream_t queue) {
      if (copies_ && copies_->shift(queue, out, in, by)) return ncclSuccess;
      return send_receive(queue, out, (rank() + by) % size(), in, (rank() + size() - by) % size());
    });
  }

  int64_t workspace_of_reduce_scatter(std::span<const Parts> tensors) const override {
    if (!copies_ || tensors.front().whole.device() == Device::kCpu) return 0;
    return copies_->workspace_bytes(tensors);
  }

 private:
  // NCCL refuses two ranks on one GPU of a host, and tells hosts apart by this name where it is set.
  static void pass_for_own_host() { set_variable("NCCL_HOSTID", detail::concatenate(host_name(), ".", ::getpid())); }

  // Who forbids NCCL to use memory from GPU to GPU has a machine where that does not work. A word to one rank is one to
  // all: they would wait for each other, and NCCL itself fails where they differ.
  void agree_on_memory_of_peers() {
    const char* disabled = std::getenv("NCCL_P2P_DISABLE");
    const bool here = disabled != nullptr && std::strtol(disabled, nullptr, 10) != 0;
    may_map_ = max_over(*this, here ? 1 : 0) == 0;
    if (!may_map_) set_variable("NCCL_P2P_DISABLE", "1");
  }
  static void set_variable(const char* name, const std::string& value) {
    CHECK(::setenv(name, value.c_str(), 1) == 0, "setenv: ", std::strerror(errno));
  }

  // A rank of -1: nothing that way.
  ncclResult_t send_receive(cudaStream_t queue, const Tensor& out, int64_t to, const Tensor& in, int64_t from) {
    NcclGroup group(nccl_);
    if (to >= 0) NCCL_CHECK(nccl_, ncclSend(out.raw(), bytes_of(out), ncclUint8, static_cast<int>(to), nccl_, queue));
    if (from >= 0) NCCL_CHECK(nccl_, ncclRecv(in.raw(), bytes_of(in), ncclUint8, static_cast<int>(from), nccl_, queue));
    return group.end();
  }

  // One launch for all.
  template <class Operand, class Launch>
  ncclResult_t together(std::span<const Operand> tensors, Launch&& launch) {
    NcclGroup group(nccl_);
    for (const Operand& tensor : tensors) NCCL_CHECK(nccl_, launch(tensor));
    return group.end();
  }

  // The first use of a connection waits for the other rank in the call itself.
  template <class Launch>
  std::unique_ptr<Pending> start(const char* operation, Stream& stream, Launch&& launch) {
    const Watchdog::Guard guard(watchdog(), operation, axis());
    const cudaStream_t caller = cuda::queue_of(stream);
    const int64_t number =
        queue_.start(operation, caller, [&](cudaStream_t queue) { NCCL_CHECK(nccl_, launch(queue)); });
    return std::make_unique<NcclPending>(queue_, number, caller);
  }

  std::optional<Oldest> oldest() override {
    std::optional<Oldest> oldest = queue_.oldest();
    ncclResult_t state = ncclSuccess;
    if (oldest && (ncclCommGetAsyncError(nccl_, &state) != ncclSuccess || state != ncclSuccess))
      oldest->failure = detail::concatenate(ncclGetErrorString(state), ": ", ncclGetLastError(nccl_));
    return oldest;
  }
  const std::string& axis_name() const override { return axis(); }

  CollectiveQueue queue_;
  ncclComm_t nccl_ = nullptr;
  bool may_map_ = true;                 // others' memory
  std::unique_ptr<PeerCopies> copies_;  // null where there is an obstacle
  PeerCopies::Obstacle obstacle_ = PeerCopies::Obstacle::kNone;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(std::string axis, MPI_Comm comm, Watchdog& watchdog,
                                                     const GpuLinks& links) {
  return std::make_unique<NcclCommunicator>(std::move(axis), comm, watchdog, links);
}

}  // namespace palimpsest
