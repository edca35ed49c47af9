// What attention layers pass over the sequence axis: rows of keys and values, or of what they are made from, from the
// rank that holds them to those whose queries see them. Every sequence rank makes the same calls.
//
// It goes in rounds: in round d a rank sends to the one d after it and receives from the one d before it, while it
// attends to what came in the round before; the gradients of those rows go the same way back. So a rank holds the rows
// of two others at most, however many there are, and what none of its queries see is not sent.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "model/layer.h"

namespace palimpsest {

// Some rows of another range, all of them before the queries: the rank's tokens [first, first + length).
struct EarlierRows {
  int64_t first = 0, length = 0;
  Tensor rows;    // [n, C], n <= most_of(device)
  Tensor d_rows;  // [n, C], accumulated; absent without gradients
  // On a GPU many, since the output is rounded to bf16 after each block.
  static int64_t most_of(Device device) { return device == Device::kCuda ? 16384 : 256; }
};

class PassedRows {
 public:
  enum class Gradients : uint8_t { kNo, kYes };

  // `parts`, each [N, c] of the rank's tokens, are passed side by side as columns of rows of C numbers. Takes scratch
  // memory; the first round is under way when it returns.
  PassedRows(Context& context, const Sequence& sequence, std::vector<Tensor> parts,
             Gradients gradients = Gradients::kNo);
  PassedRows(const PassedRows&) = delete;
  PassedRows& operator=(const PassedRows&) = delete;

  using Visit = std::function<void(const EarlierRows&)>;
  // All rounds: calls visit for all that this rank's queries see in other ranges.
  void for_each_block(const Visit& visit);
  // After it, with gradients: the sum of what the visits of all ranks gave for this rank's rows, [N, C].
  const Tensor& d_own() const { return d_own_; }

 private:
  struct Peers {
    int64_t to, from;
  };
  Peers peers_of(int64_t round) const;
  void take_own(const Tensor& rows, int64_t first) const;
  void start_round(int64_t round);
  template <class Rows>
  void visit_all(int64_t other, const Visit& visit, Rows&& rows_of_block);
  void start_return(int64_t round);
  void finish_return();
  void advance();

  Context& context_;
  const Crossings& crossings_;
  std::vector<Tensor> parts_;
  const int64_t block_;             // rows of a visit at most
  Tensor own_block_;                // [n, C], where a range of this rank sees another of its own
  Tensor sent_;                     // [n, C]
  std::array<Tensor, 2> received_;  // [n, C] of this round and the next
  std::unique_ptr<Pending> round_;
  // With gradients:
  Tensor d_own_;                      // [N, C]
  std::array<Tensor, 2> d_received_;  // as received_
  Tensor d_sent_;                     // as sent_
  std::unique_ptr<Pending> return_;
  int64_t returning_ = 0;  // the round whose gradients are on their way
};

}  // namespace palimpsest
