// The models of public tokenizer files: how a word becomes token ids.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace palimpsest {

class WordModel {
 public:
  virtual ~WordModel() = default;

  // Appends the ids of a word, which is not empty: valid UTF-8 that a pre-tokenizer cut.
  virtual void encode(std::string_view word, std::vector<int32_t>& ids) const = 0;
  // The same for bytes that are no UTF-8.
  virtual void encode_bytes(std::string_view bytes, std::vector<int32_t>& ids) const = 0;
};

// What stands for text that the vocabulary lacks.
struct UnknownText {
  std::optional<std::array<int32_t, 256>> bytes;  // the ids of <0x00> ... <0xFF>: then nothing is unknown
  std::optional<int32_t> id;
  bool fuse = false;  // neighbours share one id
};

// Byte-pair encoding (Sennrich, Haddow, Birch 2016): of all neighbours that some merge joins, the one of the lowest
// rank is joined first, the leftmost of equals, until none is left.
struct BpeMerge {
  int32_t left, right, joined;
};
struct BpeOptions {
  enum class Unit : uint8_t { kByte, kCharacter } unit = Unit::kByte;  // what a word is cut into at first
  bool whole_words = false;  // a word that is in the vocabulary is one token, whatever the merges say
  UnknownText unknown;       // id absent: unknown units are left out
};
// pieces: by id, the empty one for an id that text never becomes. merges: by rank; the last of equal pairs counts.
std::unique_ptr<WordModel> make_bpe(const std::vector<std::string>& pieces, const std::vector<BpeMerge>& merges,
                                    BpeOptions options);

// Unigram (Kudo 2018): the pieces whose scores have the largest sum. A character in no piece costs the lowest score
// less 10.
struct UnigramPiece {
  std::string text;  // empty for an id that text never becomes
  double score = 0.0;
};
// Of texts with characters that are in no piece, `encode` throws when neither bytes nor an id stand for them.
std::unique_ptr<WordModel> make_unigram(const std::vector<UnigramPiece>& pieces, double lowest_score,
                                        UnknownText unknown);

}  // namespace palimpsest
