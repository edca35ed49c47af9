// This process among the ranks that mpirun or another launcher started; one rank without any.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "parallel/mesh.h"
#include "parallel/mpi_session.h"
#include "parallel/watchdog.h"
#include "trainer/config.h"
#include "trainer/console.h"

namespace palimpsest {

class Ranks {
 public:
  // Starts MPI where a launcher asks for it. Ranks that share a host share its processors: where OMP_NUM_THREADS says
  // nothing, each takes its part of them.
  Ranks(int* argc, char*** argv);

  int64_t rank() const { return session_ ? session_->world_rank() : 0; }
  int64_t size() const { return session_ ? session_->world_size() : 1; }
  bool is_first() const { return rank() == 0; }

  // Of all ranks, for what comes before the mesh. Waits for others as long as parallel.timeout_s does by default.
  Communicator& world() const { return start_mesh_ ? start_mesh_->world() : Mesh::single().world(); }

  // Lays the mesh of the config, which is resolved, over all ranks, gives each its GPU where they compute on GPUs,
  // prints which rank is where, and gives the mesh the config's deadline. Every rank calls it, once.
  const Mesh& lay_out(const Config& config, Console& console);

 private:
  std::string map_of_ranks(const Mesh& mesh, const std::string& gpu) const;

  std::optional<MpiSession> session_;
  std::optional<Watchdog> start_watchdog_, watchdog_;
  std::unique_ptr<Mesh> start_mesh_, mesh_;  // after the watchdogs, which they use
};

}  // namespace palimpsest
