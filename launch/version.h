// What was built.
#pragma once

#include <string>

namespace palimpsest {

std::string git_hash();      // of the commit that was built
std::string version_text();  // what --version prints: the hash and the libraries

}  // namespace palimpsest
