// The GPUs of this machine, and copies between their memory and the host's. A build without CUDA has none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace palimpsest {

// GPUs that this process may use (a restricted list of visible devices is respected); 0 without a driver.
int num_gpus();
// Makes GPU node_rank modulo num_gpus() the current one of this thread; throws a UserError when there is none.
void use_gpu(int64_t node_rank);

struct GpuProperties {
  std::string name;
  std::string bus_id;        // "0000:1B:00.0", its address in this machine
  int major = 0, minor = 0;  // compute capability
  int num_multiprocessors = 0;
  int64_t memory_bytes = 0, free_bytes = 0;
};
GpuProperties gpu_properties();  // of the current GPU

// Which of its kinds of kernels the last op of this stream that has several ran: "sm_90a", "plain", "cuBLASLt", ...;
// empty on the CPU and where none ran. Forgotten by the call.
std::string take_last_path(const Stream& stream);

// Waits until the stream has done everything it was given. Nothing to do on the CPU.
void synchronize(const Stream& stream);

// to = from for contiguous tensors of one dtype and number of elements, on any devices. After the stream's earlier
// work; when it returns, `from` may be changed and, where `to` is in host memory, `to` holds the values.
void transfer(const Stream& stream, const Tensor& to, const Tensor& from);

// The same to host memory, after all the work of the GPU that `from` lies on. From any thread.
void copy_to_host(const Tensor& to, const Tensor& from);

// Host memory that stays where it is for the life of this, so that a GPU copies to and from it at full speed. Nothing
// to do in a build without CUDA.
class PinnedRange {
 public:
  PinnedRange(void* begin, int64_t bytes);
  ~PinnedRange();
  PinnedRange(const PinnedRange&) = delete;
  PinnedRange& operator=(const PinnedRange&) = delete;

 private:
  [[maybe_unused]] void* begin_;  // there is nothing to pin in builds without CUDA
};

// A contiguous tensor as the host can read and write it: itself where it lies in host memory, else a copy there. For
// start-up, checkpoints and messages; waits for all the GPU's work.
class HostCopy {
 public:
  explicit HostCopy(const Tensor& original);
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;
  const Tensor& tensor() const { return tensor_; }
  HostCopy& fetch();   // takes the original's values
  void store() const;  // gives the original these values

 private:
  std::vector<std::byte> memory_;
  Tensor original_, tensor_;
};

namespace detail {

// One block of the current GPU's memory; null when there is not enough.
void* allocate_on_gpu(int64_t bytes);
void free_on_gpu(void* block) noexcept;

}  // namespace detail

}  // namespace palimpsest
