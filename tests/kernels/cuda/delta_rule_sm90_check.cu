// Checks the Hopper delta rule against f64 and times it.
//
//   delta_rule_sm90_check check [PART]  all small cases, or those with PART in their names; twice, bit for bit
//   delta_rule_sm90_check bench         medians of CUDA events on the shapes that others have published
//   delta_rule_sm90_check once N        one forward and backward of bench shape N, for profilers
#include <cuda_runtime.h>

#include <cstdlib>

#include "tests/kernels/cuda/delta_rule_sm90_run.h"

namespace palimpsest::cuda {

namespace {

#define REQUIRE(call)                                                                       \
  do {                                                                                      \
    const cudaError_t error = (call);                                                       \
    if (error != cudaSuccess) {                                                             \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error)); \
      std::exit(1);                                                                         \
    }                                                                                       \
  } while (false)

class Gpu {
 public:
  Gpu() = default;
  Gpu(const Gpu&) = delete;
  ~Gpu() {
    for (void* block : blocks_) cudaFree(block);
  }
  void* allocate(int64_t bytes) {
    void* block = nullptr;
    REQUIRE(cudaMalloc(&block, static_cast<size_t>(std::max<int64_t>(bytes, 16))));
    REQUIRE(cudaMemset(block, 0xff, static_cast<size_t>(std::max<int64_t>(bytes, 16))));
    blocks_.push_back(block);
    return block;
  }
  static void upload(void* to, const void* from, size_t bytes) {
    REQUIRE(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
  }
  static void download(void* to, const void* from, size_t bytes) {
    REQUIRE(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
  }

 private:
  std::vector<void*> blocks_;
};

bool same(const DeltaRuleResults& a, const DeltaRuleResults& b) {
  const auto equal = [](const std::vector<double>& x, const std::vector<double>& y) {
    return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(double)) == 0);
  };
  return equal(a.o, b.o) && equal(a.dq, b.dq) && equal(a.dk, b.dk) && equal(a.dv, b.dv) &&
         equal(a.dbeta_logit, b.dbeta_logit) && equal(a.dgate_logit, b.dgate_logit) && equal(a.dA_log, b.dA_log) &&
         equal(a.ddt_bias, b.ddt_bias) && equal(a.final_state, b.final_state) &&
         equal(a.d_initial_state, b.d_initial_state);
}

// Calls for the states alone, without room for what belongs to tokens.
int check_states_alone(const DeltaRuleCase& c) {
  const DeltaRuleHost host = random_inputs(c, 11);
  Gpu gpu;
  const DeviceCase<Gpu> alone(gpu, c, host, Keep::kNothing);
  const DeltaRuleSm90 op = alone.states_alone();
  void* workspace = gpu.allocate(delta_rule_sm90_forward_workspace(op));
  REQUIRE(delta_rule_sm90_forward(op, workspace, nullptr));
  workspace = gpu.allocate(delta_rule_sm90_backward_workspace(op));
  REQUIRE(delta_rule_sm90_backward(op, workspace, nullptr));
  REQUIRE(cudaDeviceSynchronize());
  int failures = 0;
  for (const NamedError& e : compare_states(alone.results(), reference_results(c, host))) {
    if (e.error <= e.limit) continue;
    ++failures;
    std::printf("%-26s alone: %s %.2e FAIL\n", c.name.c_str(), e.name, e.error);
  }
  return failures;
}

int check(const std::string& part) {
  int failures = 0;
  std::vector<DeltaRuleCase> cases = check_cases();
  std::erase_if(cases, [&](const DeltaRuleCase& c) { return c.name.find(part) == std::string::npos; });
  if (cases.empty()) {
    std::printf("no case has %s in its name\n", part.c_str());
    return 1;
  }
  for (const DeltaRuleCase& c : cases) {
    const DeltaRuleHost host = random_inputs(c, 11);
    const DeltaRuleResults want = reference_results(c, host);
    for (const Keep keep : {Keep::kAll, Keep::kMatrices, Keep::kNothing}) {
      DeltaRuleResults first;
      for (int round = 0; round < 2; ++round) {
        Gpu gpu;
        const DeviceCase<Gpu> run(gpu, c, host, keep);
        REQUIRE(delta_rule_sm90_serves(run.op()) ? cudaSuccess : cudaErrorInvalidValue);
        REQUIRE(delta_rule_sm90_forward(run.op(), run.workspace(), nullptr));
        REQUIRE(cudaMemset(run.workspace(), 0xff, static_cast<size_t>(delta_rule_sm90_backward_workspace(run.op()))));
        REQUIRE(delta_rule_sm90_backward(run.op(), run.workspace(), nullptr));
        REQUIRE(cudaDeviceSynchronize());
        const DeltaRuleResults got = run.results();
        if (round == 1) {
          if (!same(first, got)) {
            ++failures;
            std::printf("%-26s save level %d: not the same twice FAIL\n", c.name.c_str(), static_cast<int>(keep));
          }
          continue;
        }
        first = got;
        if (keep == Keep::kAll) std::printf("%-26s", c.name.c_str());
        for (const NamedError& e : compare(got, want, c.name == "T 512, bounded", true)) {
          const bool good = e.error <= e.limit;
          failures += good ? 0 : 1;
          if (keep == Keep::kAll) std::printf(" %s %.2e", e.name, e.error);
          if (!good) std::printf(" (save level %d: %s %.2e FAIL)", static_cast<int>(keep), e.name, e.error);
        }
        if (keep == Keep::kAll) std::printf("\n");
      }
    }
  }
  for (const DeltaRuleCase& c : cases)
    if (c.states) failures += check_states_alone(c);
  std::printf(failures == 0 ? "all checks passed\n" : "%d FAILURES\n", failures);
  return failures;
}

