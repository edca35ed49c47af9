#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "tests/support/tiny_run.h"
#include "trainer/bench.h"

namespace palimpsest {
namespace {

TEST(BenchKernels, MeasuresEveryOpAndItsError) {
  Config config = support::tiny_config(Precision::kF32);
  config.train.micro_batch = config.train.sequences_per_step = 3;
  config.data.sequence_length = 67;
  std::FILE* null = std::fopen("/dev/null", "w");
  ASSERT_NE(null, nullptr);
  std::vector<KernelBench> benches;
  {
    Console console(null);
    benches = bench_kernels(config, {.seconds_an_op = 1e-4}, console);
  }
  EXPECT_EQ(std::fclose(null), 0);
  std::set<std::string> names;
  for (const KernelBench& bench : benches) {
    names.insert(bench.name + " " + bench.path);
    EXPECT_GT(bench.ms, 0.0) << bench.name;
    EXPECT_GT(bench.tbytes_per_second, 0.0) << bench.name;
    EXPECT_GT(bench.of_ceiling, 0.0) << bench.name;
    EXPECT_FALSE(bench.sizes.empty()) << bench.name;
    EXPECT_LT(bench.error, 1e-5) << bench.name << " " << bench.path << " " << bench.sizes;  // false of NaN too
  }
  EXPECT_GE(names.size(), 40u);
  EXPECT_TRUE(names.contains("attention_prefix_backward cpu"));
  EXPECT_TRUE(names.contains("affine_apply, adjoint cpu"));
  EXPECT_TRUE(names.contains("kda_backward cpu, chunkwise"));
  EXPECT_TRUE(names.contains("gdn_backward cpu, recurrence"));
  EXPECT_NE(to_text(benches).find("attention_backward"), std::string::npos);
  EXPECT_NE(to_json(benches).find("\"of_ceiling\":"), std::string::npos);
}

}  // namespace
}  // namespace palimpsest
