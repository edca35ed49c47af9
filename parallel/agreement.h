// What ranks tell each other in a few bytes on the host: the largest of their numbers, a text of each, whether a piece
// of work failed on one of them. Every rank of the group makes the same calls in the same order.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "parallel/communicator.h"

namespace palimpsest {

int64_t max_over(Communicator& group, int64_t value);
double sum_over(Communicator& group, double value);
int64_t sum_over(Communicator& group, int64_t value);
// The lowest rank that says yes; none when no rank does.
std::optional<int64_t> first_rank_where(Communicator& group, bool yes);
// Of all ranks, in their order. Texts may differ in length.
std::vector<std::string> gather_texts(Communicator& group, const std::string& text);
// The same on rank 0; elsewhere nothing. For texts so long that only one rank should hold all of them.
std::vector<std::string> texts_at_first(Communicator& group, const std::string& text);
// Rank 0's.
std::string broadcast_text(Communicator& group, const std::string& text);

// What every rank throws at the same place, so that the job ends in good order.
class ThrownByAll : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Work failed on some ranks, and all of them know. One of them prints it for all.
class RanksFailed : public ThrownByAll {
 public:
  enum class Kind : uint8_t { kUserError, kFaultOfAll, kFaultOfSome };
  RanksFailed(const std::string& text, Kind kind) : ThrownByAll(text), kind_(kind) {}
  Kind kind() const { return kind_; }

 private:
  Kind kind_;
};

// Runs `body` on every rank. When it throws on any of them, all throw RanksFailed: the same text on all ranks is one
// error of all, else the text names the first rank that failed, its host and its cause. In `body` ranks do not wait for
// each other, or only in what throws on all ranks or on none. A group of one lets what was thrown pass.
void agree(Communicator& group, const std::function<void()>& body);

// Something that must be the same on every rank.
struct RankItem {
  std::string name;   // "train.steps"
  std::string value;  // as text, for the message
};
// Every rank passes the same names. Throws RanksFailed on all of them when a value is not that of rank 0: with the
// first item that differs, both values and the ranks.
void check_same_on_ranks(Communicator& group, const std::vector<RankItem>& items);

std::string host_name();

}  // namespace palimpsest
