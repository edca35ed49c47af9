#include <algorithm>
#include <limits>
#include <queue>

#include "data/flat_map.h"
#include "data/trie.h"
#include "data/utf8.h"
#include "data/word_model.h"

namespace palimpsest {

namespace {

constexpr uint32_t kNoRank = std::numeric_limits<uint32_t>::max();

struct Join {
  uint32_t rank = kNoRank;
  int32_t joined = 0;
};

class Merges {
 public:
  explicit Merges(const std::vector<BpeMerge>& merges) {
    uint32_t rank = 0;
    for (const BpeMerge& merge : merges) joins_[key(merge.left, merge.right)] = {rank++, merge.joined};
  }

  void apply(std::vector<int32_t>& ids, size_t begin) const {
    constexpr size_t kShort = 24;
    if (ids.size() - begin <= kShort)
      apply_short(ids, begin);
    else
      apply_long(ids, begin);
  }

 private:
  static uint64_t key(int32_t left, int32_t right) {
    return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  }
  Join join(int32_t left, int32_t right) const {
    const Join* found = joins_.find(key(left, right));
    return found == nullptr ? Join{} : *found;
  }

  // Searches all pairs before each join: quadratic, and the fastest for a word of usual length.
  void apply_short(std::vector<int32_t>& ids, size_t begin) const {
    std::vector<Join> joins;  // joins[i]: of ids[begin + i] and its right neighbour
    joins.reserve(ids.size() - begin);
    for (size_t i = begin; i + 1 < ids.size(); ++i) joins.push_back(join(ids[i], ids[i + 1]));
    while (!joins.empty()) {
      const auto best =
          std::min_element(joins.begin(), joins.end(), [](const Join& a, const Join& b) { return a.rank < b.rank; });
      if (best->rank == kNoRank) return;
      const auto i = static_cast<size_t>(best - joins.begin());
      ids[begin + i] = best->joined;
      ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(begin + i + 1));
      joins.erase(best);
      if (i < joins.size()) joins[i] = join(ids[begin + i], ids[begin + i + 1]);
      if (i > 0) joins[i - 1] = join(ids[begin + i - 1], ids[begin + i]);
    }
  }

  // A heap of pairs and a linked list of symbols: n log n.
  void apply_long(std::vector<int32_t>& ids, size_t begin) const {
    struct Symbol {
      int32_t id;
      size_t left, right;  // neighbours; size() at the borders
      bool joined_away = false;
    };
    struct Candidate {
      Join join;
      size_t left, right;
      int32_t left_id, right_id;                      // when it was found
      bool operator<(const Candidate& other) const {  // the top of the heap is the largest
        return join.rank != other.join.rank ? join.rank > other.join.rank : left > other.left;
      }
    };
    const size_t count = ids.size() - begin;
    std::vector<Symbol> symbols(count);
    for (size_t i = 0; i < count; ++i) symbols[i] = {ids[begin + i], i == 0 ? count : i - 1, i + 1};
    std::priority_queue<Candidate> candidates;
    const auto consider = [&](size_t left, size_t right) {
      if (left == count || right == count) return;
      const Join found = join(symbols[left].id, symbols[right].id);
      if (found.rank != kNoRank) candidates.push({found, left, right, symbols[left].id, symbols[right].id});
    };
    for (size_t i = 0; i + 1 < count; ++i) consider(i, i + 1);
    while (!candidates.empty()) {
      const Candidate best = candidates.top();
      candidates.pop();
      Symbol &left = symbols[best.left], &right = symbols[best.right];
      const bool stale = left.joined_away || right.joined_away || left.right != best.right || left.id != best.left_id ||
                         right.id != best.right_id;
      if (stale) continue;
      left.id = best.join.joined;
      left.right = right.right;
      right.joined_away = true;
      if (right.right < count) symbols[right.right].left = best.left;
      consider(left.left, best.left);
      consider(best.left, left.right);
    }
    ids.resize(begin);
    for (const Symbol& symbol : symbols)
      if (!symbol.joined_away) ids.push_back(symbol.id);
  }

  FlatMap<Join> joins_;
};

class Bpe : public WordModel {
 public:
  Bpe(const std::vector<std::string>& pieces, const std::vector<BpeMerge>& merges, BpeOptions options)
      : merges_(merges), options_(options) {
    for (size_t id = 0; id < pieces.size(); ++id)
      if (!pieces[id].empty()) vocabulary_.add(pieces[id], static_cast<int32_t>(id));
    for (int byte = 0; byte < 256; ++byte) {
      const char text = static_cast<char>(byte);
      byte_id_[byte] = vocabulary_.find({&text, 1});
    }
  }

  void encode(std::string_view word, std::vector<int32_t>& ids) const override {
    if (options_.whole_words) {
      const int32_t id = vocabulary_.find(word);
      if (id != Trie::kNone) return ids.push_back(id);
    }
    const size_t begin = ids.size();
    if (options_.unit == BpeOptions::Unit::kByte)
      put_bytes(word, ids);
    else
      put_characters(word, ids);
    merges_.apply(ids, begin);
  }

  void encode_bytes(std::string_view bytes, std::vector<int32_t>& ids) const override {
    const size_t begin = ids.size();
    put_bytes(bytes, ids);
    merges_.apply(ids, begin);
  }

 private:
  // Collects unknown units until a known one comes.
  class UnknownRun {
   public:
    UnknownRun(const UnknownText& unknown, std::vector<int32_t>& ids) : unknown_(unknown), ids_(ids) {}
    ~UnknownRun() { end(); }
    UnknownRun(const UnknownRun&) = delete;
    UnknownRun& operator=(const UnknownRun&) = delete;
    void put() {
      if (!unknown_.fuse) end();
      open_ = unknown_.id.has_value();
    }
    void end() {
      if (open_) ids_.push_back(*unknown_.id);
      open_ = false;
    }

   private:
    const UnknownText& unknown_;
    std::vector<int32_t>& ids_;
    bool open_ = false;
  };

  void put_unit(std::string_view unit, int32_t id, UnknownRun& run, std::vector<int32_t>& ids) const {
    if (id != Trie::kNone) {
      run.end();
      ids.push_back(id);
    } else if (options_.unknown.bytes) {
      for (const char c : unit) ids.push_back((*options_.unknown.bytes)[static_cast<uint8_t>(c)]);
    } else {
      run.put();
    }
  }
  void put_bytes(std::string_view text, std::vector<int32_t>& ids) const {
    UnknownRun run(options_.unknown, ids);
    const bool units = options_.unit == BpeOptions::Unit::kByte;
    for (size_t i = 0; i < text.size(); ++i)
      put_unit(text.substr(i, 1), units ? byte_id_[static_cast<uint8_t>(text[i])] : Trie::kNone, run, ids);
  }
  void put_characters(std::string_view text, std::vector<int32_t>& ids) const {
    UnknownRun run(options_.unknown, ids);
    for (; !text.empty(); text.remove_prefix(utf8_character_length(text))) {
      const std::string_view character = text.substr(0, utf8_character_length(text));
      put_unit(character, vocabulary_.find(character), run, ids);
    }
  }

  Trie vocabulary_;
  std::array<int32_t, 256> byte_id_;
  Merges merges_;
  BpeOptions options_;
};

}  // namespace

std::unique_ptr<WordModel> make_bpe(const std::vector<std::string>& pieces, const std::vector<BpeMerge>& merges,
                                    BpeOptions options) {
  return std::make_unique<Bpe>(pieces, merges, options);
}

}  // namespace palimpsest
