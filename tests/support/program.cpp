#include "tests/support/program.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <utility>

#include "kernels/check.h"
#include "tests/support/files.h"

namespace palimpsest::support {

namespace {

std::string temporary_file() {
  std::string pattern = "/tmp/palimpsest-output-XXXXXX";
  const int fd = ::mkstemp(pattern.data());
  CHECK(fd >= 0, pattern);
  ::close(fd);
  return pattern;
}

std::string take_file(const std::string& path) {
  std::string content = read_file(path);
  ::unlink(path.c_str());
  return content;
}

// This process's variables with the given ones in place of those of the same name.
std::vector<std::string> merged(const Environment& added) {
  std::vector<std::string> result;
  result.reserve(added.size());
  for (const auto& [name, value] : added) result.push_back(std::string(name).append("=").append(value));
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string text = *variable;
    const bool replaced =
        std::any_of(added.begin(), added.end(), [&](const auto& entry) { return text.starts_with(entry.first + "="); });
    if (!replaced) result.push_back(text);
  }
  return result;
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  pointers.reserve(texts.size() + 1);
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

namespace {

std::vector<std::string> with_program(const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {PALIMPSEST_BINARY};
  words.insert(words.end(), arguments.begin(), arguments.end());
  return words;
}

}  // namespace

RunningProgram::RunningProgram(const std::vector<std::string>& arguments, const Environment& environment)
    : RunningProgram(Words{with_program(arguments)}, environment) {}

RunningProgram RunningProgram::of_command_line(std::vector<std::string> words, const Environment& environment) {
  return {Words{std::move(words)}, environment};
}

RunningProgram::RunningProgram(Words words, const Environment& environment)
    : out_path_(temporary_file()), err_path_(temporary_file()) {
  Environment added = environment;
  const auto add_default = [&](const char* name, const char* value) {
    if (std::none_of(environment.begin(), environment.end(), [&](const auto& entry) { return entry.first == name; }))
      added.emplace_back(name, value);
  };
  add_default("OMP_NUM_THREADS", "1");
  add_default("CUDA_VISIBLE_DEVICES", "");  // most tests are of the program on the CPU, also where a GPU is
  std::vector<std::string> variables = merged(added);
  posix_spawn_file_actions_t actions;
  CHECK(::posix_spawn_file_actions_init(&actions) == 0, "posix_spawn");
  ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out_path_.c_str(), O_WRONLY | O_TRUNC, 0600);
  ::posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err_path_.c_str(), O_WRONLY | O_TRUNC, 0600);
  // A process group of its own and every signal as at login, as a terminal would give them: a shell never catches what
  // was ignored when it started, and some test runners ignore TERM and INT.
  posix_spawnattr_t attributes;
  CHECK(::posix_spawnattr_init(&attributes) == 0, "posix_spawn");
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
  sigset_t signals;
  sigfillset(&signals);
  ::posix_spawnattr_setsigdefault(&attributes, &signals);
  sigemptyset(&signals);
  ::posix_spawnattr_setsigmask(&attributes, &signals);
  const int error = ::posix_spawn(&pid_, words.list[0].c_str(), &actions, &attributes, pointers_to(words.list).data(),
                                  pointers_to(variables).data());
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&actions);
  CHECK(error == 0, words.list[0], " does not start");
}

RunningProgram::~RunningProgram() {
  if (pid_ == 0) return;
  ::kill(pid_, SIGKILL);
  wait();
}

void RunningProgram::signal(int number) const {
  CHECK(::kill(pid_, number) == 0, "the program has ended");
}

void RunningProgram::interrupt_from_terminal() const {
  CHECK(::kill(-pid_, SIGINT) == 0, "the program has ended");
}

ProgramResult RunningProgram::wait() {
  int status = 0;
  CHECK(::waitpid(std::exchange(pid_, 0), &status, 0) > 0, "no child to wait for");
  return {.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status),
          .out = take_file(out_path_),
          .err = take_file(err_path_)};
}

std::string RunningProgram::out_so_far() const {
  return read_file(out_path_);
}

std::vector<std::string> on_ranks(int num_ranks, const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {std::string(PALIMPSEST_SOURCE_DIR) + "/launch/mpirun.sh", "--oversubscribe", "-n",
                                    std::to_string(num_ranks)};
  const std::vector<std::string> program = with_program(arguments);
  words.insert(words.end(), program.begin(), program.end());
  return words;
}

ProgramResult run_command_line(const std::vector<std::string>& words, const Environment& environment) {
  return RunningProgram::of_command_line(words, environment).wait();
}

ProgramResult run_palimpsest(const std::vector<std::string>& arguments, const Environment& environment) {
  return RunningProgram(arguments, environment).wait();
}

bool is_one_line(const std::string& text) {
  return !text.empty() && std::count(text.begin(), text.end(), '\n') <= 1 && text.find('\n') >= text.size() - 1;
}

}  // namespace palimpsest::support
