// TensorBoard event files: records in TFRecord framing, each an Event message in protobuf's wire format.
//
//   record  = length u64 | masked_crc(length) u32 | data | masked_crc(data) u32          little-endian
//   Event   = 1: wall_time f64 | 2: step int64 | 3: file_version | 5: Summary | 7: SessionLog
//   Summary = 1: repeated Value { 1: tag | 2: simple_value f32 };  SessionLog = 1: status (1 is START)
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include "trainer/metrics.h"

namespace palimpsest {

uint32_t crc32c(std::string_view data);  // CRC-32 with Castagnoli's polynomial, as in iSCSI (RFC 3720)

// One file of events, flushed after each step.
class TensorBoardLog {
 public:
  // Creates `folder` where it is missing and a new file in it. TensorBoard shows all files of a folder as one run; what
  // earlier files say of the steps after last_step is hidden. Throws a UserError when the file cannot be written, here
  // and in write.
  TensorBoardLog(const std::string& folder, int64_t last_step);
  // Scalars train/loss, train/grad_norm, train/lr, train/tokens_per_second, train/mfu, train/skipped_steps and, after
  // an evaluation, eval/NAME/loss and eval/NAME/bits_per_byte.
  void write(const StepMetrics& metrics);

  const std::string& path() const { return path_; }

 private:
  void write_event(std::string event);

  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

}  // namespace palimpsest
