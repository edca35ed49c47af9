#include "launch/version.h"

#include "parallel/mpi_session.h"

namespace palimpsest {

std::string git_hash() {
  return PALIMPSEST_GIT_HASH;
}

std::string version_text() {
  return "palimpsest " + git_hash() + "\n" + mpi_library_version() + ", " + PALIMPSEST_LIBRARIES;
}

}  // namespace palimpsest
