// Commands that use a trained model: eval, score, generate, inspect, checkpoint merge, import, export.
#include <cstdio>
#include <functional>
#include <optional>

#include "data/file_ops.h"
#include "data/tokenizer.h"
#include "launch/commands.h"
#include "launch/exit_code.h"
#include "launch/report.h"
#include "launch/version.h"
#include "parallel/agreement.h"
#include "parallel/mpi_session.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/checkpoint_inspect.h"
#include "trainer/checkpoint_merge.h"
#include "trainer/evaluation.h"
#include "trainer/export_hf.h"
#include "trainer/generation.h"
#include "trainer/import_hf.h"
#include "trainer/json_object.h"
#include "trainer/run_start.h"
#include "trainer/workbench.h"

namespace palimpsest {

namespace {

EvaluationOptions evaluation_options(const Config& config, std::optional<int64_t> stride) {
  const int64_t row_length = config.data.sequence_length;
  if (stride && (*stride < 1 || *stride > row_length))
    throw_user_error("--stride is ", *stride, ", must be from 1 to data.sequence_length, ", row_length);
  return {.row_length = row_length, .stride = stride.value_or(row_length), .batch_rows = config.train.micro_batch};
}

void allocate_for_evaluation(const Config& config, Workbench& bench) {
  const RegionBytes bytes =
      bench.rehearse_evaluation({.eval_rows = config.train.micro_batch, .row_length = config.data.sequence_length});
  bench.allocate(ParameterUse::kInference, bytes);
}

// A model reads the ids of its own tokenizer.
void warn_of_other_tokens(const Config& config, const Dataset& dataset, const Ranks& ranks, Console& console) {
  if (!ranks.is_first()) return;
  if (const std::string notice = tokenizer_notice(config, dataset.vocabulary()); !notice.empty())
    console.warning(dataset.path() + ": " + notice +
                    ": the figures are of no use unless the model was trained with it");
}

// One set as a flat object; several as {"NAME": {...}, ...} beside the sums over all.
std::string report_of(const std::vector<std::pair<std::string, Evaluation>>& evaluations) {
  if (evaluations.size() == 1) return to_json(evaluations[0].second).text();
  JsonObject report;
  for (const auto& [name, evaluation] : evaluations) report.add(name, to_json(evaluation));
  return report.text();
}

std::unique_ptr<Tokenizer> checked_tokenizer(const Config& config) {
  std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(config.data.tokenizer);
  if (tokenizer->vocab_size() > config.model.vocab_size)
    throw_user_error("data.tokenizer ", config.data.tokenizer, " has ", tokenizer->vocab_size(),
                     " ids, model.vocab_size is ", config.model.vocab_size);
  return tokenizer;
}

std::string prompt_of(const GenerateArguments& arguments, const Ranks& ranks) {
  const std::string& file = arguments.prompt_file;
  if (file.empty()) return arguments.prompt;
  if (file != "-") return read_whole_file(file);
  if (ranks.size() > 1) throw_user_error("--prompt-file -: several ranks have no standard input; name a file");
  return read_whole_file("/dev/stdin");
}

GenerationRequest request_of(const GenerateArguments& arguments, const std::string& prompt,
                             const Tokenizer& tokenizer) {
  validate(arguments.sampling);
  GenerationRequest request = {.prompt = {tokenizer.bos()},
                               .max_tokens = arguments.max_tokens,
                               .stop = tokenizer.eos(),
                               .num_ids = tokenizer.vocab_size(),
                               .sampling = arguments.sampling};
  tokenizer.encode(prompt, request.prompt, {.special_tokens = true});
  return request;
}

// The checkpoint that this path stands for.
std::string newest_checkpoint(const std::string& path, Console& console) {
  const NewestCheckpoint newest = use_checkpoint(path, [](CheckpointReader&) {});
  for (const SkippedCheckpoint& skipped : newest.skipped) console.warning(to_text(skipped));
  return *newest.path;
}

}  // namespace

int run_command(const EvalArguments& arguments, Ranks& ranks, Console& console) {
  const Config config = load_resolved(arguments.config, ranks);
  const Mesh& mesh = ranks.lay_out(config, console);
  EvaluationOptions options;
  std::vector<EvalSet> sets;
  std::optional<Workbench> bench;
  agree(mesh.world(), [&] {
    if (ranks.is_first()) check_report(arguments.json);
    options = evaluation_options(config, arguments.stride);
    sets = open_eval_sets(config);
    if (sets.empty())
      throw_user_error(arguments.config.path, ": data.eval is missing: give a folder of token shards to evaluate on");
    bench.emplace(config, mesh);
    allocate_for_evaluation(config, *bench);
  });
  std::vector<std::pair<std::string, Evaluation>> evaluations;
  run_together(mesh.world(), [&] {
    bench->share_memory();
    load_trained_weights(config, *bench, console);
    for (const EvalSet& set : sets) warn_of_other_tokens(config, *set.dataset, ranks, console);
    std::vector<RankItem> contents;
    contents.reserve(sets.size());
    for (const EvalSet& set : sets) contents.push_back(contents_of("data.eval " + set.name, *set.dataset));
    check_same_on_ranks(mesh.world(), contents);
    for (const EvalSet& set : sets) {
      const Evaluation evaluation =
          evaluate(bench->model(), bench->context(), *set.dataset, options, console, set.name);
      console.info(set.name + ": " + to_text(evaluation));
      evaluations.emplace_back(set.name, evaluation);
    }
  });
  agree(mesh.world(), [&] {
    if (ranks.is_first()) write_report(arguments.json, report_of(evaluations));
  });
  return kExitSuccess;
}

int run_command(const ScoreArguments& arguments, Ranks& ranks, Console& console) {
  const Config config = load_resolved(arguments.config, ranks);
  const Mesh& mesh = ranks.lay_out(config, console);
  EvaluationOptions options;
  std::unique_ptr<Dataset> dataset;
  std::optional<Workbench> bench;
  agree(mesh.world(), [&] {
    options = evaluation_options(config, arguments.stride);
    dataset = open_checked_dataset(arguments.tokens, config);
    bench.emplace(config, mesh);
    allocate_for_evaluation(config, *bench);
  });
  run_together(mesh.world(), [&] {
    bench->share_memory();
    load_trained_weights(config, *bench, console);
    warn_of_other_tokens(config, *dataset, ranks, console);
    check_same_on_ranks(mesh.world(), {contents_of(arguments.tokens, *dataset)});
    const Evaluation evaluation =
        score_to_file(bench->model(), bench->context(), *dataset, options, console, arguments.out);
    console.info(arguments.out + ": " + to_text(evaluation));
  });
  return kExitSuccess;
}

int run_command(const GenerateArguments& arguments, Ranks& ranks, Console& console) {
  const Config config = load_resolved(arguments.config, ranks);
  const Mesh& mesh = ranks.lay_out(config, console);
  std::string prompt;
  std::unique_ptr<Tokenizer> tokenizer;
  GenerationRequest request;
  std::optional<Workbench> bench;
  agree(mesh.world(), [&] {
    prompt = prompt_of(arguments, ranks);
    tokenizer = checked_tokenizer(config);
    request = request_of(arguments, prompt, *tokenizer);
    bench.emplace(config, mesh);
    bench->allocate(ParameterUse::kInference, rehearse_generation(bench->model(), bench->registry(), bench->device(),
                                                                  bench->types(), request, mesh));
  });
  // Every rank draws the same text; the first one writes it.
  const auto write = [&](std::string_view text) {
    if (!ranks.is_first()) return;
    if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0)
      throw_user_error("standard output cannot be written");
  };
  run_together(mesh.world(), [&] {
    bench->share_memory();
    load_trained_weights(config, *bench, console);
    write(prompt);
    generate(bench->model(), bench->context(), request, [&](int32_t token) { write(tokenizer->bytes_of(token)); });
    write("\n");
  });
  return kExitSuccess;
}

