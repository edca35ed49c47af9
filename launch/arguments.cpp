#include "launch/arguments.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "kernels/check.h"
#include "launch/version.h"

namespace palimpsest {

namespace {

constexpr const char* kExitCodes =
    "Exit codes: 0 done, or stopped as asked after saving; 1 a fault of the program; 2 an error in arguments, config,\n"
    "data or files, in one line; 3 another rank failed or a deadline passed; 4 training met too many non-finite steps.";

constexpr int64_t kMostNewTokens = int64_t{1} << 24;
constexpr int64_t kMostRanks = int64_t{1} << 20;

constexpr const char* kConfigHelp =
    "key=value sets any field of CONFIG, for example optimizer.lr=3e-4; `palimpsest train --explain` lists all of "
    "them.";

// Checks of an option's text, in place of the library's: those print limits of 300 digits, and let a negative number
// wrap around.
CLI::Validator whole_number(int64_t least, int64_t most = std::numeric_limits<int64_t>::max()) {
  const auto check = [least, most](std::string& text) -> std::string {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error == std::errc() && end == text.data() + text.size() && value >= least && value <= most) return "";
    std::string wanted = "must be a whole number, at least " + std::to_string(least);
    if (most != std::numeric_limits<int64_t>::max() || error == std::errc::result_out_of_range)
      wanted += " and at most " + std::to_string(most);
    return "'" + text + "' " + wanted;
  };
  return {check, ""};
}

CLI::Validator positive_number() {
  const auto check = [](std::string& text) -> std::string {
    double value = 0.0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool whole_text = error == std::errc() && end == text.data() + text.size();
    return whole_text && std::isfinite(value) && value > 0 ? "" : "'" + text + "' must be a number above 0";
  };
  return {check, ""};
}

// "8,1,4" as numbers; empty when the text is anything but whole numbers and commas.
std::vector<int64_t> numbers_of(const std::string& text) {
  std::vector<int64_t> numbers;
  for (const char *at = text.data(), *end = at + text.size();; ++at) {
    const auto [stop, error] = std::from_chars(at, end, numbers.emplace_back());
    if (error != std::errc() || (stop != end && *stop != ',')) return {};
    if (stop == end) return numbers;
    at = stop;
  }
}

CLI::Validator three_numbers() {
  const auto check = [](std::string& text) {
    return numbers_of(text).size() == 3 ? "" : "'" + text + "' must be three whole numbers, such as 8,1,4";
  };
  return {check, ""};
}

CLI::Validator not_empty() {
  return {[](std::string& text) { return std::string(text.empty() ? "must not be empty" : ""); }, ""};
}

void add_config(CLI::App& command, ConfigArguments& config, bool required = true) {
  command.add_option("CONFIG", config.path, "the run's YAML file")->required(required);
  command.add_option("OVERRIDES", config.overrides, "key=value: fields of CONFIG to set, anywhere after it")
      ->expected(-1);
}

void add_stride(CLI::App& command, std::optional<int64_t>& stride) {
  command
      .add_option("--stride", stride,
                  "new tokens a window of data.sequence_length tokens scores, the others being their context; "
                  "default: all of the window")
      ->check(whole_number(1));
}

void add_json(CLI::App& command, std::string& json) {
  command
      .add_option("--json", json,
                  "write the figures to this file as JSON; -: to standard output, and all else to standard error")
      ->check(not_empty());
}

// The subcommands. Each sets `result` when it was the one named; structs live as long as the parser.
class Parser {
 public:
  Parser() : app_("Trains, resumes and evaluates hybrid linear-attention language models.", "palimpsest") {
    app_.require_subcommand(1);
    app_.set_version_flag("--version", version_text(), "print the git hash and the libraries' versions");
    app_.footer(kExitCodes);
    add_train();
    add_eval();
    add_score();
    add_generate();
    add_tokenize();
    add_inspect();
    add_checkpoint();
    add_import();
    add_plan();
    add_export();
    add_bench();
  }

