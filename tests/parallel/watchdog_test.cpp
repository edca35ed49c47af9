#include "parallel/watchdog.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <string>
#include <thread>

namespace palimpsest {
namespace {

using namespace std::chrono_literals;

TEST(Watchdog, NamesRankOperationAxisAndStepWhenTheDeadlinePasses) {
  std::promise<std::string> line;
  Watchdog watchdog(3, 0.05, [&](const std::string& text) { line.set_value(text); });
  watchdog.set_step(17);
  const std::string axis = "data";
  const Watchdog::Guard guard(watchdog, "all_reduce", axis);
  auto text = line.get_future();
  ASSERT_EQ(text.wait_for(30s), std::future_status::ready);
  EXPECT_EQ(
      text.get(),
      "rank 3: all_reduce on axis data at step 17 did not finish within parallel.timeout_s = 0.05 s: another rank "
      "has failed, or is slower than that");
}

TEST(Watchdog, IsQuietWhenOperationsEndInTime) {
  bool expired = false;
  {
    Watchdog watchdog(0, 60.0, [&](const std::string&) { expired = true; });
    const std::string axis = "world";
    for (int i = 0; i < 100; ++i) {
      const Watchdog::Guard outer(watchdog, "barrier", axis);
      const Watchdog::Guard inner(watchdog, "all_gather", axis);
    }
    std::this_thread::sleep_for(5ms);
  }
  EXPECT_FALSE(expired);
}

}  // namespace
}  // namespace palimpsest
