// Every op at the sizes of a model, ready to be timed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/arena.h"
#include "kernels/documents.h"
#include "kernels/stream.h"
#include "trainer/config.h"

namespace palimpsest {

// Where an op runs: a device, a dtype and memory. The n-th tensor has the same values in every place, to the rounding
// of its dtype, so that results of two places can be compared. Long tensors repeat the numbers that they begin with. On
// a planning stream tensors have no values.
class BenchPlace {
 public:
  BenchPlace(Stream& stream, Arena& memory, DType dtype) : stream_(stream), memory_(memory), dtype_(dtype) {}

  Stream& stream() const { return stream_; }
  Arena& memory() const { return memory_; }
  DType dtype() const { return dtype_; }

  Tensor random(Shape shape);  // numbers from -1 to 1, as large as activations are, that bf16 holds
  Tensor zeros(Shape shape);
  // The same in the dtype of weights and statistics, which is f32 beside bf16.
  Tensor wide_random(Shape shape);
  Tensor wide_zeros(Shape shape);
  Tensor zeros(DType dtype, Shape shape);
  Tensor ids(int64_t count, int64_t num_ids);  // [count] i32, below num_ids

 private:
  template <class T, class Draw>
  Tensor drawn(DType dtype, Shape shape, Draw&& draw);

  Stream& stream_;
  Arena& memory_;
  DType dtype_;
  uint64_t num_tensors_ = 0;
};

struct PreparedOp {
  std::string sizes;
  double flops = 0.0;                 // 0: the op is judged by the bytes that it moves
  std::vector<Tensor> reads, writes;  // the large ones; what is updated stands in both
  std::function<void()> run;
};

struct BenchOp {
  std::string name;
  std::string form;  // which of an op's forms; empty when it has one
  std::function<PreparedOp(BenchPlace&)> prepare;
};

// Of one micro-batch of rows.
struct BenchSizes {
  explicit BenchSizes(const Config& config)
      : rows(std::min(config.train.micro_batch, config.train.sequences_per_step)),
        T(config.data.sequence_length),
        N(rows * T),
        D(config.model.hidden_size),
        V(config.model.vocab_size),
        model(config.model) {}
  Documents documents() const { return Documents::rows(rows, T); }
  int64_t rows, T, N, D, V;
  ModelConfig model;
};

// `config` is resolved.
std::vector<BenchOp> bench_ops(const Config& config);

}  // namespace palimpsest
