// MPI for the life of the process.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>

#include "parallel/gpu_links.h"
#include "parallel/mesh.h"
#include "parallel/watchdog.h"

namespace palimpsest {

// Initialises MPI, and finalises it at the end.
class MpiSession {
 public:
  MpiSession(int* argc, char*** argv);
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  int64_t world_rank() const { return world_rank_; }
  int64_t world_size() const { return world_size_; }
  int64_t local_rank() const { return local_rank_; }  // among the ranks of this host
  // Threads of this rank when the ranks that may run on the same processors of the host share them evenly.
  int64_t fair_threads() const { return fair_threads_; }

  // The mesh over the first shape.ranks() ranks of the world; every rank of the world calls it. Ranks beyond get none.
  // With kCuda its axes connect the ranks' current GPUs. The watchdog must outlive the mesh.
  std::unique_ptr<Mesh> make_mesh(const MeshShape& shape, Watchdog& watchdog, Device device = Device::kCpu,
                                  const GpuLinks& links = {}) const;

 private:
  void look_around_host();

  int64_t world_rank_ = 0;
  int64_t world_size_ = 1;
  int64_t local_rank_ = 0;
  int64_t fair_threads_ = 1;
};

// Prints which rank failed and why, and ends every rank of the job: with kStatusUserError for a UserError, else with
// kStatusRankFailed. This one ends within seconds, also where MPI cannot reach the others, which then end when their
// connection or their deadline does.
[[noreturn]] void fail_job(int64_t rank, const std::exception& error);
// Runs `body`, in which ranks wait for each other. What one of several throws alone ends the job from within: nothing
// is put away first, which the others' collectives may still wait for.
void run_together(const Communicator& world, const std::function<void()>& body);

// Whether mpirun or another launcher of MPI ranks started this process, as its environment says.
bool started_by_launcher();

std::string mpi_library_version();

}  // namespace palimpsest
