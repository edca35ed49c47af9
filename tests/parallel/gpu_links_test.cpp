#include "parallel/gpu_links.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "kernels/check.h"

namespace palimpsest {
namespace {

class GpuLinksOfTheEnvironment : public testing::Test {
 protected:
  ~GpuLinksOfTheEnvironment() override {
    for (const char* name : {kShare, kLeast}) ::unsetenv(name);
  }
  static std::string complaint() {
    try {
      gpu_links();
    } catch (const UserError& error) {
      return error.what();
    }
    return {};
  }
  static constexpr const char *kShare = "PALIMPSEST_SHARE_GPUS", *kLeast = "PALIMPSEST_LEAST_COPIED_BYTES";
};

TEST_F(GpuLinksOfTheEnvironment, AreTheUsualOnesWhereItSaysNothing) {
  ::setenv(kShare, "", 1);
  EXPECT_FALSE(gpu_links().share_gpus);
  EXPECT_EQ(gpu_links().least_copied_bytes, 512 << 10);
}

TEST_F(GpuLinksOfTheEnvironment, AreReadFromIt) {
  ::setenv(kShare, "1", 1);
  ::setenv(kLeast, "0", 1);
  EXPECT_TRUE(gpu_links().share_gpus);
  EXPECT_EQ(gpu_links().least_copied_bytes, 0);
  ::setenv(kShare, "0", 1);
  EXPECT_FALSE(gpu_links().share_gpus);
}

TEST_F(GpuLinksOfTheEnvironment, WordsAreErrors) {
  ::setenv(kShare, "yes", 1);
  EXPECT_EQ(complaint(), "PALIMPSEST_SHARE_GPUS is yes, must be a whole number from 0 to 1");
  ::setenv(kShare, "0", 1);
  ::setenv(kLeast, "64k", 1);
  EXPECT_NE(complaint().find("PALIMPSEST_LEAST_COPIED_BYTES is 64k, must be"), std::string::npos);
}

}  // namespace
}  // namespace palimpsest
