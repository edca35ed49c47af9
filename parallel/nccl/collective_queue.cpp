#include "parallel/nccl/collective_queue.h"

namespace palimpsest {

namespace {

constexpr std::chrono::milliseconds kBetweenLooks{20};

}  // namespace

CollectiveQueue::CollectiveQueue() : ready_(make_event()) {
  CUDA_CHECK(cudaGetDevice(&device_));
  // Before other work that waits for the processors: another rank waits for this.
  int least = 0, greatest = 0;
  CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
  follower_ = std::thread([this] { follow(); });
}

CollectiveQueue::~CollectiveQueue() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  follower_.join();
  cudaStreamDestroy(stream_);
}

// CUDA is called without the mutex: it waits when the stream of work is full, for ever when a collective hangs, and the
// watchdog must still be answered. An event that is done meanwhile is recorded anew by the caller's thread alone, here.
void CollectiveQueue::wait(int64_t number, cudaStream_t caller) {
  cudaEvent_t done = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (number >= first_) done = underway_[number - first_].done.get();
  }
  if (done != nullptr) CUDA_CHECK(cudaStreamWaitEvent(caller, done));
}

bool CollectiveQueue::drain() {
  return cudaStreamSynchronize(stream_) == cudaSuccess;
}

std::optional<Watchdog::Source::Oldest> CollectiveQueue::oldest() {
  const std::lock_guard lock(mutex_);
  if (underway_.empty()) return std::nullopt;
  return Watchdog::Source::Oldest{underway_.front().operation, since_, {}};
}

CollectiveQueue::Event CollectiveQueue::make_event() {
  cudaEvent_t event = nullptr;
  CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return Event(event);
}

int64_t CollectiveQueue::mark(const char* operation) {
  Event done;
  {
    const std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      done = std::move(spare_.back());
      spare_.pop_back();
    }
  }
  if (!done) done = make_event();
  CUDA_CHECK(cudaEventRecord(done.get(), stream_));
  const std::lock_guard lock(mutex_);
  if (underway_.empty()) since_ = Watchdog::Clock::now();
  underway_.push_back({operation, std::move(done)});
  return first_ + static_cast<int64_t>(underway_.size()) - 1;
}

// On a thread of its own: a question to the GPU waits while another thread's call does, which can be for ever when the
// stream of work is full and a collective hangs. So it is asked without the mutex; only this thread takes events away.
// An error of the GPU is told by the computation's next call, and here the collective counts as under way.
void CollectiveQueue::follow() {
  if (cudaSetDevice(device_) != cudaSuccess) return;  // a thread begins on GPU 0, which may be another rank's
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    bool done = false;
    if (!underway_.empty()) {
      const cudaEvent_t event = underway_.front().done.get();
      lock.unlock();
      done = cudaEventQuery(event) == cudaSuccess;
      lock.lock();
    }
    if (!done) {
      changed_.wait_for(lock, kBetweenLooks, [&] { return stopping_; });
      continue;
    }
    spare_.push_back(std::move(underway_.front().done));
    underway_.pop_front();
    ++first_;
    since_ = Watchdog::Clock::now();
  }
}

}  // namespace palimpsest
