#include "data/safetensors.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/support/files.h"

namespace palimpsest {
namespace {

using support::flip_bit;
using support::read_file;
using support::TempDirectory;
using support::user_error_of;
using support::write_file;

template <class T>
SafeTensor tensor_of(SafeDType dtype, std::vector<int64_t> shape, const std::vector<T>& values) {
  return {dtype, std::move(shape), std::as_bytes(std::span(values))};
}

std::string with_header(const std::string& header, const std::string& payload) {
  const uint64_t length = header.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes + header + payload;
}

std::vector<float> floats_of(const SafeTensor& tensor) {
  std::vector<float> values(tensor.numel());
  read_as_f32(tensor, 0, values, "tensor");
  return values;
}

TEST(Safetensors, KeepNamesShapesAndValues) {
  const TempDirectory folder;
  const std::vector<float> weight = {1.0f, -2.5f, 3.25f, 0.0f, 1e-30f, 7.0f};
  const std::vector<int64_t> ids = {5, -7};
  const std::vector<double> scalar = {0.5};
  const std::vector<float> none;
  write_safetensors(folder / "a.safetensors",
                    {{"b.weight", tensor_of(SafeDType::kF32, {2, 3}, weight)},
                     {"ids", tensor_of(SafeDType::kI64, {2}, ids)},
                     {"a", tensor_of(SafeDType::kF64, {}, scalar)},
                     {"none", tensor_of(SafeDType::kF32, {0, 4}, none)}},
                    {{"format", "pt"}});
  const SafetensorsFile file(folder / "a.safetensors");
  ASSERT_EQ(file.tensors().size(), 4u);
  EXPECT_EQ(file.tensors().at("b.weight").shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(floats_of(file.tensors().at("b.weight")), weight);
  EXPECT_EQ(floats_of(file.tensors().at("a")), std::vector<float>{0.5f});
  EXPECT_EQ(file.tensors().at("none").numel(), 0);
  EXPECT_EQ(read_as_i32(file.tensors().at("ids"), "ids"), (std::vector<int32_t>{5, -7}));
  std::vector<float> part(3);
  read_as_f32(file.tensors().at("b.weight"), 2, part, "part");
  EXPECT_EQ(part, (std::vector<float>{3.25f, 0.0f, 1e-30f}));
}

TEST(Safetensors, ConvertHalfFormats) {
  const std::vector<uint16_t> half = {0x3C00, 0xC000, 0x7BFF, 0x0001, 0x03FF, 0x8001, 0x0000, 0x8000, 0x7C00, 0xFC00};
  const std::vector<float> expected = {1.0f,
                                       -2.0f,
                                       65504.0f,
                                       0x1p-24f,
                                       1023 * 0x1p-24f,
                                       -0x1p-24f,
                                       0.0f,
                                       -0.0f,
                                       std::numeric_limits<float>::infinity(),
                                       -std::numeric_limits<float>::infinity()};
  const std::vector<float> converted = floats_of(tensor_of(SafeDType::kF16, {10}, half));
  for (size_t i = 0; i < half.size(); ++i)
    EXPECT_EQ(std::bit_cast<uint32_t>(converted[i]), std::bit_cast<uint32_t>(expected[i])) << i;
  EXPECT_TRUE(std::isnan(floats_of(tensor_of(SafeDType::kF16, {1}, std::vector<uint16_t>{0x7E00}))[0]));
  const std::vector<uint16_t> brain = {0x3F80, 0xC049};
  EXPECT_EQ(floats_of(tensor_of(SafeDType::kBF16, {2}, brain)), (std::vector<float>{1.0f, -3.140625f}));
}

TEST(Safetensors, RefuseTypesThatAreNotWeightsOrIds) {
  const std::vector<int64_t> large = {int64_t{1} << 40};
  const std::vector<float> weight = {1.0f};
  EXPECT_EQ(user_error_of([&] { floats_of(tensor_of(SafeDType::kI64, {1}, large)); }),
            "tensor: dtype I64, weights must be F32, F16, BF16 or F64");
  EXPECT_NE(user_error_of([&] { read_as_i32(tensor_of(SafeDType::kI64, {1}, large), "ids"); }).find("32 bits"),
            std::string::npos);
  EXPECT_NE(user_error_of([&] { read_as_i32(tensor_of(SafeDType::kF32, {1}, weight), "ids"); }).find("I32 or I64"),
            std::string::npos);
}

TEST(Safetensors, EveryFaultOfAHeaderIsNamed) {
  const TempDirectory folder;
  const std::string path = folder / "a.safetensors";
  const auto error_of_bytes = [&](const std::string& bytes) {
    write_file(path, bytes);
    std::string message = user_error_of([&] { SafetensorsFile file(path); });
    EXPECT_EQ(message.find(path + ": "), 0u) << message;
    return message;
  };
  const auto expect_error = [&](const std::string& header, const std::string& part) {
    const std::string message = error_of_bytes(with_header(header, "12345678"));
    EXPECT_NE(message.find(part), std::string::npos) << message << "\nfor " << header;
  };
  // What all the others are variations of.
  write_file(path, with_header(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "12345678"));
  EXPECT_EQ(SafetensorsFile(path).tensors().size(), 1u);

  EXPECT_NE(error_of_bytes("").find("too short"), std::string::npos);
  EXPECT_NE(error_of_bytes("1234567").find("too short"), std::string::npos);
  for (const uint64_t length : {uint64_t{100}, ~uint64_t{0}, uint64_t{1} << 63}) {
    std::string bytes(sizeof(length), '\0');
    std::memcpy(bytes.data(), &length, sizeof(length));
    EXPECT_NE(error_of_bytes(bytes + "{}").find("a header of " + std::to_string(length) + " bytes"), std::string::npos);
  }
  expect_error("", "not valid JSON");
  expect_error("{", "not valid JSON");
  expect_error(R"({"x":"\ud800"})", "not valid JSON");
  expect_error("{\"x\xFF\":1}", "not valid JSON");
  expect_error(std::string(100000, '['), "not valid JSON");
  expect_error("[]", "must be a JSON object");
  expect_error(R"({"x":5})", "tensor 'x': needs dtype");
  expect_error(R"({"x":{"dtype":"F32","shape":[2]}})", "tensor 'x': needs dtype");
  expect_error(R"({"x":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}})", "tensor 'x': dtype \"F33\" is not known");
  expect_error(R"({"x":{"dtype":7,"shape":[2],"data_offsets":[0,8]}})", "tensor 'x': dtype 7 is not known");
  expect_error(R"({"x":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})", "shape must be a list");
  expect_error(R"({"x":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", "shape holds -2");
  expect_error(R"({"x":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", "shape holds 2.0");
  expect_error(R"({"x":{"dtype":"F32","shape":["2"],"data_offsets":[0,8]}})", "shape holds");
  expect_error(R"({"x":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}})", "overflows");
  expect_error(R"({"x":{"dtype":"F32","shape":[3037000500,3037000500],"data_offsets":[0,8]}})", "overflows");
  expect_error(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", "must be two numbers");
  expect_error(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", "do not lie in");
  expect_error(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", "do not lie in");
  expect_error(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551615]}})", "data_offsets holds");
  expect_error(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}})", "hold 8 bytes, dtype and shape need 4");
  expect_error(
      R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"y":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
      "tensor 'y' overlaps");
  expect_error(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "4 bytes at the end belong to no tensor");
  expect_error(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", "4 bytes before tensor 'x'");
  expect_error(
      R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
      "names 'x' twice");
  expect_error(R"({"x":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "names 'dtype' twice");
  expect_error(R"({"x\ny":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}})", "is not known");  // on one line
}

TEST(Safetensors, DamageAnywhereGivesAnErrorOrOtherNumbersButNeverACrash) {
  const TempDirectory folder;
  const std::vector<float> first(20, 1.0f);
  const std::vector<double> second(3, 2.0);
  write_safetensors(
      folder / "good.safetensors",
      {{"first", tensor_of(SafeDType::kF32, {4, 5}, first)}, {"second", tensor_of(SafeDType::kF64, {3}, second)}}, {});
  const std::string bytes = read_file(folder / "good.safetensors");
  const std::string path = folder / "a.safetensors";
  const auto try_reading = [&] {
    try {  // the format has no checksum: a changed digit or name may still be a file
      for (const SafetensorsFile file(path); const auto& [name, tensor] : file.tensors())
        if (tensor.dtype == SafeDType::kF32 || tensor.dtype == SafeDType::kF64) floats_of(tensor);
      return true;
    } catch (const UserError& error) {
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
      return false;
    }
  };
  write_file(path, bytes);
  EXPECT_TRUE(try_reading());
  int seen = 0;
  for (size_t byte = 0; byte < bytes.size(); ++byte)
    for (int bit = 0; bit < 8; ++bit) {
      flip_bit(path, byte, bit);
      seen += try_reading() ? 0 : 1;
      flip_bit(path, byte, bit);
    }
  EXPECT_GT(seen, 500);
  for (size_t length = 0; length < bytes.size(); ++length) {
    write_file(path, bytes.substr(0, length));
    EXPECT_FALSE(try_reading()) << length;
  }
}

TEST(Safetensors, AFolderIsOneFileOrAnIndexOfShards) {
  const TempDirectory folder;
  const std::vector<float> values = {1.0f, 2.0f};
  EXPECT_NE(user_error_of([&] { SafetensorsFolder model(folder.path()); }).find("holds neither"), std::string::npos);
  const auto put = [&](const std::string& file, const std::vector<std::string>& names) {
    std::vector<NamedSafeTensor> tensors;
    tensors.reserve(names.size());
    for (const std::string& name : names) tensors.push_back({name, tensor_of(SafeDType::kF32, {2}, values)});
    write_safetensors(folder / file, tensors, {});
  };
  put("model.safetensors", {"x"});
  EXPECT_EQ(SafetensorsFolder(folder.path()).names(), std::vector<std::string>{"x"});

  put("1.safetensors", {"a", "b"});
  put("2.safetensors", {"c"});
  const std::string index = folder / "model.safetensors.index.json";
  const auto error_with = [&](const std::string& text) {
    write_file(index, text);
    return user_error_of([&] { SafetensorsFolder model(folder.path()); });
  };
  write_file(index, R"({"weight_map":{"a":"1.safetensors","b":"1.safetensors","c":"2.safetensors"}})");
  const SafetensorsFolder model(folder.path());
  EXPECT_EQ(model.names(), (std::vector<std::string>{"a", "b", "c"}));
  ASSERT_NE(model.find("c"), nullptr);
  EXPECT_EQ(floats_of(*model.find("c")), values);
  EXPECT_EQ(model.find("d"), nullptr);
  EXPECT_NE(error_with("{}").find("weight_map"), std::string::npos);
  EXPECT_NE(error_with("nonsense").find("not valid JSON"), std::string::npos);
  EXPECT_NE(error_with(R"({"weight_map":{"a":"../1.safetensors"}})").find("no file of this folder"), std::string::npos);
  EXPECT_NE(error_with(R"({"weight_map":{"a":"3.safetensors"}})").find("3.safetensors: No such file"),
            std::string::npos);
  EXPECT_NE(
      error_with(R"({"weight_map":{"a":"1.safetensors","z":"2.safetensors"}})").find("'z' is not in 2.safetensors"),
      std::string::npos);
  put("3.safetensors", {"a"});
  EXPECT_NE(
      error_with(R"({"weight_map":{"a":"1.safetensors","b":"3.safetensors"}})").find("stands in another file too"),
      std::string::npos);
}

TEST(Safetensors, AFailedWriteLeavesTheOldFile) {
  const TempDirectory folder;
  const std::vector<float> values = {1.0f};
  const std::vector<NamedSafeTensor> tensors = {{"x", tensor_of(SafeDType::kF32, {1}, values)}};
  write_file(folder / "a", "old");
  for (int operation = 1; operation <= 6; ++operation) {
    inject_file_fault(FileFault::kFail, operation);
    EXPECT_NE(user_error_of([&] { write_safetensors(folder / "a", tensors, {}); }).find("No space left on device"),
              std::string::npos);
    EXPECT_EQ(read_file(folder / "a"), "old");
    EXPECT_EQ(list_directory(folder.path()), std::vector<std::string>{"a"});
  }
  inject_file_fault(FileFault::kNone);
  write_safetensors(folder / "a", tensors, {});
  EXPECT_EQ(SafetensorsFile(folder / "a").tensors().size(), 1u);
}

}  // namespace
}  // namespace palimpsest