  Arguments parse(int argc, const char* const* argv) {
    check_subcommand(app_, argc, argv, 1);
    try {
      app_.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
      return TextArguments{help()};
    } catch (const CLI::CallForAllHelp&) {
      return TextArguments{app_.help("", CLI::AppFormatMode::All)};
    } catch (const CLI::CallForVersion&) {
      return TextArguments{version_text() + "\n"};
    } catch (const CLI::ParseError& error) {
      std::string text = error.what();
      std::replace(text.begin(), text.end(), '\n', ' ');
      throw_user_error(text, " (", full_name(true), " --help lists what there is)");
    }
    return result_;
  }

 private:
  CLI::App& add(CLI::App& parent, const char* name, const char* description) {
    CLI::App& command = *parent.add_subcommand(name, description);
    command.footer(kExitCodes);
    return command;
  }

  void add_train() {
    CLI::App& command = add(app_, "train", "Train a model, continuing the run in run.dir where it has checkpoints.");
    add_config(command, train_.config, false);
    command.add_flag("--dry-run", train_.dry_run,
                     "print the resolved config, the memory plan, the parameters and the first batch, and stop");
    command.add_option("--print", train_.print_key, "print the value of one field of the resolved config, and stop");
    command.add_flag("--explain", explain_, "list every field of a config, and stop");
    command.footer(std::string(kConfigHelp) +
                   "\nSIGTERM, SIGINT and SIGUSR1 save at the end of the step and stop; a second SIGINT "
                   "stops at once.\n" +
                   kExitCodes);
    command.callback([this] {
      if (explain_) {
        result_ = ExplainArguments{};
      } else if (train_.config.path.empty()) {
        throw CLI::RequiredError("CONFIG");
      } else {
        result_ = train_;
      }
    });
  }

  void add_eval() {
    CLI::App& command = add(app_, "eval",
                            "Perplexity and bits per byte on data.eval of the model that from=PATH names (default: the "
                            "run in run.dir).");
    add_config(command, eval_.config);
    add_stride(command, eval_.stride);
    add_json(command, eval_.json);
    command.callback([this] { result_ = eval_; });
  }

  void add_score() {
    CLI::App& command = add(app_, "score", "Write the log-probability of every token of some shards to an HDF5 file.");
    add_config(command, score_.config);
    command.add_option("--tokens", score_.tokens, "folder of token shards, or one shard")->required();
    command.add_option("--out", score_.out, "file to write: logprob and tokens, NaN where a token has no context")
        ->required()
        ->check(not_empty());
    add_stride(command, score_.stride);
    command.callback([this] { result_ = score_; });
  }

  void add_generate() {
    CLI::App& command = add(app_, "generate", "Continue a text, token by token, on standard output.");
    add_config(command, generate_.config);
    CLI::Option* prompt = command.add_option(
        "--prompt", generate_.prompt, "text to continue; special tokens that stand in it by name are those tokens");
    command.add_option("--prompt-file", generate_.prompt_file, "file that holds it, however long; -: standard input")
        ->check(not_empty())
        ->excludes(prompt);
    command.add_option("--max-tokens", generate_.max_tokens, "most tokens to add")
        ->capture_default_str()
        ->check(whole_number(0, kMostNewTokens));
    SamplingOptions& sampling = generate_.sampling;
    command.add_option("--temperature", sampling.temperature, "0: always the most likely token")->capture_default_str();
    command.add_option("--top-k", sampling.top_k, "draw from the k most likely tokens; 0: from all")
        ->capture_default_str();
    command.add_option("--top-p", sampling.top_p, "draw from the most likely tokens that make up this probability")
        ->capture_default_str();
    command.add_option("--seed", sampling.seed, "equal seeds draw equal texts")
        ->capture_default_str()
        ->check(whole_number(0));
    command.callback([this] { result_ = generate_; });
  }

