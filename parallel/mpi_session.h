// MPI for the life of the process.
#pragma once

#include <cstdint>
#include <string>

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

  // The mesh over the first shape.ranks() ranks of the world; every rank of the world calls it. Ranks beyond get none.
  // The watchdog must outlive the mesh.
  std::unique_ptr<Mesh> make_mesh(const MeshShape& shape, Watchdog& watchdog) const;

  // Ends every rank of the job with this exit status.
  [[noreturn]] void abort(int status);

 private:
  int64_t world_rank_ = 0;
  int64_t world_size_ = 1;
};

// Whether mpirun or another launcher of MPI ranks started this process, as its environment says.
bool started_by_launcher();

std::string mpi_library_version();

}  // namespace palimpsest
