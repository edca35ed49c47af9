// Functions of the CUDA driver that the runtime does not have. They are looked up at run time: the program needs no
// driver to start.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace palimpsest {

// A place in a block of GPU memory.
struct PlaceInBlock {
  unsigned long long block;  // no other block of the process ever has this number
  int64_t offset;            // bytes
};

class CudaDriver {
 public:
  CudaDriver();
  // Whether the driver has all of them; the others need that.
  bool is_complete() const { return write_value_ != nullptr && wait_value_ != nullptr && attribute_ != nullptr; }

  // The queue sets *at, which is this GPU's memory, to `value`; or waits until it is at least `value`, and then sees
  // what came before it from other GPUs.
  void write_value(cudaStream_t queue, uint32_t* at, uint32_t value) const;
  void wait_value(cudaStream_t queue, const uint32_t* at, uint32_t value) const;

  // Where the address lies, where the driver knows of a block there.
  std::optional<PlaceInBlock> place_of(const void* address) const;

 private:
  decltype(&cuStreamWriteValue32) write_value_;
  decltype(&cuStreamWaitValue32) wait_value_;
  decltype(&cuPointerGetAttribute) attribute_;
  unsigned wait_flags_;
};

}  // namespace palimpsest
