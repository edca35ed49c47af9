// manifest.json: what makes a folder a checkpoint. It names every dataset with its file, place, shape and checksum, and
// holds everything of a run that is not a tensor. It is written last, and its last line is a checksum of all before it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/check.h"
#include "kernels/tensor.h"
#include "trainer/checkpoint_block.h"

namespace palimpsest {

// A checkpoint that is incomplete or whose bytes changed: an older one may still be good.
class CheckpointDamage : public UserError {
 public:
  using UserError::UserError;
};

// Where a run stands, beside its tensors. Nothing else of a run is random or has a memory: initial weights are a pure
// function of (seed, parameter, element), the order of the data one of (seed, epoch, index), the learning rate one of
// the step. So a resume needs the seed and one position, and no generator's state.
struct TrainState {
  int64_t step = 0;              // optimizer steps, those skipped among them
  int64_t applied_steps = 0;     // those that changed the weights: AdamW's counter
  int64_t skipped_steps = 0;     // those skipped for a non-finite loss or gradient
  int64_t skipped_in_a_row = 0;  // of these, the ones since the last applied step
  int64_t tokens = 0;            // targets trained on
  int64_t sampler_position = 0;  // rows drawn from the sampler: the index of the next
  int64_t seed = 0;
  std::map<std::string, double> eval_losses;  // mean loss a token by evaluation set, where this step was evaluated

  template <class V>
  void visit(V& v) {
    v("step", step);
    v("applied_steps", applied_steps);
    v("skipped_steps", skipped_steps);
    v("skipped_in_a_row", skipped_in_a_row);
    v("tokens", tokens);
    v("sampler_position", sampler_position);
    v("seed", seed);
  }
  bool operator==(const TrainState&) const = default;
};

// How the ranks that wrote it shared the work; for people to read, since any layout can load any other.
struct WorldLayout {
  int64_t ranks = 1;
  int64_t data = 1;
  int64_t sequence = 1;
  int64_t tensor = 1;
  int64_t zero = 1;

  template <class V>
  void visit(V& v) {
    v("ranks", ranks);
    v("data", data);
    v("sequence", sequence);
    v("tensor", tensor);
    v("zero", zero);
  }
  bool operator==(const WorldLayout&) const = default;
};

struct CheckpointHeader {
  TrainState state;
  WorldLayout world;
  std::string config;   // the resolved config, YAML
  std::string program;  // version that wrote it
};

struct FileRecord {
  std::string name;
  int64_t bytes = 0;
};

struct DatasetRecord {
  std::string name;
  std::string file;
  Shape global_shape;
  Region region;
  DType dtype = DType::kF32;  // or f64
  uint32_t crc32 = 0;         // of the block's bytes, little endian, row by row
};

struct Manifest {
  static constexpr int64_t kFormatVersion = 1;
  static constexpr const char* kFileName = "manifest.json";

  CheckpointHeader header;
  std::vector<FileRecord> files;
  std::vector<DatasetRecord> datasets;
};

// One rank's part of it: its file, and what stands in it.
struct RankFile {
  FileRecord file;
  std::vector<DatasetRecord> datasets;
};
std::string to_text(const RankFile& rank_file);
RankFile parse_rank_file(std::string_view text);

// That the blocks of every dataset cover it exactly once, and that each stands in a listed file of its own. `path`
// stands in messages. Throws CheckpointDamage.
void check_complete(const Manifest& manifest, const std::string& path);

std::string to_text(const Manifest& manifest);
// Checks everything that can be checked without the other files: checksum, fields, and that the blocks of every dataset
// cover it exactly once. `path` stands in messages. Throws CheckpointDamage, or a UserError for a newer format.
Manifest parse_manifest(std::string_view text, const std::string& path);

// CRC-32 as in zlib, gzip and PNG; `before` is the value of the bytes before these.
uint32_t crc32_of(std::span<const std::byte> bytes, uint32_t before = 0);

}  // namespace palimpsest