  void add_tokenize() {
    CLI::App& command = add(app_, "tokenize", "Turn text files into token shards.");
    command
        .add_option("INPUTS", tokenize_.corpus.inputs,
                    "files named *.txt or *.jsonl, also with .gz, or folders of them")
        ->required()
        ->expected(-1);
    command.add_option("--out", tokenize_.out, "folder for the shards; must be empty or not exist")
        ->required()
        ->check(not_empty());
    command
        .add_option("--tokenizer", tokenize_.tokenizer,
                    "bytes, or the path of a SentencePiece model, a tokenizer.json or a tiktoken.model")
        ->capture_default_str()
        ->check(not_empty());
    command
        .add_option(
            "--train-sentencepiece", tokenize_.train_sentencepiece,
            "first train a lossless SentencePiece model of this many ids on the inputs and write it to --tokenizer")
        ->check(whole_number(1, INT32_MAX));
    command
        .add_option("--split", tokenize_.corpus.split,
                    "cut each .txt file into documents: at blank-lines, or at lines that match a regular expression; "
                    "default: a file is a document")
        ->check(not_empty());
    command.add_option("--text-field", tokenize_.corpus.text_field, "field of a .jsonl line that holds the text")
        ->capture_default_str();
    command.add_option("--threads", tokenize_.threads, "threads; 0: all cores")
        ->capture_default_str()
        ->check(whole_number(0, 1024));
    command.callback([this] { result_ = tokenize_; });
  }

  void add_inspect() {
    CLI::App& command = add(
        app_, "inspect", "Print what a checkpoint holds: state, layout, config, tensors and their norms; verify it.");
    command.add_option("CHECKPOINT", inspect_.path, "checkpoint folder, or a run (its newest checkpoint)")->required();
    command.add_flag("--verify", inspect_.verify,
                     "say only whether every checksum matches; exit code 2 where one does not, with and without this");
    command.callback([this] { result_ = inspect_; });
  }

  void add_checkpoint() {
    CLI::App& checkpoint = add(app_, "checkpoint", "Work on checkpoints.");
    checkpoint.require_subcommand(1);
    CLI::App& merge =
        add(checkpoint, "merge", "Write a checkpoint of any number of ranks as that of one, in one file.");
    merge.add_option("IN", merge_.in, "checkpoint folder, or a run (its newest checkpoint)")->required();
    merge.add_option("OUT", merge_.out, "folder to write; must not exist")->required()->check(not_empty());
    merge.callback([this] { result_ = merge_; });
  }

  void add_import() {
    CLI::App& import = add(app_, "import", "Read public models.");
    import.require_subcommand(1);
    CLI::App& hf = add(import, "hf",
                       "Turn a folder with config.json and safetensors into a checkpoint that from=CHECKPOINT takes.");
    hf.add_option("DIR", import_.directory, "the public model's folder")->required();
    hf.add_option("CHECKPOINT", import_.out, "folder to write; must not exist")->required()->check(not_empty());
    hf.callback([this] { result_ = import_; });
  }

  void add_plan() {
    CLI::App& command = add(app_, "plan",
                            "Memory of a rank and bytes sent in a step, for layouts of many ranks: computed here, in "
                            "seconds, without data.");
    add_config(command, plan_.config);
    command.add_option("--ranks", plan_.ranks, "ranks of the whole job")
        ->required()
        ->check(whole_number(1, kMostRanks));
    // One word, so that the fields of CONFIG may follow.
    command
        .add_option_function<std::string>(
            "--layout", [this](const std::string& text) { plan_.layout = numbers_of(text); },
            "data,sequence,tensor, one of which may be -1; default: all layouts")
        ->check(three_numbers());
    command.add_option("--ranks-per-host", plan_.ranks_per_host, "ranks that share a host and its fast links")
        ->capture_default_str()
        ->check(whole_number(1, kMostRanks));
    command.add_option("--memory", plan_.memory_gib, "leave out layouts that need more than this many GiB a rank")
        ->check(positive_number());
    command.add_option("--top", plan_.top, "most layouts in the table")->capture_default_str()->check(whole_number(1));
    add_json(command, plan_.json);
    command.callback([this] { result_ = plan_; });
  }

