#include "trainer/hf_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <span>
#include <utility>

#include "data/file_ops.h"
#include "kernels/check.h"

namespace palimpsest {

namespace {

constexpr size_t kPieceBytes = size_t{4} << 20;

// Weights in other formats than safetensors, and everything that is written anew.
bool is_kept_as_it_is(const std::string& name) {
  constexpr std::array kNot = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".partial"};
  if (name.starts_with('.') || name == "config.json") return false;
  return std::none_of(kNot.begin(), kNot.end(), [&](const char* suffix) { return name.ends_with(suffix); });
}

template <class Release>
void copy_bytes(std::span<const std::byte> bytes, const std::function<void(std::span<const std::byte>)>& write,
                Release&& release) {
  for (size_t at = 0; at < bytes.size(); at += kPieceBytes) {
    const std::span<const std::byte> piece = bytes.subspan(at, std::min(kPieceBytes, bytes.size() - at));
    write(piece);
    release(piece);
  }
}

void copy_file(const std::string& from, const std::string& to) {
  const MappedFile source(from);
  OutputFile out(to, OutputFile::Mode::kReplace);
  copy_bytes(
      source.bytes(), [&](std::span<const std::byte> piece) { out.write(piece); },
      [&](std::span<const std::byte> piece) { source.release(piece); });
  out.sync();
  out.close();
}

std::string file_name(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

void write_unknown(const HfFolder& from, const std::vector<std::string>& unknown, const std::string& path) {
  std::vector<SafeEntry> entries;
  int64_t bytes = 0;
  for (const std::string& name : unknown) {
    const SafeTensor& tensor = *from.tensors.find(name);
    entries.push_back({name, tensor.dtype, tensor.shape, 0});
    bytes += static_cast<int64_t>(tensor.bytes.size());
  }
  SafetensorsWriter writer(path, make_safetensors_header(entries, {}), bytes);
  for (const std::string& name : unknown)
    copy_bytes(
        from.tensors.find(name)->bytes, [&](std::span<const std::byte> piece) { writer.write(piece); },
        [&](std::span<const std::byte> piece) { from.tensors.release(piece); });
  writer.finish();
}

}  // namespace

bool is_hf_folder(const std::string& path) {
  return path_exists(path + "/config.json") &&
         (path_exists(path + "/model.safetensors") || path_exists(path + "/model.safetensors.index.json"));
}

HfFolder::HfFolder(const std::string& directory)
    : model(read_hf_config(read_whole_file(directory + "/config.json"), directory + "/config.json")),
      tensors(directory) {
  const SafeTensor *head = tensors.find("lm_head.weight"), *embedding = tensors.find("model.embed_tokens.weight");
  if (!model.config.tie_embeddings || head == nullptr || embedding == nullptr) return;
  model.config.tie_embeddings =
      model.family != HfFamily::kKimiLinear && head->dtype == embedding->dtype &&
      std::equal(head->bytes.begin(), head->bytes.end(), embedding->bytes.begin(), embedding->bytes.end());
  tensors.release(head->bytes);
  tensors.release(embedding->bytes);
}

void keep_hf_files(const HfFolder& from, const std::vector<std::string>& unknown, const std::string& to) {
  const std::string& directory = from.tensors.directory();
  create_directories(to);
  copy_file(directory + "/config.json", to + "/config.json");
  for (const SafetensorsFile& file : from.tensors.files()) {
    OutputFile header(fmt::format("{}/{}{}", to, file_name(file.path()), kHeaderSuffix), OutputFile::Mode::kReplace);
    header.write(file.header());
    header.sync();
    header.close();
  }
  if (!unknown.empty()) write_unknown(from, unknown, to + "/" + kUnknownTensors);
  for (const std::string& name : list_directory(directory)) {
    const std::string path = fmt::format("{}/{}", directory, name);
    if (is_kept_as_it_is(name) && !is_directory(path)) copy_file(path, fmt::format("{}/{}", to, name));
  }
  sync_directory(to);
}

void copy_kept_files(const std::string& from, const std::string& to) {
  const std::string partial = to + ".partial";
  try_remove(partial);
  create_directories(partial);
  for (const std::string& name : list_directory(from))
    copy_file(fmt::format("{}/{}", from, name), fmt::format("{}/{}", partial, name));
  sync_directory(partial);
  if (path_exists(to)) remove_tree(to);
  rename_path(partial, to);
}

std::optional<std::string> find_kept_files(const std::string& checkpoint) {
  const std::filesystem::path folder = std::filesystem::absolute(checkpoint).lexically_normal();
  const std::filesystem::path plain = folder.has_filename() ? folder : folder.parent_path();  // without a last '/'
  std::vector<std::filesystem::path> places = {plain};
  if (plain.parent_path().filename() == "checkpoints") places.push_back(plain.parent_path().parent_path());
  for (const std::filesystem::path& place : places) {
    const std::string kept = (place / kKeptFolder).string();
    if (path_exists(kept + "/config.json")) return kept;
  }
  return std::nullopt;
}

}  // namespace palimpsest
