// What the status of the process says.
#pragma once

#include "parallel/watchdog.h"

namespace palimpsest {

enum ExitCode : int {
  kExitSuccess = 0,
  kExitFault = 1,                       // a fault inside the program
  kExitUserError = kStatusUserError,    // arguments, config, data or files
  kExitRankFailed = kStatusRankFailed,  // another rank failed, or a deadline passed
  kExitNonFinite = 4,                   // training stopped after repeated non-finite steps
};

}  // namespace palimpsest
