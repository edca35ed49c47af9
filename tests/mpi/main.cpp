// main of the tests that run under mpirun: every rank runs every case; ranks other than 0 print failures alone, and the
// program fails when any rank failed.
#include <gtest/gtest.h>
#include <mpi.h>

#include "parallel/mpi_session.h"
#include "tests/mpi/world.h"

namespace palimpsest::mpi_test {

namespace {
MpiSession* session = nullptr;
Watchdog* watchdog = nullptr;
}  // namespace

MpiSession& world() {
  return *session;
}
Watchdog& world_watchdog() {
  return *watchdog;
}

}  // namespace palimpsest::mpi_test

int main(int argc, char** argv) {
  palimpsest::MpiSession session(&argc, &argv);
  palimpsest::Watchdog watchdog(session.world_rank(), 120.0);
  palimpsest::mpi_test::session = &session;
  palimpsest::mpi_test::watchdog = &watchdog;
  testing::InitGoogleTest(&argc, argv);
  testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
  if (session.world_rank() != 0) delete listeners.Release(listeners.default_result_printer());
  int failed = RUN_ALL_TESTS();
  MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  return failed;
}
