#include "trainer/tensorboard.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>

#include "kernels/check.h"

namespace palimpsest {

namespace {

// ---- framing ----

constexpr std::array<uint32_t, 256> make_crc_table() {
  constexpr uint32_t kPolynomial = 0x82F63B78;  // Castagnoli, bits reversed
  std::array<uint32_t, 256> table = {};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1u) != 0 ? (crc >> 1) ^ kPolynomial : crc >> 1;
    table[i] = crc;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kCrcTable = make_crc_table();

// Data that holds its own CRC would have a useless one, so the format rotates it and adds a constant.
uint32_t masked_crc(std::string_view data) {
  constexpr uint32_t kMaskDelta = 0xA282EAD8;
  return std::rotr(crc32c(data), 15) + kMaskDelta;
}

template <class T>
std::string little_endian(T value) {
  std::string bytes;
  for (size_t i = 0; i < sizeof(T); ++i) bytes += static_cast<char>(value >> (8 * i) & 0xFFu);
  return bytes;
}

// ---- protobuf ----

enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>((value & 0x7Fu) | 0x80u);
  return bytes + static_cast<char>(value);
}

std::string tag(uint32_t field, WireType type) {
  return varint(field << 3 | type);
}

std::string integer_field(uint32_t field, int64_t value) {
  return tag(field, kVarint) + varint(static_cast<uint64_t>(value));
}
std::string double_field(uint32_t field, double value) {
  return tag(field, kFixed64) + little_endian(std::bit_cast<uint64_t>(value));
}
std::string float_field(uint32_t field, float value) {
  return tag(field, kFixed32) + little_endian(std::bit_cast<uint32_t>(value));
}
std::string bytes_field(uint32_t field, std::string_view bytes) {
  return tag(field, kBytes) + varint(bytes.size()) + std::string(bytes);
}

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

[[noreturn]] void fail(const std::string& path, int error) {
  throw_user_error(path, ": cannot be written: ", std::strerror(error));
}

std::string event_file_name() {
  std::array<char, 256> host = {};
  if (gethostname(host.data(), host.size() - 1) != 0) host = {"unknown"};
  return fmt::format("events.out.tfevents.{:.6f}.{}.{}", wall_time(), host.data(), getpid());
}

}  // namespace

uint32_t crc32c(std::string_view data) {
  uint32_t crc = 0xFFFFFFFF;
  for (const char c : data) crc = kCrcTable[(crc ^ static_cast<unsigned char>(c)) & 0xFFu] ^ (crc >> 8);
  return ~crc;
}

TensorBoardLog::TensorBoardLog(const std::string& folder, int64_t last_step) : file_(nullptr, &std::fclose) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) fail(folder, error.value());
  path_ = (std::filesystem::path(folder) / event_file_name()).string();
  file_.reset(std::fopen(path_.c_str(), "wb"));
  if (!file_) fail(path_, errno);
  write_event(bytes_field(3, "brain.Event:2"));
  // The begin of a session makes readers drop the steps from this one on that earlier files hold.
  constexpr int64_t kSessionStart = 1;
  write_event(integer_field(2, last_step + 1) + bytes_field(7, integer_field(1, kSessionStart)));
}

void TensorBoardLog::write(const StepMetrics& metrics) {
  std::string summary;
  const auto add = [&](std::string_view name, double value) {
    summary += bytes_field(1, bytes_field(1, name) + float_field(2, static_cast<float>(value)));
  };
  add("train/loss", metrics.loss);
  add("train/grad_norm", metrics.grad_norm);
  add("train/lr", metrics.lr);
  add("train/tokens_per_second", metrics.tokens_per_second);
  if (metrics.mfu) add("train/mfu", *metrics.mfu);
  add("train/skipped_steps", static_cast<double>(metrics.skipped_steps));
  for (const ExpertUse& use : metrics.experts)
    add(fmt::format("experts/{}/most_over_mean", use.layer), use.most / use.mean);
  for (const EvalMetrics& set : metrics.eval) {
    add(fmt::format("eval/{}/loss", set.name), set.loss);
    if (set.bits_per_byte) add(fmt::format("eval/{}/bits_per_byte", set.name), *set.bits_per_byte);
  }
  write_event(integer_field(2, metrics.step) + bytes_field(5, summary));
}

void TensorBoardLog::write_event(std::string event) {
  event = double_field(1, wall_time()) + event;
  const std::string length = little_endian(static_cast<uint64_t>(event.size()));
  const std::string record = length + little_endian(masked_crc(length)) + event + little_endian(masked_crc(event));
  if (std::fwrite(record.data(), 1, record.size(), file_.get()) != record.size() || std::fflush(file_.get()) != 0) {
    fail(path_, errno);
  }
}

}  // namespace palimpsest
