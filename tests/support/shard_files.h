// Token shards for tests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/shards.h"

namespace palimpsest::support {

// Ids 0 .. size - 3 for tokens, then bos, then eos.
Vocabulary small_vocabulary(int64_t size);

// Writes documents of the given lengths (bos and eos included, at least 2) with pseudo-random ids into a folder.
// One text byte for each token between bos and eos.
void write_documents(const std::string& directory, const Vocabulary& vocabulary, const std::vector<int64_t>& lengths,
                     uint64_t seed = 1, int64_t shard_tokens = ShardWriter::kDefaultShardTokens);

}  // namespace palimpsest::support
