// Checks and the two error types of the project.
//
// CHECK(condition, parts...) is always on. The parts are streamed into the message by code in check.cpp, so that no
// header that a .cu file sees needs a formatting library.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace palimpsest {

// A fault inside the program or its libraries: file, line, expression and cause stand in the message.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Something the user can mend (config, data, files): one line that says what was wrong, where, and what would be
// right. main prints it without internals and exits with status 2.
class UserError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {

// Text of one message part. Only these few types are streamed, so the header stays free of <sstream>.
std::string to_text(std::string_view value);
std::string to_text(const char* value);
std::string to_text(const std::string& value);
std::string to_text(bool value);
std::string to_text(int value);
std::string to_text(unsigned value);
std::string to_text(long value);
std::string to_text(unsigned long value);
std::string to_text(long long value);
std::string to_text(unsigned long long value);
std::string to_text(double value);

[[noreturn]] void throw_check_failure(const char* file, int line, const char* expression, const std::string& message);

template <class... Parts>
std::string concatenate(const Parts&... parts) {
  std::string text;
  ((text += to_text(parts)), ...);
  return text;
}

}  // namespace detail

// Joins the parts into one message and throws it as a UserError.
template <class... Parts>
[[noreturn]] void throw_user_error(const Parts&... parts) {
  throw UserError(detail::concatenate(parts...));
}

}  // namespace palimpsest

#define CHECK(condition, ...)                                                                    \
  do {                                                                                           \
    if (!(condition)) [[unlikely]]                                                               \
      ::palimpsest::detail::throw_check_failure(__FILE__, __LINE__, #condition,                  \
                                                ::palimpsest::detail::concatenate(__VA_ARGS__)); \
  } while (false)
