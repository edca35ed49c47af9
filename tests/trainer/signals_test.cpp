#include "trainer/signals.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include "tests/support/files.h"

namespace palimpsest {
namespace {

TEST(StopSignals, EachOfThreeIsNoted) {
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1}) {
    const StopSignals signals;
    EXPECT_EQ(signals.received(), 0);
    raise(signal);
    EXPECT_EQ(signals.received(), signal);
  }
}

TEST(StopSignals, HaveTheNamesThatKillTakes) {
  EXPECT_EQ(name_of_stop_signal(SIGTERM), "TERM");
  EXPECT_EQ(name_of_stop_signal(SIGINT), "INT");
  EXPECT_EQ(name_of_stop_signal(SIGUSR1), "USR1");
}

TEST(StopSignals, TheFirstIsToldAndRepeatsDoNoHarm) {
  const StopSignals signals;
  raise(SIGUSR1);
  raise(SIGTERM);
  raise(SIGTERM);
  raise(SIGINT);
  EXPECT_EQ(signals.received(), SIGUSR1);
}

TEST(StopSignals, ASecondInterruptEndsAtOnce) {
  const int status = support::run_in_child([] {
    const StopSignals signals;
    raise(SIGINT);
    if (signals.received() != SIGINT) _exit(1);
    raise(SIGINT);
    _exit(2);  // not reached
  });
  ASSERT_TRUE(WIFSIGNALED(status)) << "status " << status;
  EXPECT_EQ(WTERMSIG(status), SIGINT);
}

TEST(StopSignals, OldHandlersComeBack) {
  const int status = support::run_in_child([] {
    std::signal(SIGUSR1, SIG_DFL);  // may be ignored since another test
    { const StopSignals signals; }
    raise(SIGUSR1);
    _exit(0);  // not reached
  });
  ASSERT_TRUE(WIFSIGNALED(status)) << "status " << status;
  EXPECT_EQ(WTERMSIG(status), SIGUSR1);
}

TEST(StopSignals, ALateUsr1DoesNotKillWhatWasAskedToStop) {
  const int status = support::run_in_child([] {
    {
      const StopSignals signals;
      raise(SIGUSR1);
    }
    raise(SIGUSR1);
    raise(SIGTERM);  // as it was
    _exit(0);        // not reached
  });
  ASSERT_TRUE(WIFSIGNALED(status)) << "status " << status;
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
}

TEST(StopSignals, InterruptedReadsGoOn) {
  const StopSignals signals;
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  std::atomic<ssize_t> result = -2;
  std::thread reader([&] {
    char byte = 0;
    result = read(ends[0], &byte, 1);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  pthread_kill(reader.native_handle(), SIGUSR1);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(result, -2);
  ASSERT_EQ(write(ends[1], "x", 1), 1);
  reader.join();
  EXPECT_EQ(result, 1);
  EXPECT_EQ(signals.received(), SIGUSR1);
  close(ends[0]);
  close(ends[1]);
}

TEST(StopSignals, AnInnerOneTellsWhatTheOuterOneCaught) {
  const StopSignals outer;
  raise(SIGUSR1);
  {
    const StopSignals inner;
    EXPECT_EQ(inner.received(), SIGUSR1);
  }
  raise(SIGTERM);  // still caught
  EXPECT_EQ(outer.received(), SIGUSR1);
}

TEST(StopSignals, LetThroughActAsIfNobodyHadCaughtThem) {
  for (const int signal : {SIGTERM, SIGUSR1}) {
    const int status = support::run_in_child([&] {
      std::signal(SIGUSR1, SIG_DFL);  // may be ignored since another test
      StopSignals signals;
      raise(signal);
      if (signals.received() != signal) _exit(1);
      signals.let_through();
      _exit(0);  // not reached
    });
    ASSERT_TRUE(WIFSIGNALED(status)) << "status " << status;
    EXPECT_EQ(WTERMSIG(status), signal);
  }
}

}  // namespace
}  // namespace palimpsest
