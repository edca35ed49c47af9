#include "data/corpus.h"

#include <regex.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "data/file_ops.h"
#include "data/tokenizer.h"
#include "kernels/check.h"

namespace palimpsest {

namespace {

constexpr size_t kPieceBytes = size_t{256} << 10;  // enough for one thread to be busy for a while
constexpr size_t kLongestJsonLine = size_t{256} << 20;
constexpr size_t kLongestSeparator = size_t{1} << 20;  // a longer line separates nothing

std::string_view without_gz(std::string_view name) {
  if (name.ends_with(".gz")) name.remove_suffix(3);
  return name;
}
bool is_json_lines(std::string_view name) {
  return without_gz(name).ends_with(".jsonl");
}
bool is_text(std::string_view name) {
  return without_gz(name).ends_with(".txt");
}

bool is_blank(std::string_view line) {
  return std::all_of(line.begin(), line.end(), [](char c) { return c == ' ' || (c >= '\t' && c <= '\r'); });
}

// `above`: the folders that this one lies in, without links.
void add_folder(const std::string& folder, std::vector<std::filesystem::path>& above, std::vector<std::string>& files) {
  std::error_code error;
  const std::filesystem::path real = std::filesystem::canonical(folder, error);
  if (error) throw_user_error("cannot look at ", folder, ": ", error.message());
  if (std::find(above.begin(), above.end(), real) != above.end())
    throw_user_error(folder, ": a link back to ", real.string(), ", in which it lies; remove it, or name the files");
  above.push_back(real);
  for (const std::string& name : list_directory(folder)) {
    const std::string path = (std::filesystem::path(folder) / name).string();
    if (is_directory(path))
      add_folder(path, above, files);
    else if (is_text(name) || is_json_lines(name))
      files.push_back(path);
  }
  above.pop_back();
}

}  // namespace

std::vector<std::string> corpus_files(const std::vector<std::string>& inputs) {
  if (inputs.empty()) throw_user_error("no input files: name .txt or .jsonl files, or folders of them");
  std::vector<std::string> files;
  for (const std::string& input : inputs) {
    if (!path_exists(input)) throw_user_error(input, ": no such file or folder");
    if (is_directory(input)) {
      const size_t before = files.size();
      std::vector<std::filesystem::path> above;
      add_folder(input, above, files);
      if (files.size() == before) throw_user_error(input, ": the folder holds no .txt or .jsonl file, plain or .gz");
    } else if (is_text(input) || is_json_lines(input)) {
      files.push_back(input);
    } else {
      throw_user_error(input, ": expected a name that ends with .txt, .jsonl, .txt.gz or .jsonl.gz");
    }
  }
  return files;
}

// Decides whether a line separates documents.
struct CorpusReader::Separator {
  explicit Separator(const std::string& split) : text(split), blank_lines(split == "blank-lines") {
    if (blank_lines) return;
    const int code = ::regcomp(&expression, split.c_str(), REG_EXTENDED | REG_NOSUB);
    if (code != 0) fail("not blank-lines and not a regular expression", code);
  }
  ~Separator() {
    if (!blank_lines) ::regfree(&expression);
  }
  Separator(const Separator&) = delete;
  Separator& operator=(const Separator&) = delete;

  bool matches(std::string_view line) const {
    if (line.size() >= kLongestSeparator) return false;
    if (blank_lines) return is_blank(line);
    while (line.ends_with('\n') || line.ends_with('\r')) line.remove_suffix(1);
    regmatch_t range = {0, static_cast<regoff_t>(line.size())};  // the line may hold NUL
    const int code = ::regexec(&expression, line.data(), 1, &range, REG_STARTEND);
    if (code != 0 && code != REG_NOMATCH) fail("cannot be matched", code);
    return code == 0;
  }

  [[noreturn]] void fail(const char* what, int code) const {
    char cause[256];
    ::regerror(code, &expression, cause, sizeof(cause));
    throw_user_error("--split ", text, ": ", what, ": ", cause);
  }

