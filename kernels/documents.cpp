#include "kernels/documents.h"

#include <utility>

namespace palimpsest {

Documents::Documents(std::vector<int64_t> offsets) : offsets_(std::move(offsets)) {
  CHECK(!offsets_.empty() && offsets_[0] == 0, "document offsets must start at 0");
  for (size_t i = 1; i < offsets_.size(); ++i)
    CHECK(offsets_[i] >= offsets_[i - 1], "document offsets decrease at ", i, ": ", offsets_[i - 1], " then ",
          offsets_[i]);
}

Documents Documents::rows(int64_t num_rows, int64_t row_length) {
  std::vector<int64_t> offsets;
  for (int64_t row = 0; row <= num_rows; ++row) offsets.push_back(row * row_length);
  return Documents(std::move(offsets));
}

}  // namespace palimpsest
