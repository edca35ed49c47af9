// Collectives over NCCL, on the memory of the ranks' GPUs, within a host large ones as copies (nccl/peer_copies.h);
// tensors in host memory go over MPI as on any machine, and so does what NCCL needs to begin. They run on a stream of
// their own, in the order in which they were started, beside what the caller's stream does until wait(). A build
// without NCCL has none of this (parallel/no_nccl).
#pragma once

#include <mpi.h>

#include <memory>
#include <string>

#include "parallel/communicator.h"
#include "parallel/gpu_links.h"
#include "parallel/watchdog.h"

namespace palimpsest {

// Over the current GPU of each rank of `comm`, which it takes over: a GPU serves one rank, unless they may share it.
// Every rank of `comm` calls it. The watchdog must outlive it; it ends the job when a collective makes no progress in
// time, or fails.
std::unique_ptr<Communicator> make_nccl_communicator(std::string axis, MPI_Comm comm, Watchdog& watchdog,
                                                     const GpuLinks& links);

}  // namespace palimpsest
