// A temporary folder that all ranks of a group use. Made and removed by rank 0, when all are there.
#pragma once

#include <optional>
#include <string>

#include "parallel/agreement.h"
#include "tests/support/files.h"

namespace palimpsest::mpi_test {

class SharedDirectory {
 public:
  explicit SharedDirectory(Communicator& group) : group_(group) {
    if (group.rank() == 0) owned_.emplace();
    path_ = broadcast_text(group, owned_ ? owned_->path() : "");
  }
  ~SharedDirectory() { max_over(group_, 0); }
  SharedDirectory(const SharedDirectory&) = delete;
  SharedDirectory& operator=(const SharedDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  Communicator& group_;
  std::optional<support::TempDirectory> owned_;
  std::string path_;
};

}  // namespace palimpsest::mpi_test
