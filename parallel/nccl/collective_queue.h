// The stream of a GPU on which collectives run in the order in which they were started, and which of them are not done.
#pragma once

#include <cuda_runtime.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/cuda/check.h"
#include "parallel/watchdog.h"

namespace palimpsest {

class CollectiveQueue {
 public:
  CollectiveQueue();  // on the current GPU
  ~CollectiveQueue();
  CollectiveQueue(const CollectiveQueue&) = delete;
  CollectiveQueue& operator=(const CollectiveQueue&) = delete;

  // Calls launch(stream), which puts a collective on this stream, after what `caller` was given so far. Returns its
  // number. `operation` is a literal.
  template <class Launch>
  int64_t start(const char* operation, cudaStream_t caller, Launch&& launch) {
    CUDA_CHECK(cudaEventRecord(ready_.get(), caller));
    CUDA_CHECK(cudaStreamWaitEvent(stream_, ready_.get()));
    std::forward<Launch>(launch)(stream_);
    return mark(operation);
  }
  // What `caller` is given from here on comes after the collective.
  void wait(int64_t number, cudaStream_t caller);

  // Waits until all of it is done; false when that ended in an error.
  bool drain();
  // The oldest that is not done, from any thread. Calls nothing that can be stuck with the GPU.
  std::optional<Watchdog::Source::Oldest> oldest();

 private:
  struct EventDeleter {
    void operator()(cudaEvent_t event) const noexcept { cudaEventDestroy(event); }
  };
  using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, EventDeleter>;
  static Event make_event();

  struct Underway {
    const char* operation;
    Event done;
  };

  int64_t mark(const char* operation);
  void follow();

  int device_ = 0;
  cudaStream_t stream_ = nullptr;
  Event ready_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool stopping_ = false;
  std::deque<Underway> underway_;  // in order of their numbers; those that are done leave it soon
  int64_t first_ = 0;              // number of the first of them
  Watchdog::Clock::time_point since_;
  std::vector<Event> spare_;

  std::thread follower_;  // last: starts when all else is there
};

}  // namespace palimpsest
