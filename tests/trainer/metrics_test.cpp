#include "trainer/metrics.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cmath>
#include <csignal>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/support/files.h"

namespace palimpsest {
namespace {

using support::read_file;
using support::write_file;

StepMetrics step_metrics(int64_t step) {
  StepMetrics metrics;
  metrics.step = step;
  metrics.tokens = 100 * step;
  metrics.loss = 0.1 + 0.2;
  metrics.grad_norm = 1e-30;
  metrics.lr = 3e-4;
  metrics.tokens_per_second = 12345.678;
  return metrics;
}

void write_steps(const std::string& path, int64_t last_step, int64_t from, int64_t to) {
  MetricsLog log(path, last_step);
  for (int64_t step = from; step <= to; ++step) log.write(step_metrics(step));
}

// The steps in the file, each line being whole JSON.
std::vector<int64_t> steps_in(const std::string& path) {
  std::vector<int64_t> steps;
  std::istringstream lines(read_file(path));
  for (std::string line; std::getline(lines, line);) {
    steps.push_back(nlohmann::json::parse(line).at("step").get<int64_t>());
  }
  return steps;
}

TEST(Metrics, LineIsJsonWithTheFieldsThatScriptsReadAndExactNumbers) {
  StepMetrics metrics = step_metrics(7);
  metrics.mfu = 0.5;
  metrics.skipped_steps = 2;
  const auto line = nlohmann::json::parse(to_json(metrics));
  EXPECT_EQ(line.size(), 8u);
  EXPECT_EQ(line["step"].get<int64_t>(), 7);
  EXPECT_EQ(line["tokens"].get<int64_t>(), 700);
  EXPECT_EQ(line["loss"].get<double>(), 0.1 + 0.2);
  EXPECT_EQ(line["grad_norm"].get<double>(), 1e-30);
  EXPECT_EQ(line["lr"].get<double>(), 3e-4);
  EXPECT_EQ(line["tokens_per_second"].get<double>(), 12345.678);
  EXPECT_EQ(line["mfu"].get<double>(), 0.5);
  EXPECT_EQ(line["skipped_steps"].get<int64_t>(), 2);
}

TEST(Metrics, WhatIsNotANumberIsNull) {
  StepMetrics metrics = step_metrics(1);
  metrics.loss = std::nan("");
  metrics.grad_norm = INFINITY;
  const auto line = nlohmann::json::parse(to_json(metrics));
  EXPECT_TRUE(line["loss"].is_null());
  EXPECT_TRUE(line["grad_norm"].is_null());
  EXPECT_TRUE(line["mfu"].is_null());
}

TEST(Metrics, EvaluationsStandInTheLineOfTheirStep) {
  StepMetrics metrics = step_metrics(1);
  metrics.eval = {{"bible", std::log(2.0), 1.25}, {"news-2", 3.0, std::nullopt}};
  const auto eval = nlohmann::json::parse(to_json(metrics)).at("eval");
  EXPECT_EQ(eval.size(), 2u);
  EXPECT_EQ(eval["bible"]["loss"].get<double>(), std::log(2.0));
  EXPECT_NEAR(eval["bible"]["perplexity"].get<double>(), 2.0, 1e-15);
  EXPECT_EQ(eval["bible"]["bits_per_byte"].get<double>(), 1.25);
  EXPECT_TRUE(eval["news-2"]["bits_per_byte"].is_null());
}

TEST(Metrics, ResumeKeepsEachStepOnce) {
  const support::TempDirectory folder;
  const std::string path = folder / "metrics.jsonl";
  write_steps(path, 0, 1, 9);
  write_steps(path, 6, 7, 12);  // from the checkpoint of step 6
  EXPECT_EQ(steps_in(path), (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}));
  write_steps(path, 12, 13, 13);  // nothing to drop
  EXPECT_EQ(steps_in(path).size(), 13u);
  write_steps(path, 0, 1, 2);  // afresh
  EXPECT_EQ(steps_in(path), (std::vector<int64_t>{1, 2}));
}

TEST(Metrics, ResumeDropsTornLines) {
  const support::TempDirectory folder;
  const std::string path = folder / "metrics.jsonl";
  write_steps(path, 0, 1, 3);
  const std::string whole = read_file(path);
  for (size_t length = 0; length < whole.size(); length += 13) {
    write_file(path, whole.substr(0, length));
    write_steps(path, 3, 4, 4);
    const auto steps = steps_in(path);  // throws on a line that is not JSON
    ASSERT_FALSE(steps.empty());
    EXPECT_EQ(steps.back(), 4);
  }
  // Also when a later run wrote behind the torn line.
  write_file(path, whole + "{\"step\":4,\"tok" + to_json(step_metrics(5)) + "\n\nwords\n{\"step\":2}\n");
  write_steps(path, 9, 10, 10);
  EXPECT_EQ(steps_in(path), (std::vector<int64_t>{1, 2, 3, 10}));
}

TEST(Metrics, ResumeWorksWithoutTheOldFile) {
  const support::TempDirectory folder;
  write_steps(folder / "metrics.jsonl", 5, 6, 7);
  EXPECT_EQ(steps_in(folder / "metrics.jsonl"), (std::vector<int64_t>{6, 7}));
}

TEST(Metrics, EveryLineIsInTheFileWhenTheProcessIsKilled) {
  const support::TempDirectory folder;
  const std::string path = folder / "metrics.jsonl";
  const int status = support::run_in_child([&] {
    MetricsLog log(path, 0);
    log.write(step_metrics(1));
    log.write(step_metrics(2));
    raise(SIGKILL);
  });
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(steps_in(path), (std::vector<int64_t>{1, 2}));
}

TEST(Metrics, AFullOrMissingFolderIsAUserError) {
  EXPECT_EQ(support::user_error_of([] { MetricsLog("no/such/metrics.jsonl", 0); }),
            "no/such/metrics.jsonl: cannot be written: No such file or directory");
  EXPECT_EQ(support::user_error_of([] {
              MetricsLog log("/dev/full", 0);
              log.write(step_metrics(1));
            }),
            "/dev/full: cannot be written: No space left on device");
}

}  // namespace
}  // namespace palimpsest
