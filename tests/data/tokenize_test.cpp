#include "data/tokenize.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>
#include <zlib.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "data/dataset.h"
#include "data/file_ops.h"
#include "data/ordered_pool.h"
#include "kernels/random.h"
#include "tests/support/files.h"

namespace palimpsest {
namespace {

using namespace std::string_literals;

using support::read_file;
using support::SmallFileSystem;
using support::TempDirectory;
using support::user_error_of;
using support::write_file;

void write_gzip(const std::string& path, const std::vector<std::string>& members) {
  write_file(path, "");
  for (const std::string& content : members) {
    const gzFile file = ::gzopen(path.c_str(), "ab");
    CHECK(file != nullptr && ::gzwrite(file, content.data(), content.size()) == static_cast<int>(content.size()) &&
          ::gzclose(file) == Z_OK);
  }
}

// The documents of a data set, decoded.
std::vector<std::string> documents_of(const std::string& path, const std::string& tokenizer_name = "bytes") {
  const auto tokenizer = load_tokenizer(tokenizer_name);
  const Dataset dataset(path);
  dataset.verify();
  std::vector<int32_t> stream(dataset.num_tokens());
  dataset.read(0, stream);
  std::vector<int64_t> starts;
  dataset.document_starts(0, dataset.num_tokens(), starts);
  starts.push_back(dataset.num_tokens());
  std::vector<std::string> documents;
  int64_t text_bytes = 0;
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    const std::span<const int32_t> ids = std::span(stream).subspan(starts[i], starts[i + 1] - starts[i]);
    EXPECT_EQ(ids.front(), tokenizer->bos());
    EXPECT_EQ(ids.back(), tokenizer->eos());
    documents.push_back(tokenizer->decode(ids));
    text_bytes += static_cast<int64_t>(documents.back().size());
    // As if the document had been encoded whole.
    EXPECT_EQ(tokenizer->encode(documents.back()), std::vector<int32_t>(ids.begin() + 1, ids.end() - 1));
  }
  EXPECT_EQ(dataset.text_bytes(), text_bytes);
  return documents;
}

using Documents = std::vector<std::string>;

// Tokenizes one file of the given name and content into folder/out and returns the documents.
Documents tokenized(const TempDirectory& folder, const std::string& name, const std::string& content,
                    TokenizeOptions options = {}) {
  write_file(folder / name, content);
  options.corpus.inputs = {folder / name};
  options.output = folder / "out";
  tokenize(options);
  Documents documents = documents_of(folder / "out");
  remove_tree(folder / "out");
  return documents;
}

std::string error_of(const TempDirectory& folder, const std::string& name, const std::string& content,
                     const std::string& split = "") {
  write_file(folder / name, content);
  std::string message = user_error_of([&] {
    TokenizeOptions options;
    options.corpus.inputs = {folder / name};
    options.corpus.split = split;
    options.output = folder / "out";
    tokenize(options);
  });
  EXPECT_FALSE(path_exists(folder / "out"));
  EXPECT_FALSE(path_exists(folder / "out.tmp"));
  return message;
}

std::string long_text(int64_t lines) {
  std::string text;
  for (int64_t i = 0; i < lines; ++i) text += "line " + std::to_string(random_bits(1, 2, i) % 1000) + " of a text\n";
  return text;
}

TEST(Tokenize, ATextFileIsOneDocument) {
  const TempDirectory folder;
  const std::string text = "a\n\n\0b\r\n\xFF\xE2\x96\x81 end"s;
  EXPECT_EQ(tokenized(folder, "a.txt", text), Documents{text});
  EXPECT_EQ(tokenized(folder, "b.txt", "\n"), Documents{"\n"});
}

TEST(Tokenize, BlankLinesSeparateDocuments) {
  const TempDirectory folder;
  TokenizeOptions options;
  options.corpus.split = "blank-lines";
  EXPECT_EQ(tokenized(folder, "a.txt", "\n\none\ntwo\n\n \t\r\n\nthree\n\nfour", options),
            (Documents{"one\ntwo\n", "three\n", "four"}));
}

TEST(Tokenize, MatchingLinesSeparateDocuments) {
  const TempDirectory folder;
  TokenizeOptions options;
  options.corpus.split = "^(CHAPTER [0-9]+|-{3,})$";
  EXPECT_EQ(tokenized(folder, "a.txt", "CHAPTER 1\r\none CHAPTER 1\n--\nCHAPTER 22\n---\ntwo\0\nCHAPTER\nCHAPTER 3"s,
                      options),
            (Documents{"one CHAPTER 1\n--\n", "two\0\nCHAPTER\n"s}));
  options.corpus.inputs = {folder / "a.txt"};
  options.output = folder / "out";
  EXPECT_EQ(tokenize(options).separators, 4);
  remove_tree(folder / "out");
  EXPECT_NE(error_of(folder, "b.txt", "x", "(").find("--split (: not blank-lines and not a regular expression"),
            std::string::npos);
}

TEST(Tokenize, ALineTooLongToBeASeparatorIsText) {
  const TempDirectory folder;
  TokenizeOptions options;
  options.corpus.split = "x";
  const std::string line = std::string((2 << 20) + 17, 'x') + "\n";
  EXPECT_EQ(tokenized(folder, "a.txt", "one\n" + line + "x\ntwo\n", options), (Documents{"one\n" + line, "two\n"}));
}

TEST(Tokenize, JsonLinesGiveOneDocumentEach) {
  const TempDirectory folder;
  const std::string lines = R"({"text": "one\nline", "meta": {"text": "not this", "deep": [[["x"]]]}})"
                            "\n\n"
                            R"({"id": 7, "text": "\u00e9\u2581 \ud83d\ude00"})"
                            "\n"
                            R"({"text": ""})"
                            "\r\n"
                            R"({"text": "last"})";
  EXPECT_EQ(tokenized(folder, "a.jsonl", lines),
            (Documents{"one\nline", "\xC3\xA9\xE2\x96\x81 \xF0\x9F\x98\x80", "last"}));
  TokenizeOptions options;
  options.corpus.text_field = "body";
  EXPECT_EQ(tokenized(folder, "b.jsonl", "{\"text\": 3, \"body\": \"x\"}\n", options), Documents{"x"});
}

TEST(Tokenize, BadJsonLinesAreNamedWithFileAndLine) {
  const TempDirectory folder;
  const std::string good = "{\"text\": \"fine\"}\n";
  const auto error_at_line_3 = [&](const std::string& line) {
    std::string message = error_of(folder, "a.jsonl", good + "\n" + line + "\n" + good);
    EXPECT_EQ(message.find((folder / "a.jsonl") + ":3: "), 0u) << message;
    return message;
  };
  EXPECT_NE(error_at_line_3("{\"text\": \"open").find("not JSON at column"), std::string::npos);
  EXPECT_NE(error_at_line_3("[\"text\"]").find("expected a JSON object"), std::string::npos);
  EXPECT_NE(error_at_line_3("\"text\"").find("expected a JSON object"), std::string::npos);
  EXPECT_NE(error_at_line_3("{\"body\": \"x\"}").find("has no field 'text'"), std::string::npos);
  EXPECT_NE(error_at_line_3("{\"text\": 5}").find("is not a text but a number"), std::string::npos);
  EXPECT_NE(error_at_line_3("{\"text\": null}").find("is not a text but a null"), std::string::npos);
  EXPECT_NE(error_at_line_3("{\"text\": \"\xFF\"}").find("not JSON"), std::string::npos);
  EXPECT_NE(error_at_line_3("{\"text\": \"\\ud800\"}").find("not JSON"), std::string::npos);
  EXPECT_NE(error_at_line_3("{\"text\": \"x\"} {}").find("not JSON"), std::string::npos);
  EXPECT_NE(error_at_line_3(std::string(200000, '[')).find("not JSON"), std::string::npos);
  EXPECT_NE(error_at_line_3("{\"text\": \"x\", \"n\": " + std::string(100000, '[') + "}").find("not JSON"),
            std::string::npos);
}

TEST(Tokenize, ReadsGzipFilesOfSeveralMembers) {
  const TempDirectory folder;
  const std::string text = long_text(20000);
  write_gzip(folder / "a.txt.gz", {text, "second member"});
  write_gzip(folder / "b.jsonl.gz", {"{\"text\": \"one\"}\n", "{\"text\": \"two\"}\n"});
  TokenizeOptions options;
  options.corpus.inputs = {folder / "a.txt.gz", folder / "b.jsonl.gz"};
  options.output = folder / "out";
  const TokenizeProgress result = tokenize(options);
  EXPECT_EQ(documents_of(folder / "out"), (Documents{text + "second member", "one", "two"}));
  EXPECT_EQ(result.input_bytes, file_size(folder / "a.txt.gz") + file_size(folder / "b.jsonl.gz"));
  EXPECT_EQ(result.input_bytes, result.input_bytes_total);
}

TEST(Tokenize, DamagedGzipFilesAreNamed) {
  const TempDirectory folder;
  write_gzip(folder / "good.txt.gz", {long_text(5000)});
  const std::string bytes = read_file(folder / "good.txt.gz");
  EXPECT_EQ(error_of(folder, "a.txt.gz", "plain text"),
            (folder / "a.txt.gz") + ": not compressed with gzip, unlike its name says");
  EXPECT_EQ(error_of(folder, "a.txt.gz", bytes.substr(0, bytes.size() / 2)),
            (folder / "a.txt.gz") + ": damaged gzip file: it ends too early");
  EXPECT_EQ(error_of(folder, "a.txt.gz", bytes.substr(0, bytes.size() - 3)),
            (folder / "a.txt.gz") + ": damaged gzip file: it ends too early");
  std::string flipped = bytes;
  flipped[bytes.size() / 2] = static_cast<char>(flipped[bytes.size() / 2] ^ 4);
  EXPECT_EQ(error_of(folder, "a.txt.gz", flipped).find((folder / "a.txt.gz") + ": damaged gzip file: "), 0u);
}

TEST(Tokenize, KeepsTheOrderOfInputsForAnyNumberOfThreads) {
  const TempDirectory folder;
  create_directories(folder / "corpus/inner");
  Documents expected;
  const auto add = [&](const std::string& name, const std::string& text) {
    write_file((folder / "corpus/") + name, text);
    expected.push_back(text);
  };
  add("a.txt", long_text(60000));  // several pieces of 256 KiB
  add("b.txt", "short");
  add("inner/c.txt", long_text(3));
  std::string lines;
  for (int i = 0; i < 30000; ++i) {
    expected.push_back("document " + std::to_string(i));
    lines += "{\"text\": \"" + expected.back() + "\"}\n";
  }
  write_file(folder / "corpus/z.jsonl", lines);
  write_file(folder / "corpus/README", "not part of the corpus");
  for (const int threads : {1, 3}) {
    TokenizeOptions options;
    options.corpus.inputs = {folder / "corpus"};
    options.output = folder / "out";
    options.num_threads = threads;
    options.shard_tokens = 100000;
    int64_t reports = 0;
    options.progress = [&](const TokenizeProgress& progress) {
      ++reports;
      EXPECT_LE(progress.input_bytes, progress.input_bytes_total);
    };
    const TokenizeProgress result = tokenize(options);
    EXPECT_GE(reports, 1);
    EXPECT_GT(result.megabytes_per_second(), 0.0);
    EXPECT_EQ(result.written.documents, static_cast<int64_t>(expected.size()));
    EXPECT_GT(result.written.shards, 5);
    EXPECT_EQ(documents_of(folder / "out"), expected);
    remove_tree(folder / "out");
  }
}

TEST(Tokenize, TrainsATokenizerAndUsesIt) {
  const TempDirectory folder;
  std::string text = long_text(3000) + "odd \0 bytes \xFF\xE2\x96\x81\n"s;
  write_file(folder / "a.txt", text);
  std::string lines;
  for (int i = 0; i < 20; ++i) lines += "{\"text\": \"one line of json text " + std::to_string(i) + "\"}\n";
  write_file(folder / "b.jsonl", lines);
  const CorpusOptions corpus = {.inputs = {folder / "a.txt", folder / "b.jsonl"}};
  train_tokenizer(corpus, 300, folder / "models/small.model");
  TokenizeOptions options;
  options.corpus = corpus;
  options.tokenizer = folder / "models/small.model";
  options.output = folder / "out";
  options.num_threads = 2;
  tokenize(options);
  const Documents documents = documents_of(folder / "out", folder / "models/small.model");
  ASSERT_EQ(documents.size(), 21u);
  EXPECT_EQ(documents[0], text);
  EXPECT_EQ(documents[20], "one line of json text 19");
  EXPECT_EQ(Dataset(folder / "out").vocabulary(), vocabulary_of(*load_tokenizer(folder / "models/small.model")));
  EXPECT_NE(user_error_of([&] { train_tokenizer(corpus, 1 << 20, folder / "none.model"); }).find("too high"),
            std::string::npos);
  EXPECT_FALSE(path_exists(folder / "none.model"));
}

TEST(Tokenize, BadInputsAreUserErrorsAndWriteNothing) {
  const TempDirectory folder;
  EXPECT_NE(error_of(folder, "empty.txt", "").find("empty.txt: there is no text in the 1 file(s) of the corpus"),
            std::string::npos);
  EXPECT_NE(error_of(folder, "blank.txt", "\n \n\n", "blank-lines").find("there is no text"), std::string::npos);
  EXPECT_NE(error_of(folder, "empty.jsonl", "\n{\"text\": \"\"}\n").find("there is no text"), std::string::npos);
  EXPECT_EQ(error_of(folder, "a.md", "x"),
            (folder / "a.md") + ": expected a name that ends with .txt, .jsonl, .txt.gz or .jsonl.gz");
  write_file(folder / "a.txt", "text");
  create_directories(folder / "empty");
  const auto error_with = [&](TokenizeOptions options) {
    if (options.output.empty()) options.output = folder / "out";
    return user_error_of([&] { tokenize(options); });
  };
  EXPECT_NE(error_with({}).find("no input files"), std::string::npos);
  EXPECT_EQ(error_with({.corpus = {.inputs = {folder / "none.txt"}}}),
            (folder / "none.txt") + ": no such file or folder");
  EXPECT_EQ(error_with({.corpus = {.inputs = {folder / "empty"}}}),
            (folder / "empty") + ": the folder holds no .txt or .jsonl file, plain or .gz");
  EXPECT_NE(
      error_with({.corpus = {.inputs = {folder / "a.txt"}}, .tokenizer = folder / "none.model"}).find("No such file"),
      std::string::npos);
  EXPECT_NE(error_with({.corpus = {.inputs = {folder / "a.txt"}}, .output = folder.path()}).find("not an empty folder"),
            std::string::npos);
  EXPECT_FALSE(path_exists(folder / "out"));
}

TEST(Tokenize, FoldersMayBeLinksButNotInACircle) {
  const TempDirectory folder;
  create_directories(folder / "a/b");
  write_file(folder / "a/b/text.txt", "text");
  std::filesystem::create_directory_symlink(folder / "a/b", folder / "a/same");
  EXPECT_EQ(corpus_files({folder / "a"}),
            (std::vector<std::string>{folder / "a/b/text.txt", folder / "a/same/text.txt"}));
  // Two circles: the paths through them double with each level.
  for (const char* name : {"a/b/up", "a/b/up2"}) std::filesystem::create_directory_symlink(folder / "a", folder / name);
  const std::string message = user_error_of([&] { corpus_files({folder / "a"}); });
  EXPECT_TRUE(message.starts_with((folder / "a/b/up") + ": a link back to ")) << message;
}

TEST(Tokenize, FullAndReadOnlyOutputFoldersAreReported) {
  const TempDirectory folder;
  write_file(folder / "a.txt", std::string(1 << 20, 'x'));
  TokenizeOptions options;
  options.corpus.inputs = {folder / "a.txt"};
  {
    const SmallFileSystem disk(512 << 10);
    if (!disk.mounted()) GTEST_SKIP() << "needs the right to mount";
    options.output = disk / "out";
    EXPECT_NE(user_error_of([&] { tokenize(options); }).find("No space left on device"), std::string::npos);
    EXPECT_TRUE(list_directory(disk.path()).empty());
  }
  const SmallFileSystem disk(512 << 10, true);
  options.output = disk / "out";
  EXPECT_EQ(user_error_of([&] { tokenize(options); }),
            "cannot create the folder " + (disk / "out.tmp") + ": Read-only file system");
}

TEST(OrderedPool, ThreadsGiveOutputsAndErrorsInOrder) {
  std::atomic<int> done = 0;
  OrderedPool<int, int> pool(3, [&](int value) {
    std::this_thread::sleep_for(std::chrono::microseconds(value * 37 % 500));
    ++done;
    if (value == 70) throw_user_error("value ", value);
    CHECK(value != 90, "value ", value);
    return value * 2;
  });
  for (int value = 0; value < 100; ++value) pool.push(value);
  for (int value = 0; value < 70; ++value) EXPECT_EQ(pool.pop(), value * 2);
  EXPECT_EQ(user_error_of([&] { pool.pop(); }), "value 70");
  EXPECT_EQ(pool.num_pending(), 30u);
}

TEST(OrderedPool, MoreThreadsThanThereCanBeAreAUserError) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which need address space themselves
  // Processes of root know no limit of their own, so the limit is that of the address space.
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
  rlim_t pages = 0;  // of address space that this process has
  std::ifstream("/proc/self/statm") >> pages;
  const rlimit tight = {.rlim_cur = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + (rlim_t{1} << 30),
                        .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &tight), 0);
  const std::string message = user_error_of([] { OrderedPool<int, int> pool(4000, [](int value) { return value; }); });
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_NE(message.find("of 4000 threads could be started"), std::string::npos) << message;
#endif
}

TEST(OrderedPool, ThreadsEndWithWorkLeft) {
  for (int round = 0; round < 20; ++round) {
    OrderedPool<int, int> pool(2, [](int value) { return value; });
    for (int value = 0; value < round; ++value) pool.push(value);
  }
}

}  // namespace
}  // namespace palimpsest
