// What the tests under mpirun share.
#pragma once

#include "parallel/mpi_session.h"

namespace palimpsest::mpi_test {

MpiSession& world();
Watchdog& world_watchdog();
// Makes a GPU that no other rank of this host has the current one; false where there are fewer GPUs than ranks.
bool take_own_gpu();

}  // namespace palimpsest::mpi_test
