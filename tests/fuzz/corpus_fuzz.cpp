// Any bytes as a file of text: the first says which kind of file and how it is split, the rest is the file. It is
// refused with a UserError, or its parts belong to documents in order, and those of a plain text are the text.
#include <array>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>

#include "data/corpus.h"
#include "kernels/check.h"
#include "tests/fuzz/scratch.h"

namespace {

using namespace palimpsest;

void check(bool condition) {
  if (!condition) std::abort();
}

void read_all(const CorpusOptions& options, std::string_view content, bool is_plain) {
  CorpusReader reader(options);
  std::string text;
  bool open = false;
  for (CorpusPiece piece; reader.next(piece);)
    for (const CorpusPiece::Part& part : piece.parts) {
      check(part.begin <= part.end && part.end <= piece.data.size() && part.begins_document != open);
      open = !part.ends_document;
      if (part.line == 0) {
        text += piece.text(part);
        continue;
      }
      try {
        text_of_json_line(piece.text(part), options.text_field);
      } catch (const UserError&) {
      }
    }
  check(!open);
  if (is_plain) check(text == content);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  static const ScratchFolder folder;
  struct Kind {
    const char *name, *split;
  };
  constexpr std::array<Kind, 6> kKinds = {{{"c.txt", ""},
                                           {"c.txt", "blank-lines"},
                                           {"c.txt", "^(--+|\\*)$"},
                                           {"c.jsonl", ""},
                                           {"c.txt.gz", "blank-lines"},
                                           {"c.jsonl.gz", ""}}};
  const Kind& kind = kKinds[data[0] % kKinds.size()];
  const std::string_view content(reinterpret_cast<const char*>(data) + 1, size - 1);
  const std::string path = folder / kind.name;
  check(
      std::ofstream(path, std::ios::binary).write(content.data(), static_cast<std::streamsize>(content.size())).good());
  try {
    read_all({.inputs = {path}, .text_field = "text", .split = kind.split}, content, data[0] % kKinds.size() == 0);
  } catch (const UserError&) {
  }
  return 0;
}
