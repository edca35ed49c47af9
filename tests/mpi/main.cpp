// main of the tests that run under mpirun: every rank runs every case; ranks other than 0 print failures alone, and the
// program fails when any rank failed.
#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

#include "kernels/device.h"
#include "parallel/mpi_session.h"
#include "tests/mpi/world.h"

namespace palimpsest::mpi_test {

namespace {
MpiSession* session = nullptr;
Watchdog* watchdog = nullptr;

class FailurePrinter : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& test) override {
    name_ = std::string(test.test_suite_name()) + "." + test.name();
  }
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "rank %d, %s: %s:%d: %s\n", static_cast<int>(session->world_rank()), name_.c_str(),
                 result.file_name() != nullptr ? result.file_name() : "", result.line_number(), result.message());
  }

  std::string name_;  // of the test that runs
};
}  // namespace

MpiSession& world() {
  return *session;
}
Watchdog& world_watchdog() {
  return *watchdog;
}
bool take_gpu() {
  if (num_gpus() == 0) return false;
  use_gpu(session->local_rank());
  return true;
}
GpuLinks gpu_links(int64_t least_copied_bytes) {
  return {.share_gpus = num_gpus() < session->world_size(), .least_copied_bytes = least_copied_bytes};
}

}  // namespace palimpsest::mpi_test

int main(int argc, char** argv) {
  palimpsest::MpiSession session(&argc, &argv);
  palimpsest::Watchdog watchdog(session.world_rank(), 120.0);
  palimpsest::mpi_test::session = &session;
  palimpsest::mpi_test::watchdog = &watchdog;
  testing::InitGoogleTest(&argc, argv);
  testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
  if (session.world_rank() != 0) {
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new palimpsest::mpi_test::FailurePrinter);  // GoogleTest owns it
  }
  int failed = RUN_ALL_TESTS();
  // Not a blocking call, which keeps busy the cores that the last test needs.
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Iallreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD, &request);
  for (int done = 0; MPI_Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done == 0;)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return failed;
}
