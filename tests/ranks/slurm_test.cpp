// launch/train.sbatch with a Slurm that is played by two scripts: the signal before the time is up saves on all ranks,
// and the job queues itself again.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>

#include "data/file_ops.h"
#include "tests/support/run_on_ranks.h"
#include "trainer/checkpoint_folder.h"
#include "trainer/run_setup.h"

namespace palimpsest {
namespace {

class Slurm : public support::RunOnRanks {
 protected:
  Slurm() {
    namespace fs = std::filesystem;
    for (const char* folder : {"/stand-ins", "/submitted", "/submitted/build"})
      create_directories(root_.path() + folder);
    fs::create_symlink(std::string(PALIMPSEST_SOURCE_DIR) + "/launch", root_ / "submitted/launch");
    fs::create_symlink(PALIMPSEST_BINARY, root_ / "submitted/build/palimpsest");
    // mpirun takes SLURM_* for a real allocation, so it is started without; what it was asked for is noted.
    write_stand_in("mpirun", "#!/bin/bash\necho \"$*\" > '" + (root_ / "asked") +
                                 "'\nfor name in ${!SLURM_*}; do unset \"$name\"; done\nPATH=${PATH#*:}\n"
                                 "exec mpirun --oversubscribe \"$@\"\n");
    write_stand_in("scontrol", "#!/bin/bash\necho \"$*\" > '" + (root_ / "requeued") + "'\n");
    config_.train.steps = 100000000;
    write_config();
  }

  void write_stand_in(const std::string& name, const std::string& content) const {
    support::write_script(root_ / ("stand-ins/" + name), content);
  }

  support::RunningProgram submit() const {
    return support::RunningProgram::of_command_line(
        {"/bin/bash", std::string(PALIMPSEST_SOURCE_DIR) + "/launch/train.sbatch", file_, "parallel.tensor=2"},
        {{"PATH", (root_ / "stand-ins") + ":" + std::getenv("PATH")},
         {"SLURM_SUBMIT_DIR", root_ / "submitted"},
         {"SLURM_NTASKS", "2"},
         {"SLURM_CPUS_PER_TASK", "1"},
         {"SLURM_JOB_ID", "42"}});
  }

  bool saved_the_last_step() const {
    const auto last = static_cast<int64_t>(support::metrics_of(config_).size());
    return has_manifest(checkpoint_path(config_) + "/" + checkpoint_name(last));
  }
};

TEST_F(Slurm, TheSignalBeforeTheEndSavesAndQueuesAgain) {
  support::RunningProgram job = submit();
  support::wait_for_steps(config_, 3);
  job.signal(SIGUSR1);
  const support::ProgramResult result = job.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(saved_the_last_step());
  EXPECT_EQ(support::read_file(root_ / "requeued"), "requeue 42\n");
  EXPECT_NE(support::read_file(root_ / "asked").find("-n 2 --map-by slot:PE=1 build/palimpsest train"),
            std::string::npos);
}

TEST_F(Slurm, ACancelledJobSavesAndStaysAway) {
  support::RunningProgram job = submit();
  support::wait_for_steps(config_, 3);
  job.signal(SIGTERM);
  const support::ProgramResult result = job.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(saved_the_last_step());
  EXPECT_FALSE(path_exists(root_ / "requeued"));
}

}  // namespace
}  // namespace palimpsest
