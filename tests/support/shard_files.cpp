#include "tests/support/shard_files.h"

#include "kernels/check.h"
#include "kernels/random.h"

namespace palimpsest::support {

Vocabulary small_vocabulary(int64_t size) {
  return {size, "test", "0123456789abcdef", static_cast<int32_t>(size - 2), static_cast<int32_t>(size - 1)};
}

void write_documents(const std::string& directory, const Vocabulary& vocabulary, const std::vector<int64_t>& lengths,
                     uint64_t seed, int64_t shard_tokens) {
  ShardWriter writer(directory, vocabulary, shard_tokens);
  uint64_t next = 0;
  for (const int64_t length : lengths) {
    CHECK(length >= 2);
    std::vector<int32_t> ids(length - 2);
    for (int32_t& id : ids) id = static_cast<int32_t>(random_bits(seed, 0, next++) % (vocabulary.size - 2));
    writer.begin_document();
    writer.append(ids);
    writer.end_document(length - 2);
  }
  writer.finish();
}

}  // namespace palimpsest::support
