#include <algorithm>
#include <limits>

#include "data/trie.h"
#include "data/utf8.h"
#include "data/word_model.h"
#include "kernels/check.h"

namespace palimpsest {

namespace {

constexpr double kUnknownPenalty = 10.0;

class Unigram : public WordModel {
 public:
  Unigram(const std::vector<UnigramPiece>& pieces, double lowest_score, UnknownText unknown)
      : unknown_(unknown), unknown_score_(lowest_score - kUnknownPenalty) {
    scores_.reserve(pieces.size());
    for (const UnigramPiece& piece : pieces) {
      if (!piece.text.empty()) pieces_.add(piece.text, static_cast<int32_t>(scores_.size()));
      scores_.push_back(piece.score);
    }
  }

  void encode(std::string_view word, std::vector<int32_t>& ids) const override {
    const std::vector<Piece> best = best_pieces(word);
    const size_t first = ids.size();
    for (size_t end = word.size(); end > 0;) {  // from the back
      size_t begin = best[end].begin;
      if (best[end].id != kUnknown) {
        ids.push_back(best[end].id);
      } else {
        while (unknown_.fuse && begin > 0 && best[begin].id == kUnknown) begin = best[begin].begin;
        put_unknown(word.substr(begin, end - begin), ids);
      }
      end = begin;
    }
    std::reverse(ids.begin() + static_cast<std::ptrdiff_t>(first), ids.end());
  }

  void encode_bytes(std::string_view bytes, std::vector<int32_t>& ids) const override {
    const size_t first = ids.size();
    put_unknown(bytes, ids);
    std::reverse(ids.begin() + static_cast<std::ptrdiff_t>(first), ids.end());
  }

 private:
  static constexpr int32_t kUnknown = -1;
  // The last piece of the best way to some place.
  struct Piece {
    double score = -std::numeric_limits<double>::infinity();  // of all pieces up to here
    size_t begin = 0;
    int32_t id = kUnknown;
    bool reached = false;
  };

  std::vector<Piece> best_pieces(std::string_view word) const {
    std::vector<Piece> best(word.size() + 1);  // by where the piece ends
    best[0].score = 0.0;
    const auto offer = [&](size_t begin, size_t length, int32_t id, double score) {
      Piece& piece = best[begin + length];
      const double sum = score + best[begin].score;
      if (!piece.reached || sum > piece.score) piece = {sum, begin, id, true};
    };
    for (size_t begin = 0; begin < word.size();) {
      const size_t character = utf8_character_length(word.substr(begin));
      bool character_known = false;
      pieces_.for_each_prefix(word.substr(begin), [&](size_t length, int32_t id) {
        offer(begin, length, id, scores_[id]);
        character_known |= length == character;
      });
      if (!character_known) offer(begin, character, kUnknown, unknown_score_);
      begin += character;
    }
    return best;
  }

  // In reverse, as the whole word is written.
  void put_unknown(std::string_view text, std::vector<int32_t>& ids) const {
    const int32_t whole = pieces_.find(text);
    if (whole != Trie::kNone) {  // characters that are in no way of their own, but are a piece together
      ids.push_back(whole);
    } else if (unknown_.bytes) {
      for (size_t i = text.size(); i-- > 0;) ids.push_back((*unknown_.bytes)[static_cast<uint8_t>(text[i])]);
    } else if (unknown_.id) {
      ids.push_back(*unknown_.id);
    } else {
      throw_user_error("the tokenizer has no id for '", utf8_valid_length(text) == text.size() ? text : "a byte",
                       "' and none for unknown text (unk_id)");
    }
  }

  Trie pieces_;
  std::vector<double> scores_;  // by id
  UnknownText unknown_;
  double unknown_score_;
};

}  // namespace

std::unique_ptr<WordModel> make_unigram(const std::vector<UnigramPiece>& pieces, double lowest_score,
                                        UnknownText unknown) {
  return std::make_unique<Unigram>(pieces, lowest_score, unknown);
}

}  // namespace palimpsest
