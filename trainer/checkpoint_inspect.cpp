#include "trainer/checkpoint_inspect.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string_view>

#include "trainer/checkpoint_reader.h"

namespace palimpsest {

namespace {

template <class T>
double sum_of_squares(std::span<const std::byte> bytes) {
  const std::span<const T> values(reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T));
  double sum = 0.0;
  for (const T value : values) sum += static_cast<double>(value) * static_cast<double>(value);
  return sum;
}

std::string state_text(const CheckpointHeader& header) {
  std::string text;
  const auto add = [&](const char* name, int64_t value) { text += fmt::format("  {:<18}{}\n", name, value); };
  TrainState state = header.state;
  text += "state\n";
  state.visit(add);
  for (const auto& [name, loss] : state.eval_losses) text += fmt::format("  loss on {:<10}{:.6f}\n", name, loss);
  text += "written by ranks\n";
  WorldLayout world = header.world;
  world.visit(add);
  return text;
}

std::string indented(const std::string& lines) {
  std::string text;
  for (size_t start = 0; start < lines.size();) {
    const size_t end = std::min(lines.find('\n', start), lines.size());
    text += "  " + lines.substr(start, end - start) + "\n";
    start = end + 1;
  }
  return text;
}

// One line a parameter; `squares` holds the sum of squares of each dataset.
std::string tensor_table(const Manifest& manifest, const std::map<std::string, double>& squares) {
  constexpr std::string_view kParts[] = {"model/", "adam_m/", "adam_v/"};
  const auto norm_text = [&](const std::string& dataset) {
    const auto found = squares.find(dataset);
    return found == squares.end() ? std::string("-") : fmt::format("{:.6g}", std::sqrt(found->second));
  };
  size_t width = 9;
  for (const DatasetRecord& record : manifest.datasets) width = std::max(width, record.name.size());
  constexpr const char* kLine = "  {:<{}}  {:<6}{:<20}{:>14}{:>14}{:>14}\n";
  std::string text =
      "tensors\n" + fmt::format(kLine, "parameter", width, "dtype", "shape", "norm", "norm adam_m", "norm adam_v");
  std::set<std::string> seen;
  int64_t elements = 0;
  for (const DatasetRecord& record : manifest.datasets) {
    if (!record.name.starts_with(kParts[0]) || !seen.insert(record.name).second) continue;
    const std::string parameter = record.name.substr(kParts[0].size());
    elements += record.global_shape.numel();
    text +=
        fmt::format(kLine, parameter, width, name_of(record.dtype), record.global_shape.str(), norm_text(record.name),
                    norm_text(std::string(kParts[1]) + parameter), norm_text(std::string(kParts[2]) + parameter));
  }
  std::map<std::string_view, double> totals;
  for (const auto& [name, sum] : squares)
    for (const std::string_view part : kParts)
      if (name.starts_with(part)) totals[part] += sum;
  const auto total_text = [&](std::string_view part) {
    return totals.contains(part) ? fmt::format("{:.6g}", std::sqrt(totals[part])) : std::string("-");
  };
  return text + fmt::format(kLine, "total", width, "", fmt::format("{} elements", elements), total_text(kParts[0]),
                            total_text(kParts[1]), total_text(kParts[2]));
}

}  // namespace

CheckpointReport inspect_checkpoint(const std::string& folder) {
  CheckpointReader reader(folder);
  const Manifest& manifest = reader.manifest();
  std::map<std::string, double> squares;
  CheckpointReport report;
  report.damage = reader.verify([&](const DatasetRecord& stored, std::span<const std::byte> values) {
    squares[stored.name] +=
        stored.dtype == DType::kF64 ? sum_of_squares<double>(values) : sum_of_squares<float>(values);
  });
  report.text = fmt::format("checkpoint {}\n  written by {}, format version {}\n", folder, manifest.header.program,
                            Manifest::kFormatVersion);
  report.text += state_text(manifest.header) + "files\n";
  for (const FileRecord& file : manifest.files)
    report.text += fmt::format("  {:<32}{:>14} bytes\n", file.name, file.bytes);
  report.text += "config\n" + indented(manifest.header.config) + tensor_table(manifest, squares) + "verification\n";
  for (const std::string& line : report.damage) report.text += "  DAMAGED: " + line + "\n";
  if (report.damage.empty())
    report.text += fmt::format("  all {} datasets match their checksums\n", manifest.datasets.size());
  return report;
}

}  // namespace palimpsest
