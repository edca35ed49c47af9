#include "trainer/evaluation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <numbers>
#include <span>
#include <utility>

#include "data/file_ops.h"
#include "data/hdf5_file.h"
#include "data/sampler.h"
#include "data/tokenizer.h"
#include "kernels/check.h"
#include "kernels/cross_entropy.h"
#include "kernels/device.h"
#include "kernels/elementwise.h"
#include "trainer/memory_plan.h"

namespace palimpsest {

static_assert(Batch::kNoTarget == kIgnoreTarget);

namespace {

double value_at(const Tensor& values, int64_t i) {
  return values.dtype() == DType::kF64 ? values.data<double>()[i] : static_cast<double>(values.data<float>()[i]);
}

// Adds the scored tokens one by one, so that the sum does not depend on where batches begin.
void add_losses(Evaluation& evaluation, const Batch& batch, const Tensor& token_loss) {
  for (int64_t i = 0; i < token_loss.numel(); ++i) {
    if (batch.targets[i] == Batch::kNoTarget) continue;
    evaluation.loss_sum += value_at(token_loss, i);
    ++evaluation.tokens;
  }
}

// token_loss [N] of the whole batch, whatever part of it this sequence rank computes.
void forward_loss(const LanguageModel& model, Context& context, Batch& batch, const Tensor& token_loss) {
  const LocalInput local = local_input(batch, context.mesh);
  if (context.mesh.sequence().size() == 1) {
    model.forward_loss(context, local.input(), token_loss);
    return;
  }
  const Tensor own = context.activations.allocate(parameter_dtype(context.dtype), {local.input().tokens.dim(0)});
  model.forward_loss(context, local.input(), own);
  gather_token_values(context, token_loss, own, cut_rows(context.mesh, batch.num_rows, batch.row_length));
}

// Removes a file that did not get its final name.
struct RemovedAtTheEnd {
  std::string path;
  ~RemovedAtTheEnd() { try_remove(path); }
};

// The scores of a stream, written as its windows come.
class ScoreFile {
 public:
  ScoreFile(const std::string& path, const Dataset& dataset)
      : path_(checked(path)), temporary_{path + ".tmp"}, dataset_(dataset), file_(Hdf5File::create(temporary_.path)) {
    constexpr int64_t kChunkElements = int64_t{1} << 18;
    file_.create_growing_dataset("tokens", Hdf5Type::kI32, kChunkElements);
    file_.create_growing_dataset("logprob", Hdf5Type::kF32, kChunkElements);
    append(std::vector<float>(1, kNoContext));  // the first token of the stream
  }
  void add(const Batch& batch, const Tensor& token_loss) {
    for (int64_t row = 0; row < batch.num_rows; ++row) {
      // Position i of the row scores token row_begin + i + 1 of the stream.
      const int64_t end = std::min(batch.row_begin[row] + batch.row_length, dataset_.num_tokens() - 1);
      std::vector<float> logprobs;
      for (int64_t token = written_; token <= end; ++token) {
        const int64_t i = row * batch.row_length + token - 1 - batch.row_begin[row];
        logprobs.push_back(batch.targets[i] == Batch::kNoTarget ? kNoContext
                                                                : static_cast<float>(-value_at(token_loss, i)));
      }
      append(logprobs);
    }
  }

  void finish() {
    CHECK(written_ == dataset_.num_tokens(), written_, " of ", dataset_.num_tokens(), " tokens were scored");
    file_.close();
    sync_file(temporary_.path);
    rename_path(temporary_.path, path_);
  }

 private:
  static constexpr float kNoContext = std::numeric_limits<float>::quiet_NaN();

  // Scores may be written anew; any other file, such as a token shard, is kept.
  static const std::string& checked(const std::string& path) {
    if (path_exists(path) && !holds_scores(path))
      throw_user_error(path, ": exists and does not hold scores; name another file, or remove it");
    return path;
  }
  static bool holds_scores(const std::string& path) {
    try {
      const Hdf5File file = Hdf5File::open(path);
      return file.has_dataset("tokens") && file.has_dataset("logprob");
    } catch (const UserError&) {
      return false;  // not HDF5
    }
  }

