#include "data/tokenize.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "data/file_ops.h"
#include "data/ordered_pool.h"
#include "data/tokenizer.h"
#include "kernels/check.h"
#include "kernels/random.h"

namespace palimpsest {

namespace {

// A piece of the corpus, encoded.
struct EncodedPiece {
  struct Part {
    size_t end = 0;  // in ids
    int64_t text_bytes = 0;
    bool begins_document = false;
    bool ends_document = false;
  };
  std::vector<int32_t> ids;
  std::vector<Part> parts;
};

// The text of a part; `json` holds it when it had to be unpacked.
std::string_view text_of(const CorpusPiece& piece, const CorpusPiece::Part& part, const std::string& field,
                         std::string& json) {
  if (part.line == 0) return piece.text(part);
  try {
    json = text_of_json_line(piece.text(part), field);
  } catch (const UserError& error) {
    throw_user_error(piece.file, ":", part.line, ": ", error.what());
  }
  return json;
}

EncodedPiece encode(const CorpusPiece& piece, const Tokenizer& tokenizer, const std::string& field) {
  EncodedPiece encoded;
  std::string json;
  for (const CorpusPiece::Part& part : piece.parts) {
    const std::string_view text = text_of(piece, part, field, json);
    if (text.empty()) continue;
    tokenizer.encode(text, encoded.ids, {.continues = !part.begins_document});
    encoded.parts.push_back(
        {encoded.ids.size(), static_cast<int64_t>(text.size()), part.begins_document, part.ends_document});
  }
  return encoded;
}

// Hands encoded pieces to the shards and counts.
class Output {
 public:
  Output(ShardWriter& writer, ShardTotals& totals) : writer_(writer), totals_(totals) {}

  void write(const EncodedPiece& piece) {
    size_t begin = 0;
    for (const EncodedPiece::Part& part : piece.parts) {
      if (part.begins_document) {
        writer_.begin_document();
        text_bytes_ = 0;
      }
      writer_.append(std::span(piece.ids).subspan(begin, part.end - begin));
      text_bytes_ += part.text_bytes;
      totals_.tokens += static_cast<int64_t>(part.end - begin);
      totals_.text_bytes += part.text_bytes;
      if (part.ends_document) {
        writer_.end_document(text_bytes_);
        totals_.documents += 1;
        totals_.tokens += 2;  // bos and eos
      }
      begin = part.end;
    }
  }

 private:
  ShardWriter& writer_;
  ShardTotals& totals_;
  int64_t text_bytes_ = 0;  // of the open document
};

}  // namespace

TokenizeProgress tokenize(const TokenizeOptions& options) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kBetweenReports = std::chrono::milliseconds(200);
  const auto start = Clock::now();
  auto last_report = start;

  CorpusReader corpus(options.corpus);
  const std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(options.tokenizer);
  ShardWriter writer(options.output, vocabulary_of(*tokenizer), options.shard_tokens);
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const int num_threads = options.num_threads > 0 ? options.num_threads : cores;
  OrderedPool<CorpusPiece, EncodedPiece> pool(
      num_threads, [&](CorpusPiece piece) { return encode(piece, *tokenizer, options.corpus.text_field); });

  TokenizeProgress progress;
  progress.tokenizer_loss = tokenizer->loss();
  progress.input_bytes_total = corpus.total_bytes();
  const auto update = [&] {
    progress.input_bytes = corpus.bytes_read();
    progress.separators = corpus.num_separators();
    progress.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  };
  Output output(writer, progress.written);
  const auto take = [&] {
    output.write(pool.pop());
    if (!options.progress || Clock::now() - last_report < kBetweenReports) return;
    last_report = Clock::now();
    update();
    options.progress(progress);
  };

  // This thread reads and writes, the pool encodes; the number of pieces on the way bounds the memory.
  const size_t most_pending = 3 * static_cast<size_t>(num_threads) + 1;
  for (CorpusPiece piece; corpus.next(piece);) {
    pool.push(std::move(piece));
    if (pool.num_pending() >= most_pending) take();
  }
  while (pool.num_pending() > 0) take();
  if (progress.written.documents == 0)
    throw_user_error(options.corpus.inputs.front(), ": there is no text in the ", corpus.num_files(),
                     " file(s) of the corpus");
  progress.written = writer.finish();
  update();
  if (options.progress) options.progress(progress);
  return progress;
}

void train_tokenizer(const CorpusOptions& options, int64_t vocab_size, const std::string& model_path) {
  constexpr double kSampleBytes = 64 << 20;
  CorpusReader corpus(options);
  const double share = kSampleBytes / static_cast<double>(std::max<int64_t>(1, corpus.total_bytes()));
  CorpusPiece piece;
  size_t next_part = 0;
  uint64_t num_parts = 0;
  const auto next_text = [&](std::string& text) {
    while (true) {
      if (next_part == piece.parts.size()) {
        next_part = 0;
        if (!corpus.next(piece)) return false;
      }
      const CorpusPiece::Part& part = piece.parts[next_part++];
      if (random_uniform(0, hash_of("tokenizer sample"), num_parts++) >= share) continue;
      std::string json;
      text = text_of(piece, part, options.text_field, json);
      return true;
    }
  };
  const std::string model = train_sentencepiece(next_text, vocab_size);
  const auto folder = std::filesystem::path(model_path).parent_path();
  if (!folder.empty()) create_directories(folder.string());
  write_file_atomically(model_path, model);
}

}  // namespace palimpsest
