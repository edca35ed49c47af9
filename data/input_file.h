// Files of text, plain or compressed with gzip, read from front to back.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "data/file_ops.h"

namespace palimpsest {

class InputFile {
 public:
  // A name that ends with .gz holds one or more gzip streams. Damage and truncation throw while reading.
  explicit InputFile(const std::string& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  size_t read(std::span<char> out);  // how many bytes; 0 at the end
  int64_t position() const;          // bytes of the file on the disk that were used

  const std::string& path() const { return path_; }

 private:
  size_t read_plain(std::span<char> out);
  size_t read_compressed(std::span<char> out);

  std::string path_;
  FileDescriptor fd_;
  int64_t plain_position_ = 0;
  struct Gzip;
  std::unique_ptr<Gzip> gzip_;  // null for a plain file
};

// The lines of a file.
class LineReader {
 public:
  explicit LineReader(const std::string& path) : file_(path) {}

  // Puts the next line into `line`, with its '\n' if it has one; false at the end. Of a line longer than max_bytes it
  // gives the first max_bytes, and the rest with the following calls.
  bool next(std::string& line, size_t max_bytes);

  int64_t line_number() const { return line_number_; }   // of the line that next gave last; the first is 1
  bool at_line_start() const { return at_line_start_; }  // whether that was the start of a line
  const InputFile& file() const { return file_; }

 private:
  bool fill();

  InputFile file_;
  std::string buffer_;
  size_t used_ = 0;  // of buffer_
  int64_t line_number_ = 0;
  bool at_line_start_ = true;
  bool line_ended_ = true;
};

}  // namespace palimpsest