  std::string text;
  bool blank_lines;
  regex_t expression = {};
};

CorpusReader::CorpusReader(CorpusOptions options)
    : options_(std::move(options)), files_(corpus_files(options_.inputs)) {
  if (!options_.split.empty()) separator_ = std::make_unique<Separator>(options_.split);
  for (const std::string& file : files_) total_bytes_ += file_size(file);
}

CorpusReader::~CorpusReader() = default;

int64_t CorpusReader::bytes_read() const {
  return bytes_of_finished_ + (lines_ ? lines_->file().position() : 0);
}

bool CorpusReader::open_next_file() {
  if (lines_) bytes_of_finished_ += lines_->file().position();
  lines_.reset();
  if (next_file_ == files_.size()) return false;
  lines_.emplace(files_[next_file_++]);
  return true;
}

bool CorpusReader::next(CorpusPiece& piece) {
  piece = {};
  while (piece.parts.empty()) {
    if (!lines_ && !open_next_file()) return false;
    piece.file = lines_->file().path();
    if (is_json_lines(piece.file))
      read_json_lines(piece);
    else if (separator_)
      read_split_text(piece);
    else
      read_whole_text(piece);
  }
  return true;
}

void CorpusReader::read_json_lines(CorpusPiece& piece) {
  std::string line;
  while (piece.data.size() < kPieceBytes) {
    if (!lines_->next(line, kLongestJsonLine)) {
      open_next_file();
      return;
    }
    if (line.size() == kLongestJsonLine)
      throw_user_error(piece.file, ":", lines_->line_number(), ": the line is longer than ", kLongestJsonLine,
                       " bytes");
    const size_t begin = piece.data.size();
    piece.data += line;
    piece.parts.push_back({begin, piece.data.size(), true, true, lines_->line_number()});
  }
}

void CorpusReader::read_whole_text(CorpusPiece& piece) {
  std::string text;
  while (piece.data.size() < kPieceBytes) {
    if (!lines_->next(text, kEncodingWindow)) {  // lines do not matter here, only that the pieces are small
      end_document(piece);
      open_next_file();
      return;
    }
    add_text(piece, text);
  }
}

void CorpusReader::read_split_text(CorpusPiece& piece) {
  std::string line;
  while (piece.data.size() < kPieceBytes) {
    if (!lines_->next(line, kLongestSeparator)) {
      end_document(piece);
      open_next_file();
      return;
    }
    if (lines_->at_line_start() && separator_->matches(line)) {
      ++num_separators_;
      end_document(piece);
    } else {
      add_text(piece, line);
    }
  }
}

void CorpusReader::add_text(CorpusPiece& piece, std::string_view text) {
  pending_ += text;
  while (pending_.size() > kEncodingWindow) {
    const size_t length = encoding_window(pending_);
    const size_t begin = piece.data.size();
    piece.data.append(pending_, 0, length);
    piece.parts.push_back({begin, piece.data.size(), !std::exchange(document_begun_, true), false, 0});
    pending_.erase(0, length);
  }
}

void CorpusReader::end_document(CorpusPiece& piece) {
  if (pending_.empty()) return;  // then nothing has begun: a window never takes all that is pending
  const size_t begin = piece.data.size();
  piece.data += pending_;
  piece.parts.push_back({begin, piece.data.size(), !std::exchange(document_begun_, false), true, 0});
  pending_.clear();
}

std::string text_of_json_line(std::string_view line, const std::string& field) {
  if (is_blank(line)) return "";
  using Json = nlohmann::json;
  // Only the wanted field is kept, however large and deep the others are.
  const auto keep = [&](int depth, Json::parse_event_t event, Json& value) {
    return event != Json::parse_event_t::key || depth != 1 || value == field;
  };
  Json object;
  try {
    object = Json::parse(line, keep);
  } catch (const Json::exception& error) {
    std::string cause = error.what();  // "[json.exception...] parse error at line 1, column 5: syntax error ..."
    if (const size_t column = cause.find("column "); column != std::string::npos) cause = "at " + cause.substr(column);
    std::replace_if(
        cause.begin(), cause.end(), [](unsigned char c) { return c < ' '; }, ' ');
    throw_user_error("not JSON ", cause);
  }
  if (!object.is_object()) throw_user_error("expected a JSON object with the field '", field, "'");
  const auto found = object.find(field);
  if (found == object.end()) throw_user_error("the object has no field '", field, "'");
  if (!found->is_string()) throw_user_error("the field '", field, "' is not a text but a ", found->type_name());
  return found->get<std::string>();
}

}  // namespace palimpsest
