// Commands that make data: tokenize.
#include <fmt/format.h>

#include <memory>

#include "data/corpus.h"
#include "data/file_ops.h"
#include "launch/commands.h"
#include "launch/exit_code.h"

namespace palimpsest {

int run_command(const TokenizeArguments& arguments, Console& console) {
  if (arguments.train_sentencepiece) {
    if (arguments.tokenizer == "bytes")
      throw_user_error("--train-sentencepiece needs --tokenizer PATH: where to write the model");
    if (path_exists(arguments.tokenizer))
      throw_user_error(arguments.tokenizer, " exists already; leave out --train-sentencepiece to use it");
    console.info(fmt::format("training a SentencePiece model of {} ids", *arguments.train_sentencepiece));
    train_tokenizer(arguments.corpus, *arguments.train_sentencepiece, arguments.tokenizer);
  }
  TokenizeOptions options = {.corpus = arguments.corpus,
                             .tokenizer = arguments.tokenizer,
                             .output = arguments.out,
                             .num_threads = arguments.threads};
  std::unique_ptr<ProgressBar> bar;
  options.progress = [&](const TokenizeProgress& progress) {
    if (!bar)
      bar =
          std::make_unique<ProgressBar>(console, "tokenize", progress.input_bytes_total, "", ProgressBar::Unit::kBytes);
    bar->update(progress.input_bytes);
  };
  const TokenizeProgress done = tokenize(options);
  bar.reset();
  if (!done.tokenizer_loss.empty())
    console.warning(arguments.tokenizer + " cannot give every text back: " + done.tokenizer_loss);
  if (!arguments.corpus.split.empty() && done.separators == 0)
    console.warning("--split " + arguments.corpus.split +
                    ": no line of a .txt file matches; each file is one document");
  console.info(fmt::format("{}: {} documents, {} tokens in {} shards from {:.1f} MB of text, {:.1f} MB/s",
                           arguments.out, done.written.documents, done.written.tokens, done.written.shards,
                           static_cast<double>(done.written.text_bytes) * 1e-6, done.megabytes_per_second()));
  return kExitSuccess;
}

}  // namespace palimpsest
