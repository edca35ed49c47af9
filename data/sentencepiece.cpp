// SentencePiece made lossless. The library works on UTF-8 text and writes spaces as U+2581, so three kinds of input are
// given to it as byte pieces: bytes that are not UTF-8, NUL, and U+2581 itself. Decoding is by a table of what each id
// stands for.
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <unordered_map>

#include "data/file_ops.h"
#include "data/tokenizer.h"
#include "data/utf8.h"
#include "kernels/check.h"
#include "kernels/random.h"

namespace palimpsest {

namespace {

constexpr std::string_view kSpaceMark = "\xE2\x96\x81";  // U+2581
constexpr int kNumBytes = 256;

std::string byte_piece(int byte) {
  char text[8];
  std::snprintf(text, sizeof(text), "<0x%02X>", static_cast<unsigned>(byte));
  return text;
}

// The library's message without its source position, on one line.
std::string cause(const sentencepiece::util::Status& status) {
  std::string text = status.ToString();
  if (const size_t end = text.rfind("] "); end != std::string::npos) text = text.substr(end + 2);
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

std::string with_spaces(std::string_view piece) {
  std::string text;
  for (size_t mark; (mark = piece.find(kSpaceMark)) != std::string_view::npos;
       piece.remove_prefix(mark + kSpaceMark.size()))
    text.append(piece.substr(0, mark)).push_back(' ');
  return text.append(piece);
}

// The length of the start of the text that the library represents faithfully.
size_t plain_length(std::string_view text) {
  size_t length = 0;
  while (length < text.size()) {
    const std::string_view rest = text.substr(length);
    const size_t character = utf8_character_length(rest);
    if (character == 0 || rest[0] == '\0' || rest.starts_with(kSpaceMark)) break;
    length += character;
  }
  return length;
}

class SentencePieceTokenizer : public Tokenizer {
 public:
  SentencePieceTokenizer(TokenizerTable table, std::unique_ptr<sentencepiece::SentencePieceProcessor> processor)
      : Tokenizer(std::move(table)), processor_(std::move(processor)) {
    for (int byte = 0; byte < kNumBytes; ++byte) byte_id_[byte] = processor_->PieceToId(byte_piece(byte));
  }

 private:
  void encode_window(std::string_view text, const EncodeOptions&, std::vector<int32_t>& ids) const override {
    while (!text.empty()) {
      const size_t length = plain_length(text);
      encode_plain(text.substr(0, length), ids);
      text.remove_prefix(length);
      while (!text.empty() && plain_length(text.substr(0, 4)) == 0) {
        ids.push_back(byte_id_[static_cast<uint8_t>(text[0])]);
        text.remove_prefix(1);
      }
    }
  }

  void encode_plain(std::string_view text, std::vector<int32_t>& ids) const {
    if (text.empty()) return;
    std::vector<int> pieces;
    const auto status = processor_->Encode({text.data(), text.size()}, &pieces);
    CHECK(status.ok(), cause(status));
    // No model that was accepted at loading is known to come here with another text, but a promise is a promise.
    if (decode(pieces) == text) {
      ids.insert(ids.end(), pieces.begin(), pieces.end());
    } else {
      for (const char c : text) ids.push_back(byte_id_[static_cast<uint8_t>(c)]);
    }
  }

  std::unique_ptr<sentencepiece::SentencePieceProcessor> processor_;
  int32_t byte_id_[kNumBytes];
};

// Lines of the texts, with their line ends, as the library wants them: UTF-8 of limited length.
class Lines : public sentencepiece::SentenceIterator {
 public:
  static constexpr size_t kLongest = 4096;

  explicit Lines(const std::function<bool(std::string&)>& next_text) : next_text_(next_text) { Next(); }
  bool done() const override { return done_; }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }

  void Next() override {
    do {
      while (position_ == text_.size()) {
        position_ = 0;
        text_.clear();
        if (!next_text_(text_)) {
          done_ = true;
          return;
        }
      }
      const size_t line_end = text_.find('\n', position_);
      const size_t length = line_end == std::string::npos ? text_.size() - position_ : line_end + 1 - position_;
      line_ = text_.substr(position_, std::min(length, kLongest));
      position_ += line_.size();
    } while (plain_length(line_) != line_.size());
  }

 private:
  const std::function<bool(std::string&)>& next_text_;
  std::string text_;
  size_t position_ = 0;
  std::string line_;
  bool done_ = false;
};

// Throws when the model changes text of a kind that models are often set to change.
void check_lossless(const std::string& path, const sentencepiece::SentencePieceProcessor& processor,
                    const std::vector<std::string>& bytes_of) {
  const struct {
    std::string_view text;
    const char* fault;
  } kProbes[] = {
      {"a", "adds a space at the start of a text; train it with add_dummy_prefix=false"},
      {"a  b", "removes spaces; train it with remove_extra_whitespaces=false"},
      {" a ", "removes spaces; train it with remove_extra_whitespaces=false"},
      {"a\n\tb\r\n", "changes white space; train it with normalization_rule_name=identity"},
      {"\xEF\xAC\x81 \xEF\xBC\xA1", "normalises text; train it with normalization_rule_name=identity"},
  };
  for (const auto& probe : kProbes) {
    std::vector<int> ids;
    std::string decoded;
    const auto status = processor.Encode({probe.text.data(), probe.text.size()}, &ids);
    if (status.ok())
      for (const int id : ids) decoded += bytes_of[id];
    if (decoded != probe.text) throw_user_error(path, ": the model loses text: it ", probe.fault);
  }
}

}  // namespace

std::unique_ptr<Tokenizer> load_sentencepiece(const std::string& path) {
  const std::string model = read_whole_file(path);
  auto processor = std::make_unique<sentencepiece::SentencePieceProcessor>();
  const auto status = processor->LoadFromSerializedProto(model);
  if (!status.ok() || processor->GetPieceSize() == 0) throw_user_error(path, ": not a SentencePiece model, or damaged");
  if (processor->bos_id() < 0 || processor->eos_id() < 0 || processor->bos_id() == processor->eos_id())
    throw_user_error(path, ": the model has no ids for the start and the end of a document (bos_id, eos_id)");

  std::vector<std::string> bytes_of(processor->GetPieceSize());
  for (int id = 0; id < processor->GetPieceSize(); ++id)
    if (!processor->IsControl(id) && !processor->IsUnknown(id) && !processor->IsByte(id))
      bytes_of[id] = with_spaces(processor->IdToPiece(id));
  for (int byte = 0; byte < kNumBytes; ++byte) {
    const int id = processor->PieceToId(byte_piece(byte));
    if (!processor->IsByte(id))
      throw_user_error(path, ": the model has no piece ", byte_piece(byte),
                       " and so cannot represent every text; train it with byte_fallback=true");
    bytes_of[id] = std::string(1, static_cast<char>(byte));
  }
  check_lossless(path, *processor, bytes_of);
  TokenizerTable table = {.name = std::filesystem::path(path).filename().string(),
                          .hash = tokenizer_hash_of(model),
                          .bytes_of = std::move(bytes_of),
                          .bos = processor->bos_id(),
                          .eos = processor->eos_id()};
  return std::make_unique<SentencePieceTokenizer>(std::move(table), std::move(processor));
}

std::string train_sentencepiece(const std::function<bool(std::string&)>& next_text, int64_t vocab_size) {
  const std::unordered_map<std::string, std::string> settings = {
      {"model_type", "unigram"},
      {"vocab_size", std::to_string(vocab_size)},
      {"normalization_rule_name", "identity"},
      {"add_dummy_prefix", "false"},
      {"remove_extra_whitespaces", "false"},
      {"allow_whitespace_only_pieces", "true"},
      {"byte_fallback", "true"},
      {"unk_id", "0"},
      {"bos_id", "1"},
      {"eos_id", "2"},
      {"pad_id", "-1"},
      {"max_sentence_length", std::to_string(Lines::kLongest)},
      {"input_sentence_size", "2000000"},
      {"num_threads", "4"},  // fixed: sums of each thread are added up, so the number decides the last digits
      {"minloglevel", "2"},
  };
  sentencepiece::SetRandomGeneratorSeed(1);
  Lines lines(next_text);
  if (lines.done()) throw_user_error("a SentencePiece model needs some text in UTF-8 to be trained on");
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train(settings, &lines, &model);
  if (!status.ok()) throw_user_error("cannot train a SentencePiece model of ", vocab_size, " ids: ", cause(status));
  return model;
}

}  // namespace palimpsest
