// A CUDA block on the CPU, so that kernels can be tested where there is no GPU. Every thread of the block is a fiber;
// they take turns whenever one waits for others: at a barrier, in an operation of a warp, for a copy. Slow, and exact
// about what belongs to whom: shared memory starts as NaN, copies happen early or late, waiting for what never comes is
// an error.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/check.h"

namespace palimpsest::cuda::emulated {

class Block {
 public:
  // The block whose fiber runs.
  static Block& current() {
    CHECK(running() != nullptr, "an emulated instruction outside a kernel");
    return *running();
  }

  // Runs body() once for every thread of every block. Names the thread and the block through set_indices.
  static void launch(int64_t blocks, int threads, int64_t shared_bytes, const std::function<void()>& body,
                     const std::function<void(unsigned block, unsigned thread)>& set_indices) {
    for (int64_t index = 0; index < blocks; ++index) {
      Block block(threads, shared_bytes, body);
      running() = &block;
      block.run([&](int thread) { set_indices(static_cast<unsigned>(index), static_cast<unsigned>(thread)); });
      running() = nullptr;
    }
  }

  int thread() const { return current_; }
  int num_threads() const { return static_cast<int>(fibers_.size()); }

  // Shared memory at an address, checked.
  uint8_t* shared(uint32_t address, size_t bytes, size_t alignment) {
    CHECK(address + bytes <= shared_.size() && address % alignment == 0, "shared address ", address, " of ", bytes,
          " bytes among ", shared_.size());
    return shared_.data() + address;
  }

  // All `size` members of a group bring an operand; the last to come computes on all of them, then all go on.
  template <class Operand, class Compute>
  void together(int group, int size, int member, Operand& operand, Compute compute) {
    Meeting& meeting = meetings_[group];
    meeting.operands.resize(static_cast<size_t>(size));
    meeting.operands[static_cast<size_t>(member)] = &operand;
    const int64_t round = meeting.round;
    if (++meeting.arrived < size) {
      while (meeting.round == round) wait();
      return;
    }
    compute([&meeting](int i) -> Operand& { return *static_cast<Operand*>(meeting.operands[static_cast<size_t>(i)]); });
    meeting.arrived = 0;
    ++meeting.round;
    idle_ = 0;
  }

  // ---- barriers in shared memory ----

  void barrier_init(uint32_t address, int arrivals) { barriers_[address] = {arrivals, arrivals, 0, 0}; }
  void barrier_arrive(uint32_t address, int64_t expected_bytes = 0) {
    Barrier& barrier = barriers_.at(address);
    barrier.bytes += expected_bytes;
    CHECK(--barrier.pending >= 0, "more arrivals at a barrier than it counts");
    complete(barrier);
  }
  void barrier_bytes(uint32_t address, int64_t bytes) {
    barriers_.at(address).bytes -= bytes;
    complete(barriers_.at(address));
  }
  void barrier_wait(uint32_t address, uint32_t parity) {
    while (barriers_.at(address).phase == parity) {
      if (late_.empty()) {
        wait();
      } else {
        for (const auto& action : std::exchange(late_, {})) action();
      }
    }
  }

  // ---- what happens at an unknown time ----

  void some_time(const std::function<void()>& action) {
    draws_ = draws_ * 1664525U + 1013904223U;
    if (draws_ >> 31 == 0) {
      late_.push_back(action);
    } else {
      action();
    }
  }
  // Copies that the current thread has asked for and not yet tied to a barrier.
  std::vector<std::function<void()>>& own_copies() { return fibers_[static_cast<size_t>(current_)]->copies; }

 private:
  static constexpr size_t kStackBytes = 256 * 1024;
  static constexpr int64_t kPatience = 100000;  // turns of all threads without any progress

  struct Fiber {
    ucontext_t context = {};
    std::vector<char> stack = std::vector<char>(kStackBytes);
    std::vector<std::function<void()>> copies;
    bool done = false;
  };
  struct Meeting {
    std::vector<void*> operands;
    int arrived = 0;
    int64_t round = 0;
  };
  struct Barrier {
    int count = 0, pending = 0;
    int64_t bytes = 0;
    uint32_t phase = 0;
  };

  Block(int threads, int64_t shared_bytes, const std::function<void()>& body)
      : body_(body), shared_(static_cast<size_t>(shared_bytes), 0xff) {
    for (int i = 0; i < threads; ++i) {
      fibers_.push_back(std::make_unique<Fiber>());
      Fiber& fiber = *fibers_.back();
      capture(fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = &main_;
      makecontext(&fiber.context, &Block::enter, 0);
    }
  }

  // Not inlined: it counts as returning twice, and compilers warn about the variables around it.
  [[gnu::noinline]] static void capture(ucontext_t& context) { CHECK(getcontext(&context) == 0, "getcontext failed"); }
  static Block*& running() {
    static Block* block = nullptr;
    return block;
  }
  static void enter() {
    Block& block = current();
    block.body_();
    block.fibers_[static_cast<size_t>(block.current_)]->done = true;
    block.idle_ = 0;
  }

  template <class Announce>
  void run(Announce announce) {
    for (bool any = true; any;) {
      any = false;
      for (current_ = 0; current_ < num_threads(); ++current_) {
        Fiber& fiber = *fibers_[static_cast<size_t>(current_)];
        if (fiber.done) continue;
        any = true;
        announce(current_);
        CHECK(swapcontext(&main_, &fiber.context) == 0, "swapcontext failed");
      }
      CHECK(++idle_ < kPatience, "the threads of a block wait for each other for ever");
    }
    for (const auto& [address, barrier] : barriers_)
      CHECK(barrier.bytes == 0, "copies of a block end after it, or were announced and never asked for");
  }
  void wait() {
    CHECK(swapcontext(&fibers_[static_cast<size_t>(current_)]->context, &main_) == 0, "swapcontext failed");
  }
  void complete(Barrier& barrier) {
    if (barrier.pending > 0 || barrier.bytes != 0) return;
    barrier.pending = barrier.count;
    barrier.phase ^= 1U;
    idle_ = 0;
  }

  const std::function<void()>& body_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<uint8_t> shared_;
  std::map<int, Meeting> meetings_;
  std::map<uint32_t, Barrier> barriers_;
  std::vector<std::function<void()>> late_;
  ucontext_t main_ = {};
  int current_ = 0;
  int64_t idle_ = 0;
  uint32_t draws_ = 1;
};

}  // namespace palimpsest::cuda::emulated