int run_command(const InspectArguments& arguments, Console& console) {
  const std::string folder = newest_checkpoint(arguments.path, console);
  const CheckpointReport report = inspect_checkpoint(folder);
  if (!arguments.verify)
    console.info(report.text);
  else if (report.damage.empty())
    console.info(folder + ": every checksum matches");
  if (report.damage.empty()) return kExitSuccess;
  throw_user_error(folder, " is damaged: ", report.damage[0], report.damage.size() > 1 ? " (and more)" : "");
}

int run_command(const MergeArguments& arguments, Console& console) {
  const std::string folder = newest_checkpoint(arguments.in, console);
  ProgressBar progress(console, "merge", 0, "", ProgressBar::Unit::kBytes);
  const std::vector<std::string> warnings =
      merge_checkpoint(folder, arguments.out, [&](int64_t bytes) { progress.add(bytes); });
  for (const std::string& warning : warnings) console.warning(warning);
  console.info("merged " + folder + " into " + arguments.out);
  return kExitSuccess;
}

int run_command(const ImportHfArguments& arguments, Console& console) {
  ProgressBar progress(console, "import", 0, "", ProgressBar::Unit::kBytes);
  const std::vector<std::string> notices =
      import_hf(arguments.directory, arguments.out, git_hash(), [&](int64_t bytes) { progress.add(bytes); });
  for (const std::string& notice : notices) console.warning(notice);
  console.info("imported " + arguments.directory + " as " + arguments.out);
  return kExitSuccess;
}

int run_command(const ExportHfArguments& arguments, Console& console) {
  ProgressBar progress(console, "export", 0, "", ProgressBar::Unit::kBytes);
  const std::vector<std::string> notices =
      export_hf(arguments.checkpoint, arguments.out, {.drop_unknown = arguments.drop_unknown},
                [&](int64_t bytes) { progress.add(bytes); });
  for (const std::string& notice : notices) console.info(notice);
  console.info("exported " + arguments.checkpoint + " as " + arguments.out);
  return kExitSuccess;
}

}  // namespace palimpsest
