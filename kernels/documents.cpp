#include "kernels/documents.h"

#include <utility>

namespace palimpsest {

Documents::Documents(std::vector<int64_t> offsets) : offsets_(std::move(offsets)) {
  CHECK(!offsets_.empty() && offsets_[0] == 0, "document offsets must start at 0");
  for (size_t i = 1; i < offsets_.size(); ++i)
    CHECK(offsets_[i] >= offsets_[i - 1], "document offsets decrease at ", i, ": ", offsets_[i - 1], " then ",
          offsets_[i]);
}

Documents Documents::with_states(int64_t num_states, std::vector<int64_t> entering,
                                 std::vector<int64_t> leaving) const {
  for (const std::vector<int64_t>* rows : {&entering, &leaving}) {
    CHECK(static_cast<int64_t>(rows->size()) == count(), "states of ", rows->size(), " documents, not of ", count());
    std::vector<bool> taken(static_cast<size_t>(num_states), false);
    for (const int64_t row : *rows) {
      if (row == -1) continue;
      CHECK(row >= 0 && row < num_states && !taken[row], "state ", row, " of ", num_states, " is not free");
      taken[row] = true;
    }
  }
  Documents documents = *this;
  documents.own_states_ = true;
  documents.num_states_ = num_states;
  documents.entering_ = std::move(entering);
  documents.leaving_ = std::move(leaving);
  return documents;
}

Documents Documents::rows(int64_t num_rows, int64_t row_length) {
  std::vector<int64_t> offsets;
  for (int64_t row = 0; row <= num_rows; ++row) offsets.push_back(row * row_length);
  return Documents(std::move(offsets));
}

}  // namespace palimpsest
