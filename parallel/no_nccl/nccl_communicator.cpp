// A build without NCCL: one rank may have a GPU, several may not.
#include "parallel/nccl_communicator.h"

#include "kernels/check.h"

namespace palimpsest {

std::unique_ptr<Communicator> make_nccl_communicator(std::string, MPI_Comm, Watchdog&, const GpuLinks&) {
  throw_user_error("several ranks on GPUs talk through NCCL, and this build was made without it; try device=cpu");
}

}  // namespace palimpsest
