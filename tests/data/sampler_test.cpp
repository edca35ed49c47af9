#include "data/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace palimpsest {
namespace {

std::vector<int64_t> order_of_epoch(const Sampler& sampler, int64_t rows, int64_t epoch) {
  std::vector<int64_t> order;
  for (int64_t i = 0; i < rows; ++i) {
    const Sample sample = sampler.at(epoch * rows + i);
    EXPECT_EQ(sample.epoch, epoch);
    EXPECT_EQ(sample.source, 0);
    order.push_back(sample.row);
  }
  return order;
}

bool is_permutation_of_all(std::vector<int64_t> order) {
  std::sort(order.begin(), order.end());
  for (size_t i = 0; i < order.size(); ++i)
    if (order[i] != static_cast<int64_t>(i)) return false;
  return true;
}

TEST(Sampler, EveryEpochIsAFullPermutationAndDiffersFromTheOthers) {
  const Sampler sampler({{1000}}, 7);
  std::vector<std::vector<int64_t>> orders;
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    orders.push_back(order_of_epoch(sampler, 1000, epoch));
    EXPECT_TRUE(is_permutation_of_all(orders.back())) << "epoch " << epoch;
  }
  EXPECT_NE(orders[0], orders[1]);
  EXPECT_NE(orders[1], orders[2]);
  EXPECT_NE(orders[0], orders[2]);
  EXPECT_EQ(order_of_epoch(Sampler({{1000}}, 7), 1000, 2), orders[2]);
  EXPECT_NE(order_of_epoch(Sampler({{1000}}, 8), 1000, 0), orders[0]);
}

TEST(Sampler, PermutesEverySize) {
  for (int64_t size = 1; size <= 70; ++size)
    EXPECT_TRUE(is_permutation_of_all(order_of_epoch(Sampler({{size}}, 3), size, 1))) << size;
  const int64_t large = int64_t{1} << 40;
  for (const int64_t index : {int64_t{0}, int64_t{12345}, large - 1}) {
    const int64_t at = permuted(index, large, 1, 2);
    EXPECT_TRUE(at >= 0 && at < large);
  }
}

TEST(Sampler, PlacesAreUniform) {
  // Where index 0 of 10 lands, over 20000 epochs: chi-squared with 9 degrees of freedom, 1 in 10^4 above 33.7.
  std::vector<double> counts(10);
  std::vector<double> pairs(100);  // where 0 and 1 land together
  const int64_t draws = 20000;
  for (int64_t stream = 0; stream < draws; ++stream) {
    const int64_t first = permuted(0, 10, 5, stream), second = permuted(1, 10, 5, stream);
    counts[first] += 1;
    pairs[first * 10 + second] += 1;
  }
  double chi_squared = 0.0;
  for (const double count : counts) chi_squared += std::pow(count - draws / 10.0, 2) / (draws / 10.0);
  EXPECT_LT(chi_squared, 33.7);
  double pair_chi_squared = 0.0;  // 89 degrees of freedom, 1 in 10^4 above 145
  for (int64_t i = 0; i < 100; ++i)
    if (i / 10 != i % 10) pair_chi_squared += std::pow(pairs[i] - draws / 90.0, 2) / (draws / 90.0);
  EXPECT_LT(pair_chi_squared, 145.0);
}

TEST(Sampler, MixesSourcesByWeight) {
  const std::vector<RowSource> sources = {{100, 3.0}, {1000, 1.0}, {7, 0.5}};
  const Sampler sampler(sources, 11);
  std::vector<int64_t> counts(3);
  std::vector<std::vector<int64_t>> rows(3);
  const int64_t draws = 10 * 4096;
  for (int64_t i = 0; i < draws; ++i) {
    const Sample sample = sampler.at(i);
    ++counts[sample.source];
    rows[sample.source].push_back(sample.epoch * sources[sample.source].num_rows + sample.row);
    // Within a period the shares are already met roughly: no source is bunched.
    if (i == 1000) {
      EXPECT_NEAR(static_cast<double>(counts[0]) / 1001, 3.0 / 4.5, 0.05);
    }
  }
  EXPECT_NEAR(static_cast<double>(counts[0]) / draws, 3.0 / 4.5, 1e-3);
  EXPECT_NEAR(static_cast<double>(counts[1]) / draws, 1.0 / 4.5, 1e-3);
  EXPECT_NEAR(static_cast<double>(counts[2]) / draws, 0.5 / 4.5, 1e-3);
  // Each source goes through its rows epoch by epoch: whole periods draw a range of (epoch, row) without repeats, and
  // every epoch but the last is complete.
  for (int64_t source = 0; source < 3; ++source) {
    const std::set<int64_t> distinct(rows[source].begin(), rows[source].end());
    EXPECT_EQ(distinct.size(), rows[source].size()) << "source " << source;
    const int64_t whole = counts[source] / sources[source].num_rows * sources[source].num_rows;
    EXPECT_EQ(*std::next(distinct.begin(), whole - 1), whole - 1) << "source " << source;
  }
}

TEST(Sampler, AWeightTooSmallForASlotStillGetsOne) {
  const Sampler sampler({{10, 1e-9}, {10, 1.0}}, 1);
  int64_t drawn = 0;
  for (int64_t i = 0; i < 4096; ++i) drawn += sampler.at(i).source == 0;
  EXPECT_EQ(drawn, 1);
}

TEST(SplitRange, UsesEveryItemOnceAndAllowsEmptyParts) {
  for (const auto& [total, parts] : {std::pair<int64_t, int64_t>{10042, 200}, {3, 4}, {0, 5}, {64, 8}}) {
    int64_t next = 0, least = total, most = 0;
    for (int64_t part = 0; part < parts; ++part) {
      const IndexRange range = split_range(total, parts, part);
      EXPECT_EQ(range.begin, next);
      next = range.end;
      least = std::min(least, range.size());
      most = std::max(most, range.size());
    }
    EXPECT_EQ(next, total);
    EXPECT_LE(most - least, 1);
  }
}

}  // namespace
}  // namespace palimpsest
