// Runs the palimpsest binary as a user does.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace palimpsest::support {

// Whether this build is watched by a sanitizer, which takes memory and time of its own.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

struct ProgramResult {
  int exit_code = 0;  // -signal when a signal ended it
  std::string out, err;
};

using Environment = std::vector<std::pair<std::string, std::string>>;
// `environment` is added to this process's. One thread and no GPU, unless it says otherwise.
ProgramResult run_palimpsest(const std::vector<std::string>& arguments, const Environment& environment = {});

// The words that start palimpsest with these arguments on this many ranks of this machine, through launch/mpirun.sh.
std::vector<std::string> on_ranks(int num_ranks, const std::vector<std::string>& arguments);
// Any command, its program in words[0].
ProgramResult run_command_line(const std::vector<std::string>& words, const Environment& environment = {});

// A child that goes on; wait() collects it.
class RunningProgram {
 public:
  RunningProgram(const std::vector<std::string>& arguments, const Environment& environment);
  static RunningProgram of_command_line(std::vector<std::string> words, const Environment& environment = {});
  ~RunningProgram();
  RunningProgram(const RunningProgram&) = delete;
  RunningProgram& operator=(const RunningProgram&) = delete;

  void signal(int number) const;
  void interrupt_from_terminal() const;  // SIGINT to it and to the processes that it started in its group
  ProgramResult wait();
  int pid() const { return pid_; }
  std::string out_so_far() const;

 private:
  struct Words {
    std::vector<std::string> list;
  };
  RunningProgram(Words words, const Environment& environment);

  std::string out_path_, err_path_;
  int pid_ = 0;
};

// True when the text is one line with its end, or without.
bool is_one_line(const std::string& text);

}  // namespace palimpsest::support
