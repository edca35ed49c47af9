// Tokenizers: bytes to token ids and back, without loss. decode(encode(x)) == x for any bytes, valid UTF-8 or not.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace palimpsest {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // Appends the ids of the text, without bos and eos. May be called from several threads at once.
  //
  // A long text is encoded window by window (see encoding_window), so encoding the windows one by one gives the same.
  void encode(std::string_view text, std::vector<int32_t>& ids) const;
  std::vector<int32_t> encode(std::string_view text) const;

  std::string decode(std::span<const int32_t> ids) const;
  // What one id stands for; bos, eos and the like stand for nothing. Throws when the id is outside the vocabulary.
  std::string_view bytes_of(int32_t id) const;

  int64_t vocab_size() const { return static_cast<int64_t>(bytes_of_.size()); }
  int32_t bos() const { return bos_; }
  int32_t eos() const { return eos_; }
  const std::string& name() const { return name_; }  // "bytes", or the name of the model file without its folder
  const std::string& hash() const { return hash_; }  // 16 hexadecimal digits over everything that decides the ids

 protected:
  Tokenizer(std::string name, std::string hash, std::vector<std::string> bytes_of, int32_t bos, int32_t eos);

 private:
  virtual void encode_window(std::string_view text, std::vector<int32_t>& ids) const = 0;

  std::string name_;
  std::string hash_;
  std::vector<std::string> bytes_of_;  // by id
  int32_t bos_;
  int32_t eos_;
};

// 256 ids for the bytes, 256 bos, 257 eos.
std::unique_ptr<Tokenizer> make_byte_tokenizer();

// A SentencePiece model with byte fallback. Throws when the file is damaged, or when the model loses text: without byte
// pieces, with normalisation, with a dummy prefix, or with white space removed.
std::unique_ptr<Tokenizer> load_sentencepiece(const std::string& path);

// "bytes", or the path of a SentencePiece model.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& name_or_path);

// Trains a model on the texts that next_text yields (false at the end) and returns the bytes of its file. vocab_size
// counts everything: unk, bos and eos (ids 0, 1, 2), 256 bytes, and pieces. Of a long corpus a fixed random sample is
// used. The same texts give the same model.
std::string train_sentencepiece(const std::function<bool(std::string&)>& next_text, int64_t vocab_size);

// The length of the first window of a text: at most kEncodingWindow bytes, cut before white space that follows
// something else, else between characters. A text that is not complete must hold at least kEncodingWindow + 1 bytes.
inline constexpr size_t kEncodingWindow = size_t{64} << 10;
size_t encoding_window(std::string_view text);

}  // namespace palimpsest
