// The device mesh: world = data x sequence x tensor ranks, tensor ranks adjacent.
#pragma once

#include <cstdint>
#include <string>

namespace palimpsest {

// Owns MPI for the life of the process: initialises it, and finalises it at the end.
class MpiSession {
 public:
  MpiSession(int* argc, char*** argv);
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  int world_rank() const { return world_rank_; }
  int world_size() const { return world_size_; }
  // Ends every rank of the job with this exit status; does not return.
  [[noreturn]] void abort(int status);

 private:
  int world_rank_ = 0;
  int world_size_ = 1;
};

std::string mpi_library_version();

}  // namespace palimpsest
