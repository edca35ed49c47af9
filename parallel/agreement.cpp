#include "parallel/agreement.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "kernels/arena.h"
#include "kernels/check.h"

namespace palimpsest {

namespace {

// A stream for collectives on host memory, which need no workspace.
class HostStream {
 public:
  operator Stream&() { return stream_; }  // NOLINT: stands for the stream in calls

 private:
  Arena nothing_ = Arena("agreement", Device::kCpu, 0);
  Stream stream_ = Stream(Device::kCpu, nothing_);
};

template <class T>
T reduced(Communicator& group, DType dtype, T value, ReduceOp op) {
  HostStream stream;
  group.all_reduce(stream, Tensor(&value, dtype, {1}), op);
  return value;
}

Tensor bytes_view(std::string& text) {
  return {text.data(), DType::kU8, {static_cast<int64_t>(text.size())}};
}

// How `body` ended on a rank: the first character of the text that ranks exchange, the message behind it.
constexpr char kFine = '0', kUser = '1', kFault = '2';

std::string outcome_of(const std::function<void()>& body) {
  try {
    body();
    return std::string(1, kFine);
  } catch (const RanksFailed&) {
    throw;  // on every rank
  } catch (const UserError& error) {
    return kUser + std::string(error.what());
  } catch (const std::exception& error) {
    return kFault + std::string(error.what());
  }
}

std::string text_of_some(Communicator& group, const std::vector<std::string>& outcomes) {
  const std::vector<std::string> hosts = gather_texts(group, host_name());
  const auto failed = [](const std::string& outcome) { return outcome[0] != kFine; };
  const auto first = std::find_if(outcomes.begin(), outcomes.end(), failed);
  const auto more = std::count_if(outcomes.begin(), outcomes.end(), failed) - 1;
  const auto rank = static_cast<int64_t>(first - outcomes.begin());
  return detail::concatenate("rank ", rank, " on ", hosts[static_cast<size_t>(rank)], ": ", first->substr(1),
                             more > 0 ? detail::concatenate(" (and ", more, " more ranks failed)") : "");
}

constexpr char kSeparator = '\0';

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find(kSeparator, begin);
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += part + kSeparator;
  return text;
}

// Of this rank: name, value of rank 0 and own value of the first item that differs; empty when all are equal.
std::string first_difference(const std::vector<RankItem>& items, const std::vector<std::string>& first_rank) {
  for (size_t i = 0; i < items.size(); ++i) {
    const std::string there = 2 * i + 1 < first_rank.size() ? first_rank[2 * i + 1] : "nothing";
    if (items[i].value != there) return joined({items[i].name, there, items[i].value});
  }
  return {};
}

}  // namespace

int64_t max_over(Communicator& group, int64_t value) {
  return reduced(group, DType::kI64, value, ReduceOp::kMax);
}

double sum_over(Communicator& group, double value) {
  return reduced(group, DType::kF64, value, ReduceOp::kSum);
}

int64_t sum_over(Communicator& group, int64_t value) {
  return reduced(group, DType::kI64, value, ReduceOp::kSum);
}

std::optional<int64_t> first_rank_where(Communicator& group, bool yes) {
  const int64_t largest = max_over(group, yes ? group.size() - group.rank() : 0);
  return largest == 0 ? std::nullopt : std::optional(group.size() - largest);
}

std::vector<std::string> gather_texts(Communicator& group, const std::string& text) {
  if (group.size() == 1) return {text};
  // Every text is padded to the longest, with its length in front.
  const auto longest = static_cast<size_t>(max_over(group, static_cast<int64_t>(text.size())));
  const auto length = static_cast<uint64_t>(text.size());
  std::string mine(sizeof(length) + longest, '\0');
  std::memcpy(mine.data(), &length, sizeof(length));
  text.copy(mine.data() + sizeof(length), text.size());
  std::string all(mine.size() * static_cast<size_t>(group.size()), '\0');
  HostStream stream;
  group.all_gather(stream, bytes_view(all), bytes_view(mine));
  std::vector<std::string> texts;
  for (size_t begin = 0; begin < all.size(); begin += mine.size()) {
    uint64_t size = 0;
    std::memcpy(&size, all.data() + begin, sizeof(size));
    texts.push_back(all.substr(begin + sizeof(size), size));
  }
  return texts;
}