struct BenchShape {
  const char* name;
  int64_t B, T, H, HV;
  bool vector_decay;
  double forward_limit, both_limit;  // ms
};
constexpr BenchShape kShapes[] = {{"KDA (1,8192,64,128)", 1, 8192, 64, 64, true, 1.74, 8.22},
                                  {"KDA (4,4096,16,128)", 4, 4096, 16, 16, true, 1.21, 5.13},
                                  {"KDA (1,32768,16,128)", 1, 32768, 16, 16, true, 2.44, 10.43},
                                  {"KDA (1,65536,8,128)", 1, 65536, 8, 8, true, 0.0, 0.0},
                                  {"GDN (1,8192,16/64,128)", 1, 8192, 16, 64, false, 0.81, 0.0}};

// Inputs that cost the host little: a table of normal numbers, each tensor from its own place in it.
DeltaRuleHost table_inputs(const DeltaRuleCase& c) {
  constexpr size_t kTable = 1 << 20;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> table(kTable);
  for (uint16_t& x : table) x = float_to_bf16(normal(random));
  DeltaRuleHost host;
  size_t next = 0;
  const auto fill = [&](HostRows& rows, int64_t size) {
    rows = HostRows(c.N(), size, 0);
    for (size_t i = 0; i < rows.bits.size();) {
      next = (next * 2654435761U + 12345) % kTable;
      for (const size_t end = std::min(rows.bits.size(), i + 4096); i < end; ++i) {
        rows.bits[i] = table[next];
        next = (next + 1) % kTable;
      }
    }
  };
  fill(host.q, c.H * c.K);
  fill(host.k, c.H * c.K);
  fill(host.v, c.HV * c.V);
  fill(host.beta_logit, c.HV);
  fill(host.gate_logit, c.HV * c.W());
  fill(host.d_o, c.HV * c.V);
  host.A_log.assign(static_cast<size_t>(c.HV), 0.0F);
  host.dt_bias.assign(static_cast<size_t>(c.HV * c.W()), 0.1F);
  return host;
}

template <class Run>
double median_ms(int rounds, Run run) {
  std::vector<float> times;
  cudaEvent_t begin = nullptr, end = nullptr;
  REQUIRE(cudaEventCreate(&begin));
  REQUIRE(cudaEventCreate(&end));
  for (int i = 0; i < 3; ++i) run();
  for (int i = 0; i < rounds; ++i) {
    REQUIRE(cudaEventRecord(begin));
    run();
    REQUIRE(cudaEventRecord(end));
    REQUIRE(cudaEventSynchronize(end));
    float ms = 0;
    REQUIRE(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(ms);
  }
  REQUIRE(cudaEventDestroy(begin));
  REQUIRE(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void bench(const BenchShape& shape, bool once) {
  const DeltaRuleCase c{.name = shape.name,
                        .lengths = std::vector<int64_t>(static_cast<size_t>(shape.B), shape.T),
                        .H = shape.H,
                        .HV = shape.HV,
                        .vector_decay = shape.vector_decay};
  const DeltaRuleHost host = table_inputs(c);
  Gpu gpu;
  const DeviceCase<Gpu> run(gpu, c, host, Keep::kAll);
  if (!delta_rule_sm90_serves(run.op())) {
    std::printf("%-24s not served\n", shape.name);
    return;
  }
  const auto forward = [&] { REQUIRE(delta_rule_sm90_forward(run.op(), run.workspace(), nullptr)); };
  const auto backward = [&] { REQUIRE(delta_rule_sm90_backward(run.op(), run.workspace(), nullptr)); };
  if (once) {
    forward();
    backward();
    REQUIRE(cudaDeviceSynchronize());
    return;
  }
  const double forward_ms = median_ms(21, forward);
  const double both_ms = median_ms(21, [&] {
    forward();
    backward();
  });
  std::printf("%-24s forward %7.3f ms (limit %.2f), forward + backward %7.3f ms (limit %.2f)\n", shape.name, forward_ms,
              shape.forward_limit, both_ms, shape.both_limit);
}

}  // namespace

}  // namespace palimpsest::cuda

int main(int num_arguments, char** arguments) {
  using namespace palimpsest::cuda;
  const std::string what = num_arguments > 1 ? arguments[1] : "check";
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  cudaDeviceProp device;
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || device.major != 9 || device.minor != 0) {
    std::printf("skipped: no GPU of compute capability 9.0\n");
    return 77;
  }
  if (what == "check") return check(num_arguments > 2 ? arguments[2] : "") == 0 ? 0 : 1;
  if (what == "once") {
    bench(kShapes[std::atoi(arguments[2])], true);
    return 0;
  }
  for (const BenchShape& shape : kShapes) bench(shape, false);
  return 0;
}
