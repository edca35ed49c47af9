// Tokenizers: bytes to token ids and back. decode(encode(x)) == x for any bytes, valid UTF-8 or not, unless loss() says
// otherwise: tokenizers of public models may normalize text, mark spaces by a character of their own, or have no id for
// some of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace palimpsest {

// What decides how ids become text, and more that all tokenizers have.
struct TokenizerTable {
  std::string name;                   // "bytes", or the name of the model file without its folder
  std::string hash;                   // 16 hexadecimal digits over everything that decides the ids
  std::vector<std::string> bytes_of;  // by id; empty for bos, eos and the like
  int32_t bos = 0, eos = 0;
  std::string loss;                 // why decode(encode(x)) may differ from x, in one line; empty: it never does
  bool adds_leading_space = false;  // to a text, and `decode` takes it away
};

struct EncodeOptions {
  bool continues = false;       // the text goes on from a window before it
  bool special_tokens = false;  // bos, eos and the like, where they stand in the text by name, become their ids
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // Appends the ids of the text, without bos and eos. May be called from several threads at once.
  //
  // A long text is encoded window by window (see encoding_window), so encoding the windows one by one gives the same:
  // all but the first with options.continues.
  void encode(std::string_view text, std::vector<int32_t>& ids, EncodeOptions options = {}) const;
  std::vector<int32_t> encode(std::string_view text) const;

  std::string decode(std::span<const int32_t> ids) const;
  // What one id stands for; bos, eos and the like stand for nothing. Throws when the id is outside the vocabulary.
  std::string_view bytes_of(int32_t id) const;

  int64_t vocab_size() const { return static_cast<int64_t>(table_.bytes_of.size()); }
  int32_t bos() const { return table_.bos; }
  int32_t eos() const { return table_.eos; }
  const std::string& name() const { return table_.name; }
  const std::string& hash() const { return table_.hash; }
  const std::string& loss() const { return table_.loss; }

 protected:
  explicit Tokenizer(TokenizerTable table) : table_(std::move(table)) {}

 private:
  virtual void encode_window(std::string_view text, const EncodeOptions& options, std::vector<int32_t>& ids) const = 0;

  TokenizerTable table_;
};

std::string tokenizer_hash_of(std::string_view content);  // for TokenizerTable::hash

// 256 ids for the bytes, 256 bos, 257 eos.
std::unique_ptr<Tokenizer> make_byte_tokenizer();

// A SentencePiece model with byte fallback. Throws when the file is damaged, or when the model loses text: without byte
// pieces, with normalisation, with a dummy prefix, or with white space removed.
std::unique_ptr<Tokenizer> load_sentencepiece(const std::string& path);

// "bytes", or the path of a SentencePiece model, a tokenizer.json or a tiktoken.model (data/public_tokenizer.h): what
// the file holds decides.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& name_or_path);

// Trains a model on the texts that next_text yields (false at the end) and returns the bytes of its file. vocab_size
// counts everything: unk, bos and eos (ids 0, 1, 2), 256 bytes, and pieces. Of a long corpus a fixed random sample is
// used. The same texts give the same model.
std::string train_sentencepiece(const std::function<bool(std::string&)>& next_text, int64_t vocab_size);

// The length of the first window of a text: at most kEncodingWindow bytes. It is cut where the usual tokenizers begin a
// word in any case, the best place first: before a space that follows no white space, before other white space that
// follows none, before ideographic punctuation, else between characters. A text that is not complete must hold at least
// kEncodingWindow + 1 bytes.
inline constexpr size_t kEncodingWindow = size_t{64} << 10;
size_t encoding_window(std::string_view text);

}  // namespace palimpsest