  void append(const std::vector<float>& logprobs) {
    std::vector<int32_t> tokens(logprobs.size());
    dataset_.read(written_, tokens);
    file_.append<int32_t>("tokens", tokens);
    file_.append<float>("logprob", logprobs);
    written_ += static_cast<int64_t>(tokens.size());
  }

  std::string path_;
  RemovedAtTheEnd temporary_;  // before file_, which is closed first
  const Dataset& dataset_;
  Hdf5File file_;
  int64_t written_ = 0;  // tokens of the stream
};

}  // namespace

double Evaluation::mean_loss() const {
  return tokens > 0 ? loss_sum / static_cast<double>(tokens) : 0.0;
}

double Evaluation::perplexity() const {
  return std::exp(mean_loss());
}

std::optional<double> Evaluation::bits_per_byte() const {
  if (!bytes || *bytes == 0) return std::nullopt;
  return loss_sum / std::numbers::ln2 / static_cast<double>(*bytes);
}

std::string to_text(const Evaluation& evaluation) {
  std::string text = fmt::format("loss {:.4f}, perplexity {:.4f}", evaluation.mean_loss(), evaluation.perplexity());
  if (evaluation.bits_per_byte()) text += fmt::format(", {:.4f} bits per byte", *evaluation.bits_per_byte());
  text += fmt::format("; {} tokens scored", evaluation.tokens);
  if (evaluation.bytes) text += fmt::format(", {} without context left out", evaluation.left_out);
  return text;
}

JsonObject to_json(const Evaluation& evaluation) {
  JsonObject json;
  json.add("loss_sum", evaluation.loss_sum)
      .add("tokens", evaluation.tokens)
      .add("left_out", evaluation.left_out)
      .add("loss", evaluation.mean_loss())
      .add("perplexity", evaluation.perplexity());
  if (evaluation.bytes) json.add("bytes", *evaluation.bytes);
  if (evaluation.bits_per_byte()) json.add("bits_per_byte", *evaluation.bits_per_byte());
  return json;
}

Evaluation evaluate(const LanguageModel& model, Context context, const Dataset& dataset,
                    const EvaluationOptions& wanted, Console& console, const std::string& name,
                    const OnScoredBatch& on_batch) {
  EvaluationOptions options = wanted;
  // What is longer than the set would hold padding alone; but each of a row's ranges has a token.
  const int64_t most_ranges = 2 * context.mesh.sequence().size();
  options.row_length = std::min(wanted.row_length, std::max(dataset.num_tokens(), most_ranges));
  options.stride = std::min(wanted.stride, options.row_length);
  const EvaluationRows rows = {.dataset = &dataset, .row_length = options.row_length, .stride = options.stride};
  const int64_t num_rows = std::min(rows.count(), options.max_rows.value_or(rows.count()));
  ProgressBar progress(console, "evaluate " + name, num_rows, "rows");
  Evaluation evaluation;
  Communicator& data = context.mesh.data();
  const int64_t round_rows = data.size() * options.batch_rows;
  for (int64_t first = 0; first < num_rows; first += round_rows) {
    const auto share_of = [&](int64_t rank) {
      const int64_t begin = std::min(first + rank * options.batch_rows, num_rows);
      return IndexRange{begin, std::min(begin + options.batch_rows, num_rows)};
    };
    const IndexRange mine = share_of(data.rank());
    // All ranks make the same calls, so one without rows computes the round's first row, which another scores.
    Batch batch = mine.size() > 0 ? rows.read(mine.begin, mine.size()) : rows.read(first, 1);
    Arena::Scope scope(context.activations);
    const DType dtype = parameter_dtype(context.dtype);
    const auto num_tokens = static_cast<int64_t>(batch.tokens.size());
    const Tensor losses = context.activations.allocate(dtype, {options.batch_rows * options.row_length});
    const Tensor all = context.activations.allocate(dtype, {data.size() * losses.numel()});
    const Tensor token_loss = losses.rows(0, num_tokens);
    forward_loss(model, context, batch, token_loss);
    if (mine.size() > 0) add_losses(evaluation, batch, HostCopy(token_loss).fetch().tensor());
    if (on_batch) {
      fill_zero(context.stream, losses.rows(num_tokens, losses.numel() - num_tokens));
      data.all_gather(context.stream, all, losses);
      HostCopy all_here(all);
      all_here.fetch();
      for (int64_t rank = 0; rank < data.size() && context.mesh.world().rank() == 0; ++rank) {
        const IndexRange share = share_of(rank);
        if (share.size() == 0) continue;
        on_batch(rank == data.rank() ? batch : rows.read(share.begin, share.size()),
                 all_here.tensor().rows(rank * losses.numel(), share.size() * options.row_length));
      }
    }
    progress.add(std::min(round_rows, num_rows - first));
  }
  evaluation.loss_sum = sum_over(data, evaluation.loss_sum);
  evaluation.tokens = sum_over(data, evaluation.tokens);
  if (num_rows == rows.count()) {
    CHECK(evaluation.tokens == rows.num_targets(), evaluation.tokens, " tokens were scored, ", rows.num_targets(),
          " are in ", dataset.path());
    evaluation.left_out = dataset.num_tokens() - evaluation.tokens;
    evaluation.bytes = dataset.text_bytes();
  }
  return evaluation;
}

LocalInput local_input(Batch& batch, const Mesh& mesh) {
  const auto N = static_cast<int64_t>(batch.tokens.size());
  const auto view = [&](std::vector<int32_t>& values) { return Tensor(values.data(), DType::kI32, {N}); };
  const ModelInput whole = {.tokens = view(batch.tokens),
                            .targets = view(batch.targets),
                            .sequence = {.documents = batch.documents, .positions = view(batch.positions)}};
  return {whole, cut_rows(mesh, batch.num_rows, batch.row_length), mesh.sequence().rank()};
}

std::unique_ptr<Dataset> open_checked_dataset(const std::string& path, const Config& config) {
  auto dataset = std::make_unique<Dataset>(path);
  dataset->check_vocabulary(config.model.vocab_size);
  dataset->verify_if_small();
  return dataset;
}

std::string tokenizer_notice(const Config& config, const Vocabulary& shards) {
  const std::string& wanted = config.data.tokenizer;
  const bool same_name = std::filesystem::path(wanted).filename() == shards.tokenizer;
  const bool same = [&] {
    try {
      return load_tokenizer(wanted)->hash() == shards.tokenizer_hash;
    } catch (const UserError&) {
      return same_name;
    }
  }();
  if (same) return {};
  return fmt::format("data.tokenizer is {}, but the shards were made with {}{}", wanted, same_name ? "another " : "",
                     shards.tokenizer);
}

std::vector<EvalSet> open_eval_sets(const Config& config) {
  std::vector<EvalSet> sets;
  for (const NamedPath& named : config.data.eval) {
    sets.push_back({named.name, open_checked_dataset(named.path, config)});
  }
  return sets;
}

RankItem contents_of(const std::string& name, const Dataset& dataset) {
  return {"the contents of " + name, fmt::format("fingerprint {:016x}", dataset.fingerprint())};
}

Evaluation score_to_file(const LanguageModel& model, Context context, const Dataset& dataset,
                         const EvaluationOptions& options, Console& console, const std::string& out) {
  Communicator& world = context.mesh.world();
  std::optional<ScoreFile> file;
  agree(world, [&] {
    if (world.rank() == 0) file.emplace(out, dataset);
  });
  const Evaluation evaluation =
      evaluate(model, context, dataset, options, console, dataset.path(),
               [&](const Batch& batch, const Tensor& token_loss) { file->add(batch, token_loss); });
  agree(world, [&] {
    if (file) file->finish();
  });
  return evaluation;
}

}  // namespace palimpsest
