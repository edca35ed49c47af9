// The golden public models, whole and changed, for tests of imports and exports.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "data/safetensors.h"
#include "kernels/check.h"
#include "tests/support/files.h"

namespace palimpsest::hf_test {

inline std::string golden(const std::string& name) {
  return std::string(PALIMPSEST_SOURCE_DIR) + "/tests/golden/models/" + name;
}

inline std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const UserError& error) {
    return error.what();
  }
  return {};
}

inline void expect_equal_tensors(const std::string& got, const std::string& expected) {
  const SafetensorsFolder a(got), b(expected);
  ASSERT_EQ(a.names(), b.names());
  for (const std::string& name : b.names()) {
    const SafeTensor &x = *a.find(name), &y = *b.find(name);
    EXPECT_EQ(x.dtype, y.dtype) << name;
    EXPECT_EQ(x.shape, y.shape) << name;
    EXPECT_TRUE(std::equal(x.bytes.begin(), x.bytes.end(), y.bytes.begin(), y.bytes.end())) << name;
  }
}

inline std::string changed_config(const std::string& name, const std::function<void(nlohmann::json&)>& change) {
  nlohmann::json json = nlohmann::json::parse(support::read_file(golden(name) + "/config.json"));
  change(json);
  return json.dump();
}

}  // namespace palimpsest::hf_test