std::vector<std::string> texts_at_first(Communicator& group, const std::string& text) {
  if (group.size() == 1) return {text};
  HostStream stream;
  auto bytes = static_cast<int64_t>(text.size());
  std::vector<int64_t> all_bytes(static_cast<size_t>(group.size()));
  group.all_gather(stream, Tensor(all_bytes.data(), DType::kI64, {group.size()}), Tensor(&bytes, DType::kI64, {1}));
  std::string mine = text;
  if (group.rank() != 0) {
    if (bytes > 0) group.send_receive(stream, bytes_view(mine), 0, {}, -1);
    return {};
  }
  std::vector<std::string> texts = {std::move(mine)};
  for (int64_t from = 1; from < group.size(); ++from) {
    std::string received(static_cast<size_t>(all_bytes[static_cast<size_t>(from)]), '\0');
    if (!received.empty()) group.send_receive(stream, {}, -1, bytes_view(received), from);
    texts.push_back(std::move(received));
  }
  return texts;
}

std::string broadcast_text(Communicator& group, const std::string& text) {
  const auto size = static_cast<size_t>(max_over(group, group.rank() == 0 ? static_cast<int64_t>(text.size()) : 0));
  std::string result(size, '\0');
  if (group.rank() == 0) result = text;
  HostStream stream;
  group.broadcast(stream, bytes_view(result), 0);
  return result;
}

void agree(Communicator& group, const std::function<void()>& body) {
  if (group.size() == 1) return body();
  const std::string mine = outcome_of(body);
  if (max_over(group, mine[0] == kFine ? 0 : 1) == 0) return;
  const std::vector<std::string> outcomes = gather_texts(group, mine);
  const bool alike =
      std::all_of(outcomes.begin(), outcomes.end(), [&](const std::string& text) { return text == mine; });
  using Kind = RanksFailed::Kind;
  if (!alike) {
    const bool fault =
        std::any_of(outcomes.begin(), outcomes.end(), [](const auto& text) { return text[0] == kFault; });
    throw RanksFailed(text_of_some(group, outcomes), fault ? Kind::kFaultOfSome : Kind::kUserError);
  }
  throw RanksFailed(mine.substr(1), mine[0] == kUser ? Kind::kUserError : Kind::kFaultOfAll);
}

void check_same_on_ranks(Communicator& group, const std::vector<RankItem>& items) {
  std::vector<std::string> words;
  for (const RankItem& item : items) {
    words.push_back(item.name);
    words.push_back(item.value);
  }
  const std::string mine = first_difference(items, split(broadcast_text(group, joined(words))));
  if (max_over(group, mine.empty() ? 0 : 1) == 0) return;
  const std::vector<std::string> all = gather_texts(group, mine), hosts = gather_texts(group, host_name());
  const std::string example = *std::find_if(all.begin(), all.end(), [](const auto& text) { return !text.empty(); });
  const std::vector<std::string> parts = split(example);
  std::string ranks;
  for (size_t i = 0; i < all.size(); ++i)
    if (all[i] == example)
      ranks += detail::concatenate(ranks.empty() ? "" : ", ", "rank ", static_cast<int64_t>(i), " on ", hosts[i]);
  throw RanksFailed(detail::concatenate("the ranks differ in ", parts[0], ": ", parts[1], " on rank 0 on ", hosts[0],
                                        ", but ", parts[2], " on ", ranks),
                    RanksFailed::Kind::kUserError);
}

std::string host_name() {
  std::array<char, 256> name = {};
  CHECK(gethostname(name.data(), name.size() - 1) == 0, "gethostname: ", std::strerror(errno));
  return name.data();
}

}  // namespace palimpsest
