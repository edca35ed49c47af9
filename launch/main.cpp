#include <cstdio>

#include "launch/version.h"

int main() {
  std::puts(palimpsest::version_text().c_str());
  return 0;
}
