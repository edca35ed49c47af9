#include <gtest/gtest.h>

#include <cstdio>
#include <set>
#include <string>

#include "tests/support/moe_config.h"
#include "tests/support/tiny_run.h"
#include "trainer/bench.h"

namespace palimpsest {
namespace {

TEST(BenchExperts, OpsOfExpertsAreMeasuredWithTheirError) {
  Config config = support::tiny_config(Precision::kF32, {"attention"});
  config.train.micro_batch = config.train.sequences_per_step = 2;
  config.data.sequence_length = 33;
  config.model.moe = support::sigmoid_moe();
  std::FILE* null = std::fopen("/dev/null", "w");
  ASSERT_NE(null, nullptr);
  std::set<std::string> names;
  {
    Console console(null);
    for (const KernelBench& bench : bench_kernels(config, {.seconds_an_op = 1e-4}, console)) {
      names.insert(bench.name);
      EXPECT_LT(bench.error, 1e-5) << bench.name << " " << bench.sizes;  // false of NaN too
    }
  }
  EXPECT_EQ(std::fclose(null), 0);
  for (const char* name :
       {"router_forward", "router_backward", "scale_expert_rows_forward", "scale_expert_rows_backward",
        "token_gate_forward", "token_gate_backward", "gather_expert_rows", "sum_expert_rows", "grouped_linear_forward",
        "grouped_linear_backward_input", "grouped_linear_backward_weight"})
    EXPECT_TRUE(names.contains(name)) << name;
}

}  // namespace
}  // namespace palimpsest
