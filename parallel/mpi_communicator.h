// Collectives over MPI, on host memory. All of them are started non-blocking and waited for under the watchdog.
#pragma once

#include <mpi.h>

#include <memory>
#include <string>

#include "parallel/communicator.h"
#include "parallel/watchdog.h"

namespace palimpsest {

// Throws an Error with MPI's own text when a call fails.
void check_mpi(int result, const char* call);

class MpiCommunicator : public Communicator {
 public:
  // Takes over `comm` and frees it at the end. The watchdog must outlive it.
  MpiCommunicator(std::string axis, MPI_Comm comm, Watchdog& watchdog);
  ~MpiCommunicator() override;

  void set_step(int64_t step) override { watchdog_.set_step(step); }

 protected:
  Watchdog& watchdog() { return watchdog_; }

  std::unique_ptr<Pending> launch_all_reduce(Stream& stream, std::span<const Tensor> tensors, ReduceOp op) override;
  std::unique_ptr<Pending> launch_all_gather(Stream& stream, std::span<const Parts> tensors) override;
  std::unique_ptr<Pending> launch_reduce_scatter(Stream& stream, std::span<const Parts> tensors) override;
  std::unique_ptr<Pending> launch_broadcast(Stream& stream, const Tensor& x, int64_t root) override;
  std::unique_ptr<Pending> launch_send_receive(Stream& stream, const Tensor& out, int64_t to, const Tensor& in,
                                               int64_t from) override;
  std::unique_ptr<Pending> launch_barrier(Stream& stream) override;

 private:
  MPI_Comm comm_;
  Watchdog& watchdog_;
};

}  // namespace palimpsest