  void add_export() {
    CLI::App& parent = add(app_, "export", "Write public models.");
    parent.require_subcommand(1);
    CLI::App& hf = add(parent, "hf",
                       "Turn a checkpoint into a folder of the public library: an imported model in the names, shapes "
                       "and types it came with, one born here in those of the family that computes the same.");
    hf.add_option("CHECKPOINT", export_.checkpoint, "checkpoint folder, or a run (its newest checkpoint)")->required();
    hf.add_option("DIR", export_.out, "folder to write; must not exist")->required()->check(not_empty());
    hf.add_flag("--drop-unknown", export_.drop_unknown,
                "leave out the tensors that came with an imported model but have no meaning here, such as mtp.*");
    hf.callback([this] { result_ = export_; });
  }

  void add_bench() {
    CLI::App& bench = add(app_, "bench", "Measure speed and memory.");
    bench.require_subcommand(1);
    CLI::App& train = add(bench, "train", "Train on random tokens: time, share of the machine's speed, memory.");
    add_config(train, bench_train_.config);
    train.add_option("--steps", bench_train_.steps, "steps to time, after two that are not")
        ->capture_default_str()
        ->check(whole_number(1));
    add_json(train, bench_train_.json);
    train.callback([this] { result_ = bench_train_; });
    CLI::App& kernels =
        add(bench, "kernels",
            "Time every op at the sizes of the model, against the machine's limits, and its error against f64.");
    add_config(kernels, bench_kernels_.config);
    kernels.add_option("--seconds", bench_kernels_.seconds, "how long to repeat each op")
        ->capture_default_str()
        ->check(positive_number());
    kernels.add_option("--only", bench_kernels_.only, "the ops whose names contain this");
    add_json(kernels, bench_kernels_.json);
    kernels.callback([this] { result_ = bench_kernels_; });
  }

  // A mistyped subcommand, named and with what would be right.
  static void check_subcommand(const CLI::App& app, int argc, const char* const* argv, int at) {
    const auto commands = app.get_subcommands([](const CLI::App*) { return true; });
    if (commands.empty() || at >= argc || argv[at][0] == '-') return;
    std::string known;
    for (const CLI::App* command : commands) {
      if (command->get_name() == argv[at]) return check_subcommand(*command, argc, argv, at + 1);
      known += (known.empty() ? "" : ", ") + command->get_name();
    }
    throw_user_error("'", argv[at], "' is no subcommand of ", app.get_name(), "; there are ", known);
  }

  // The innermost subcommand that was named.
  static const CLI::App& named(const CLI::App& app) {
    const auto commands = app.get_subcommands();
    return commands.empty() ? app : named(*commands[0]);
  }
  // The subcommand that was named with those above it: "palimpsest bench train".
  std::string full_name(bool with_last) const {
    std::string text = app_.get_name();
    const CLI::App* last = &named(app_);
    for (auto commands = app_.get_subcommands(); !commands.empty(); commands = commands[0]->get_subcommands())
      if (with_last || commands[0] != last) text += " " + commands[0]->get_name();
    return text;
  }
  std::string help() const { return named(app_).help(&named(app_) == &app_ ? "" : full_name(false)); }

  CLI::App app_;
  Arguments result_;
  bool explain_ = false;
  TrainArguments train_;
  EvalArguments eval_;
  ScoreArguments score_;
  GenerateArguments generate_;
  TokenizeArguments tokenize_;
  InspectArguments inspect_;
  MergeArguments merge_;
  ImportHfArguments import_;
  PlanArguments plan_;
  ExportHfArguments export_;
  BenchTrainArguments bench_train_;
  BenchKernelsArguments bench_kernels_;
};

}  // namespace

Arguments parse_arguments(int argc, const char* const* argv) {
  return Parser().parse(argc, argv);
}

}  // namespace palimpsest
