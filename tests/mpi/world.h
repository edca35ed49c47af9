// What the tests under mpirun share.
#pragma once

#include "parallel/mpi_session.h"

namespace palimpsest::mpi_test {

MpiSession& world();
Watchdog& world_watchdog();

}  // namespace palimpsest::mpi_test
