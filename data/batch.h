// A batch: rows of tokens with their targets, positions and documents, as the model takes them.
#pragma once

#include <cstdint>
#include <vector>

#include "data/dataset.h"
#include "kernels/documents.h"

namespace palimpsest {

// N = num_rows * row_length flat tokens, row after row.
//
// The target of a token is the token after it in the stream, in the next row for the last of a row. It is kNoTarget
// where nothing is scored: at the last token of a document (the first token of the next one is never a target), where
// the stream ends, in padding, and at positions that an overlapping row has scored already.
struct Batch {
  static constexpr int32_t kNoTarget = -1;

  int64_t num_rows = 0;
  int64_t row_length = 0;
  std::vector<int32_t> tokens;           // [N]
  std::vector<int32_t> targets;          // [N]
  std::vector<int32_t> positions;        // [N] from the start of the document, or of the row that cuts it
  std::vector<int64_t> row_begin;        // [num_rows] position of each row in the stream of its data set
  Documents documents = Documents({0});  // over the N tokens; every row starts one; none is empty
  int64_t num_targets = 0;
  int64_t first_row = 0;  // index of the first row among all rows of the run, or of the evaluation
  uint64_t hash = 0;      // of tokens and targets
};

// One row to be read: targets of positions before first_scored are not scored.
struct RowRequest {
  const Dataset* dataset = nullptr;
  int64_t begin = 0;
  int64_t first_scored = 0;
};

// Reads the rows. A row that reaches past the end of the stream is padded with eos, as a document of its own.
Batch read_batch(const std::vector<RowRequest>& rows, int64_t row_length, int64_t first_row);

// ---- training -------------------------------------------------------------------------------------------------------
// Rows at multiples of row_length; the tokens that do not fill a row at the end of the stream are dropped.
int64_t num_training_rows(const Dataset& dataset, int64_t row_length);

// ---- evaluation -----------------------------------------------------------------------------------------------------
// Every target of the file is scored exactly once, whatever the batch. Rows start at multiples of `stride` <=
// row_length; all but the first score their last `stride` positions alone, so that a smaller stride gives every token a
// longer context. The last row may be padded.
struct EvaluationRows {
  const Dataset* dataset = nullptr;
  int64_t row_length = 0;
  int64_t stride = 0;

  int64_t count() const;
  int64_t num_targets() const;  // scored tokens of the whole file
  Batch read(int64_t first_row, int64_t num_rows) const;
};

}  // namespace palimpsest
