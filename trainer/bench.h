// What the figures of the README come from.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/mesh.h"
#include "trainer/config.h"
#include "trainer/console.h"

namespace palimpsest {

// Training on random tokens, one document a row.
struct TrainBench {
  int64_t steps = 0;  // timed, after two that are not
  int64_t ranks = 1;
  int64_t threads = 0;   // of each rank
  double step_ms = 0.0;  // the median step; the parts are of the same step
  double forward_backward_ms = 0.0;
  double optimizer_ms = 0.0;
  double tokens_per_second = 0.0;  // of all ranks
  double flops_per_step = 0.0;     // of all ranks; trainer/flops.h
  double flops_per_second = 0.0;
  double reference_flops_per_second = 0.0;  // see measure_matmul_flops, summed over the ranks
  double mfu = 0.0;                         // 0 to 1
  int64_t predicted_bytes = 0;              // of the first rank's memory, printed before the first allocation
  int64_t measured_bytes = 0;               // growth of its resident peak from there on
  SentBytes sent;                           // that the first rank sends in a step
};
// Prints model, plan and FLOPs to the console as `train` does. `config` is resolved; needs no data. Every rank of the
// mesh calls it.
TrainBench bench_train(const Config& config, const Mesh& mesh, int64_t steps, Console& console);
std::string to_text(const TrainBench& bench);
std::string to_json(const TrainBench& bench);

// One op, forward or backward, at the sizes of a model.
struct KernelBench {
  std::string name, sizes;
  std::string dtype;               // of activations
  std::string path;                // the device and, where there are several, the form or the kernels that ran
  double ms = 0.0;                 // the median of several runs
  double tflops_per_second = 0.0;  // 0: the op is not judged by its arithmetic
  double tbytes_per_second = 0.0;  // inputs read once and outputs written once
  double of_ceiling = 0.0;         // 0 to 1: the time that the machine's best product or copy would take, over ms
  double error = 0.0;              // of few tokens and words, against f64: norm of the difference over norm
};
struct KernelBenchOptions {
  double seconds_an_op = 0.2;  // how long each is repeated
  std::string only;            // ops whose names contain this
};
// Every op at the sizes of the configured model, with one micro-batch of rows; beside bf16 in f32 as well.
std::vector<KernelBench> bench_kernels(const Config& config, const KernelBenchOptions& options, Console& console);
std::string to_text(const std::vector<KernelBench>& benches);
std::string to_json(const std::vector<KernelBench>& benches);

}  // namespace palimpsest
