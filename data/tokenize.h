// From text files to token shards.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "data/corpus.h"
#include "data/shards.h"

namespace palimpsest {

struct TokenizeProgress {
  int64_t input_bytes = 0;        // read of the files on the disk
  int64_t input_bytes_total = 0;  // of all files
  int64_t separators = 0;         // lines that separated documents
  ShardTotals written;
  std::string tokenizer_loss;  // Tokenizer::loss
  double seconds = 0.0;
  double megabytes_per_second() const {  // of text, which for .gz is more than what was read
    return seconds > 0.0 ? static_cast<double>(written.text_bytes) * 1e-6 / seconds : 0.0;
  }
};

struct TokenizeOptions {
  CorpusOptions corpus;
  std::string tokenizer = "bytes";  // or a file, see load_tokenizer
  std::string output;               // a folder that does not exist yet, or is empty
  int64_t shard_tokens = ShardWriter::kDefaultShardTokens;
  int num_threads = 0;                                    // 0: all cores
  std::function<void(const TokenizeProgress&)> progress;  // called a few times a second, and at the end
};

// Documents come out in the order of the inputs, whatever the threads do; memory does not depend on the size of the
// corpus. Empty documents are skipped; a corpus without text throws. Nothing is left in `output` after a failure.
TokenizeProgress tokenize(const TokenizeOptions& options);

// Trains a SentencePiece model (see train_sentencepiece) on the corpus, or on a fixed sample of about 64 MiB of a
// larger one, and writes it to model_path.
void train_tokenizer(const CorpusOptions& corpus, int64_t vocab_size, const std::string& model_path);

}  // namespace palimpsest
