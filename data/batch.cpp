#include "data/batch.h"

#include <algorithm>
#include <string_view>

#include "kernels/check.h"
#include "kernels/random.h"

namespace palimpsest {

namespace {

// Appends one row to the flat arrays; offsets gets the start of each document in it.
void append_row(const RowRequest& row, int64_t row_length, Batch& batch, std::vector<int64_t>& offsets) {
  const Dataset& dataset = *row.dataset;
  const int64_t base = static_cast<int64_t>(batch.tokens.size());
  const int64_t length = std::min(row_length, dataset.num_tokens() - row.begin);  // without padding
  CHECK(row.begin >= 0 && length > 0, dataset.path(), ": a row at token ", row.begin, " of ", dataset.num_tokens());
  const int64_t with_next = std::min(length + 1, dataset.num_tokens() - row.begin);

  std::vector<int32_t> stream(with_next);  // the row's tokens and, if there is one, the token after them
  dataset.read(row.begin, stream);
  std::vector<int64_t> starts;  // of documents, after the first token of the row
  dataset.document_starts(row.begin + 1, row.begin + with_next, starts);
  for (int64_t& start : starts) start -= row.begin;

  batch.tokens.insert(batch.tokens.end(), stream.begin(), stream.begin() + length);
  batch.tokens.resize(base + row_length, dataset.vocabulary().eos);
  batch.targets.resize(base + row_length, Batch::kNoTarget);
  int32_t* targets = batch.targets.data() + base;
  std::copy(stream.begin() + 1, stream.end(), targets);
  for (const int64_t start : starts) targets[start - 1] = Batch::kNoTarget;
  std::fill_n(targets, std::min(row.first_scored, row_length), Batch::kNoTarget);

  if (!starts.empty() && starts.back() == length) starts.pop_back();  // of the next row
  if (length < row_length) starts.push_back(length);                  // the padding
  starts.insert(starts.begin(), 0);
  batch.positions.resize(base + row_length);
  for (size_t i = 0; i < starts.size(); ++i) {
    const int64_t end = i + 1 < starts.size() ? starts[i + 1] : row_length;
    for (int64_t p = starts[i]; p < end; ++p) batch.positions[base + p] = static_cast<int32_t>(p - starts[i]);
    offsets.push_back(base + starts[i]);
  }
}

uint64_t hash_of_ids(const std::vector<int32_t>& ids) {
  return hash_of({reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(int32_t)});
}

}  // namespace

Batch read_batch(const std::vector<RowRequest>& rows, int64_t row_length, int64_t first_row) {
  CHECK(row_length > 0);
  Batch batch;
  batch.num_rows = static_cast<int64_t>(rows.size());
  batch.row_length = row_length;
  batch.first_row = first_row;
  std::vector<int64_t> offsets;
  for (const RowRequest& row : rows) {
    batch.row_begin.push_back(row.begin);
    append_row(row, row_length, batch, offsets);
  }
  offsets.push_back(static_cast<int64_t>(batch.tokens.size()));
  batch.documents = Documents(std::move(offsets));
  batch.num_targets = static_cast<int64_t>(batch.targets.size()) -
                      std::count(batch.targets.begin(), batch.targets.end(), Batch::kNoTarget);
  batch.hash = hash_of_ids(batch.tokens) ^ (hash_of_ids(batch.targets) * 3);
  return batch;
}

int64_t num_training_rows(const Dataset& dataset, int64_t row_length) {
  return dataset.num_tokens() / row_length;
}

int64_t EvaluationRows::count() const {
  CHECK(dataset != nullptr && stride > 0 && stride <= row_length, "stride ", stride, ", rows of ", row_length);
  // The fewest rows that cover every token: the first covers row_length, each other one `stride` more.
  const int64_t rest = dataset->num_tokens() - row_length;
  return rest <= 0 ? 1 : 1 + (rest + stride - 1) / stride;
}

int64_t EvaluationRows::num_targets() const {
  return dataset->count_targets(0, dataset->num_tokens());
}

Batch EvaluationRows::read(int64_t first_row, int64_t num_rows) const {
  CHECK(first_row >= 0 && num_rows >= 0 && first_row + num_rows <= count(), "rows ", first_row, " to ",
        first_row + num_rows, " of ", count());
  std::vector<RowRequest> rows;
  for (int64_t row = first_row; row < first_row + num_rows; ++row)
    rows.push_back({dataset, row * stride, row == 0 ? 0 : row_length - stride});
  return read_batch(rows, row_length, first_row);
}

}  // namespace palimpsest
