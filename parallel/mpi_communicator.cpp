#include "parallel/mpi_communicator.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstddef>
#include <thread>
#include <utility>
#include <vector>

namespace palimpsest {

namespace {

class MpiPending : public Pending {
 public:
  MpiPending(const char* operation, const std::string& axis, Watchdog& watchdog)
      : operation_(operation), axis_(axis), watchdog_(watchdog) {}

  MPI_Request* add_request() { return &requests_.emplace_back(MPI_REQUEST_NULL); }

  // Not MPI_Waitall, which keeps a core busy that another rank of an oversubscribed machine may need in order to
  // arrive. Naps grow with the time waited, so that they lengthen it by little and many waiting ranks cost little.
  void wait() override {
    using Clock = std::chrono::steady_clock;
    const Watchdog::Guard guard(watchdog_, operation_, axis_);
    const auto begin = Clock::now();
    while (!is_done()) {
      const auto waited = Clock::now() - begin;
      if (waited > kBusyWait) std::this_thread::sleep_for(std::clamp<Clock::duration>(waited / 16, kNap, kLongNap));
    }
  }

  void advance() override { is_done(); }

 private:
  static constexpr std::chrono::microseconds kBusyWait{50}, kNap{50}, kLongNap{2000};

  bool is_done() {
    int done = 0;
    check_mpi(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, MPI_STATUSES_IGNORE),
              operation_);
    return done != 0;
  }

  const char* operation_;
  const std::string& axis_;
  Watchdog& watchdog_;
  std::vector<MPI_Request> requests_;
};

MPI_Datatype mpi_type(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return MPI_FLOAT;
    case DType::kF64:
      return MPI_DOUBLE;
    case DType::kI32:
      return MPI_INT32_T;
    case DType::kI64:
      return MPI_INT64_T;
    default:
      break;
  }
  CHECK(false, "MPI does not reduce ", name_of(dtype));
  return MPI_DATATYPE_NULL;
}

void* host_memory(const Tensor& tensor) {
  CHECK(tensor.device() == Device::kCpu, "MPI moves host memory, not ", tensor.str());
  return tensor.raw();
}

// Counts of MPI are ints. Large tensors go in parts of this many elements.
constexpr int64_t kMaxCount = int64_t{1} << 30;
static_assert(kMaxCount <= INT_MAX);

int checked_count(int64_t count) {
  CHECK(count <= kMaxCount, "one collective of ", count, " elements; at most ", kMaxCount);
  return static_cast<int>(count);
}

}  // namespace

void check_mpi(int result, const char* call) {
  if (result == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(result, text, &length);
  CHECK(false, call, ": ", std::string(text, static_cast<size_t>(length)));
}

MpiCommunicator::MpiCommunicator(std::string axis, MPI_Comm comm, Watchdog& watchdog)
    : Communicator(
          std::move(axis),
          [&] {
            int rank = 0;
            check_mpi(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
            return int64_t{rank};
          }(),
          [&] {
            int size = 0;
            check_mpi(MPI_Comm_size(comm, &size), "MPI_Comm_size");
            return int64_t{size};
          }()),
      comm_(comm),
      watchdog_(watchdog) {
  check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
}

MpiCommunicator::~MpiCommunicator() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (!finalized) MPI_Comm_free(&comm_);
}

std::unique_ptr<Pending> MpiCommunicator::launch_all_reduce(Stream&, std::span<const Tensor> tensors, ReduceOp op) {
  auto pending = std::make_unique<MpiPending>("all_reduce", axis(), watchdog_);
  for (const Tensor& x : tensors)
    check_mpi(MPI_Iallreduce(MPI_IN_PLACE, host_memory(x), checked_count(x.numel()), mpi_type(x.dtype()),
                             op == ReduceOp::kSum ? MPI_SUM : MPI_MAX, comm_, pending->add_request()),
              "MPI_Iallreduce");
  return pending;
}

std::unique_ptr<Pending> MpiCommunicator::launch_all_gather(Stream&, std::span<const Parts> tensors) {
  auto pending = std::make_unique<MpiPending>("all_gather", axis(), watchdog_);
  for (const auto& [whole, part] : tensors) {
    const int bytes = checked_count(part.bytes());
    const bool in_place = part.raw() == static_cast<std::byte*>(whole.raw()) + rank() * part.bytes();
    check_mpi(MPI_Iallgather(in_place ? MPI_IN_PLACE : host_memory(part), bytes, MPI_BYTE, host_memory(whole), bytes,
                             MPI_BYTE, comm_, pending->add_request()),
              "MPI_Iallgather");
  }
  return pending;
}

std::unique_ptr<Pending> MpiCommunicator::launch_reduce_scatter(Stream&, std::span<const Parts> tensors) {
  auto pending = std::make_unique<MpiPending>("reduce_scatter", axis(), watchdog_);
  for (const auto& [whole, part] : tensors)
    check_mpi(MPI_Ireduce_scatter_block(host_memory(whole), host_memory(part), checked_count(part.numel()),
                                        mpi_type(part.dtype()), MPI_SUM, comm_, pending->add_request()),
              "MPI_Ireduce_scatter_block");
  return pending;
}

std::unique_ptr<Pending> MpiCommunicator::launch_broadcast(Stream&, const Tensor& x, int64_t root) {
  auto pending = std::make_unique<MpiPending>("broadcast", axis(), watchdog_);
  check_mpi(MPI_Ibcast(host_memory(x), checked_count(x.bytes()), MPI_BYTE, static_cast<int>(root), comm_,
                       pending->add_request()),
            "MPI_Ibcast");
  return pending;
}

std::unique_ptr<Pending> MpiCommunicator::launch_send_receive(Stream&, const Tensor& out, int64_t to, const Tensor& in,
                                                              int64_t from) {
  constexpr int kTag = 0;
  auto pending = std::make_unique<MpiPending>("send_receive", axis(), watchdog_);
  if (from >= 0) {
    check_contiguous("receive", in);
    check_mpi(MPI_Irecv(host_memory(in), checked_count(in.bytes()), MPI_BYTE, static_cast<int>(from), kTag, comm_,
                        pending->add_request()),
              "MPI_Irecv");
  }
  if (to >= 0) {
    check_contiguous("send", out);
    check_mpi(MPI_Isend(host_memory(out), checked_count(out.bytes()), MPI_BYTE, static_cast<int>(to), kTag, comm_,
                        pending->add_request()),
              "MPI_Isend");
  }
  return pending;
}

std::unique_ptr<Pending> MpiCommunicator::launch_barrier(Stream&) {
  auto pending = std::make_unique<MpiPending>("barrier", axis(), watchdog_);
  check_mpi(MPI_Ibarrier(comm_, pending->add_request()), "MPI_Ibarrier");
  return pending;
}

}  // namespace palimpsest
