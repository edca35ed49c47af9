// What the tests under mpirun share.
#pragma once

#include "parallel/mpi_session.h"

namespace palimpsest::mpi_test {

MpiSession& world();
Watchdog& world_watchdog();
// Makes a GPU the current one, which no other rank of this host has where there are as many as ranks; false where there
// is none. gpu_links() are then those that such ranks can have.
bool take_gpu();
GpuLinks gpu_links(int64_t least_copied_bytes);

}  // namespace palimpsest::mpi_test
