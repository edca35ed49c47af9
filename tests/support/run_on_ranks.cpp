#include "tests/support/run_on_ranks.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "data/file_ops.h"
#include "kernels/check.h"

namespace palimpsest::support {

namespace {

std::string content_of(const std::string& path) {
  std::ifstream file(path);
  std::stringstream content;
  content << file.rdbuf();
  return content.str();
}

int parent_of(int pid) {
  const std::string stat = content_of("/proc/" + std::to_string(pid) + "/stat");
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return 0;  // gone
  char state = 0;
  int parent = 0;
  std::istringstream(stat.substr(name_end + 1)) >> state >> parent;
  return parent;
}

}  // namespace

RunOnRanks::RunOnRanks() : config_(tiny_run_config(root_, "run")), file_(root_ / "config.yaml") {
  config_.model.hidden_size = 16;
  config_.model.mla.num_heads = 2;
  config_.train.steps = 6;
  config_.train.sequences_per_step = 8;
  config_.train.micro_batch = 2;
  config_.parallel.timeout_s = 30;
  write_config();
}

void RunOnRanks::write_config() {
  write_file(file_, to_yaml(config_));
}

std::vector<std::string> RunOnRanks::mixed_ranks(const std::vector<std::string>& first,
                                                 const std::vector<std::string>& second) {
  std::vector<std::string> words = on_ranks(1, first);
  words.insert(words.end(), {":", "-n", "1", PALIMPSEST_BINARY});
  words.insert(words.end(), second.begin(), second.end());
  return words;
}

std::vector<std::string> RunOnRanks::ranks_that_open_files() const {
  for (const std::string folder : {"here", "there"}) {
    create_directories(root_ / (folder + "/shards"));
    for (int i = 100; i < 180; ++i)
      std::filesystem::copy(root_ / "shards/tokens-00000.h5",
                            root_ / (folder + "/shards/" + std::to_string(i) + ".h5"));
  }
  const std::vector<std::string> arguments = {"train", file_, "data.train=shards"};
  std::vector<std::string> words = mixed_ranks(arguments, arguments);
  run_in_folders(words, root_ / "here", root_ / "there");
  return words;
}

void RunOnRanks::write_config_of_bytes() {
  config_.model.vocab_size = 258;
  config_.data.tokenizer = "bytes";
  config_.run.dir = root_ / "bytes";
  write_config();
}

std::vector<std::string> RunOnRanks::ranks_without_output() const {
  const std::string program = std::string("exec ") + PALIMPSEST_BINARY + " generate " + file_ + " parallel.tensor=2";
  std::vector<std::string> words = on_ranks(1, {});
  words.pop_back();  // the program
  words.insert(words.end(), {"sh", "-c", program + " > /dev/full", ":", "-n", "1", "sh", "-c", program});
  return words;
}

int64_t number_behind(const std::string& text, const std::string& label) {
  const size_t at = text.find("\n" + label);
  if (at == std::string::npos) return -1;
  int64_t number = -1;
  std::istringstream(text.substr(at + 1 + label.size())) >> number;
  return number;
}

void run_in_folders(std::vector<std::string>& words, const std::string& first, const std::string& second) {
  const auto add = [&](auto before, const std::string& folder) { words.insert(before, {"-wdir", folder}); };
  add(std::find(words.begin(), words.end(), "-n"), first);
  add(std::find(words.begin(), words.end(), ":") + 1, second);
}

std::vector<int> descendants(int launcher) {
  std::vector<int> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    for (int pid = std::stoi(name), ancestor = pid; ancestor > 1; ancestor = parent_of(ancestor)) {
      if (ancestor != launcher) continue;
      found.push_back(pid);
      break;
    }
  }
  return found;
}

int pid_of_rank(int launcher, int rank) {
  const std::string wanted = "OMPI_COMM_WORLD_RANK=" + std::to_string(rank);
  for (const int pid : descendants(launcher)) {
    const std::string environment = content_of("/proc/" + std::to_string(pid) + "/environ");
    std::istringstream variables(environment);
    for (std::string variable; std::getline(variables, variable, '\0');)
      if (variable == wanted) return pid;
  }
  CHECK(false, "no process of rank ", rank);
  return 0;
}

}  // namespace palimpsest::support
