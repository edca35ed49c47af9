#include "data/input_file.h"

#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "kernels/check.h"

namespace palimpsest {

namespace {

constexpr size_t kBufferBytes = size_t{256} << 10;

}  // namespace

struct InputFile::Gzip {
  gzFile file = nullptr;
  ~Gzip() {
    if (file != nullptr) ::gzclose_r(file);  // what it could report was seen by the last read
  }
};

InputFile::InputFile(const std::string& path) : path_(path), fd_(open_for_reading(path)) {
  if (!path.ends_with(".gz")) return;
  gzip_ = std::make_unique<Gzip>();
  gzip_->file = ::gzdopen(fd_.get(), "rb");
  if (gzip_->file == nullptr) throw_file_error("read", path, ENOMEM);
  fd_.release();  // belongs to gzip_ now
  CHECK(::gzbuffer(gzip_->file, kBufferBytes) == 0);
  if (::gzdirect(gzip_->file) != 0) throw_user_error(path, ": not compressed with gzip, unlike its name says");
}

InputFile::~InputFile() = default;

size_t InputFile::read(std::span<char> out) {
  return gzip_ ? read_compressed(out) : read_plain(out);
}

size_t InputFile::read_plain(std::span<char> out) {
  while (true) {
    const ssize_t count = ::read(fd_.get(), out.data(), out.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_file_error("read", path_, errno);
    plain_position_ += count;
    return count;
  }
}

size_t InputFile::read_compressed(std::span<char> out) {
  const int count = ::gzread(gzip_->file, out.data(), static_cast<unsigned>(out.size()));
  int code = Z_OK;
  const char* cause = ::gzerror(gzip_->file, &code);
  if (count < 0 || code != Z_OK)
    throw_user_error(path_, ": damaged gzip file: ", code == Z_BUF_ERROR ? "it ends too early" : cause);
  return count;
}

int64_t InputFile::position() const {
  return gzip_ ? ::gzoffset(gzip_->file) : plain_position_;
}

bool LineReader::fill() {
  buffer_.erase(0, std::exchange(used_, 0));
  const size_t kept = buffer_.size();
  buffer_.resize(kept + kBufferBytes);
  buffer_.resize(kept + file_.read(std::span(buffer_).subspan(kept)));
  return buffer_.size() > kept;
}

bool LineReader::next(std::string& line, size_t max_bytes) {
  size_t searched = 0, end = std::string::npos;
  while (true) {
    end = buffer_.find('\n', used_ + searched);
    searched = buffer_.size() - used_;
    if (end != std::string::npos || searched >= max_bytes || !fill()) break;
  }
  const size_t available = (end == std::string::npos ? buffer_.size() : end + 1) - used_;
  if (available == 0) return false;
  line.assign(buffer_, used_, std::min(available, max_bytes));
  used_ += line.size();
  at_line_start_ = line_ended_;
  line_number_ += at_line_start_ ? 1 : 0;
  line_ended_ = line.back() == '\n';
  return true;
}

}  // namespace palimpsest
