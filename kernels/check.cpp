#include "kernels/check.h"

#include <cstring>
#include <sstream>

namespace palimpsest::detail {

namespace {

template <class T>
std::string streamed(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

// Paths in messages start at the top of the repository, wherever it was built.
const char* short_path(const char* file) {
  static const char* const kFolders[] = {"/kernels/", "/parallel/", "/model/", "/data/", "/trainer/", "/launch/"};
  for (const char* folder : kFolders)
    if (const char* found = std::strstr(file, folder)) return found + 1;
  return file;
}

}  // namespace

std::string to_text(std::string_view value) {
  return std::string(value);
}
std::string to_text(const char* value) {
  return value;
}
std::string to_text(const std::string& value) {
  return value;
}
std::string to_text(bool value) {
  return value ? "true" : "false";
}
std::string to_text(int value) {
  return std::to_string(value);
}
std::string to_text(unsigned value) {
  return std::to_string(value);
}
std::string to_text(long value) {
  return std::to_string(value);
}
std::string to_text(unsigned long value) {
  return std::to_string(value);
}
std::string to_text(long long value) {
  return std::to_string(value);
}
std::string to_text(unsigned long long value) {
  return std::to_string(value);
}
std::string to_text(double value) {
  return streamed(value);
}

void throw_check_failure(const char* file, int line, const char* expression, const std::string& message) {
  std::ostringstream text;
  text << short_path(file) << ":" << line << ": check failed: " << expression;
  if (!message.empty()) text << ": " << message;
  throw Error(text.str());
}

}  // namespace palimpsest::detail
