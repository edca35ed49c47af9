// A corpus: text files as a sequence of documents, read from front to back with little memory.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/input_file.h"

namespace palimpsest {

struct CorpusOptions {
  // Files named *.txt or *.jsonl, each also with .gz, or folders: their files of these names, in name order, folders
  // inside included.
  std::vector<std::string> inputs;
  std::string text_field = "text";  // of the JSON object on each line of a .jsonl file, which is one document
  // How a .txt file becomes documents. Empty: it is one. "blank-lines": blank lines separate documents. Else a POSIX
  // extended regular expression: each line in which it is found separates documents. Separators belong to no document.
  std::string split;
};

// The files that the inputs stand for. Throws when one does not exist or has another kind of name.
std::vector<std::string> corpus_files(const std::vector<std::string>& inputs);

// Some documents or parts of documents.
struct CorpusPiece {
  struct Part {
    size_t begin = 0, end = 0;  // in `data`
    bool begins_document = false;
    bool ends_document = false;
    int64_t line = 0;  // of a JSON line; 0: plain text
  };
  std::string file;
  std::string data;
  std::vector<Part> parts;  // those of one document follow one another, also from piece to piece; plain parts are not
                            // empty, and all but the last of a document are windows as Tokenizer::encode cuts them

  std::string_view text(const Part& part) const {
    return std::string_view(data).substr(part.begin, part.end - part.begin);
  }
};

class CorpusReader {
 public:
  explicit CorpusReader(CorpusOptions options);
  ~CorpusReader();
  CorpusReader(const CorpusReader&) = delete;
  CorpusReader& operator=(const CorpusReader&) = delete;

  bool next(CorpusPiece& piece);  // false at the end

  int64_t num_files() const { return static_cast<int64_t>(files_.size()); }
  int64_t total_bytes() const { return total_bytes_; }  // of the files, on the disk
  int64_t bytes_read() const;
  int64_t num_separators() const { return num_separators_; }  // lines that separated documents so far

 private:
  struct Separator;

  bool open_next_file();
  void read_json_lines(CorpusPiece& piece);
  void read_whole_text(CorpusPiece& piece);
  void read_split_text(CorpusPiece& piece);
  void add_text(CorpusPiece& piece, std::string_view text);
  void end_document(CorpusPiece& piece);

  CorpusOptions options_;
  std::vector<std::string> files_;
  std::unique_ptr<Separator> separator_;  // null when files are not split
  int64_t total_bytes_ = 0;
  int64_t bytes_of_finished_ = 0;
  int64_t num_separators_ = 0;
  size_t next_file_ = 0;
  std::optional<LineReader> lines_;  // of the open file
  std::string pending_;              // text of the open document that is in no piece yet
  bool document_begun_ = false;      // whether a part of it is in a piece
};

// The text of a JSON line, or "" when it is blank. Throws a message without a place when the line is not an object
// with that field.
std::string text_of_json_line(std::string_view line, const std::string& field);

}  // namespace palimpsest
