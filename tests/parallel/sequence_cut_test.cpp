#include "parallel/sequence_cut.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "kernels/random.h"

namespace palimpsest {
namespace {

using Ids = std::vector<int64_t>;
constexpr auto kContiguous = SequenceLayout::kContiguous, kZigzag = SequenceLayout::kZigzag;

TEST(SequenceCut, EvenRangesDifferByOneTokenAtMost) {
  const SequenceCut cut = SequenceCut::even(2, 7, 3, kContiguous);
  EXPECT_EQ(cut.tokens_of(0), (Ids{0, 1, 2, 7, 8, 9}));
  EXPECT_EQ(cut.tokens_of(1), (Ids{3, 4, 10, 11}));
  EXPECT_EQ(cut.tokens_of(2), (Ids{5, 6, 12, 13}));
  EXPECT_EQ(cut.max_tokens(), 6);
  EXPECT_EQ(cut.num_tokens(2), 4);
}

TEST(SequenceCut, ZigzagPairsEarlyRangesWithLateOnes) {
  const SequenceCut cut = SequenceCut::even(1, 9, 2, kZigzag);  // lengths 3, 2, 2, 2
  EXPECT_EQ(cut.tokens_of(0), (Ids{0, 1, 2, 7, 8}));
  EXPECT_EQ(cut.tokens_of(1), (Ids{3, 4, 5, 6}));
}

TEST(SequenceCut, OneRankHasEverything) {
  for (const SequenceLayout layout : {kContiguous, kZigzag}) {
    const SequenceCut cut = SequenceCut::even(2, 5, 1, layout);
    EXPECT_EQ(cut.tokens_of(0), (Ids{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  }
}

TEST(SequenceCut, ADocumentKnowsItsEarlierAndLaterPieces) {
  // Two rows of 8 on two zig-zag ranks: rank 0 has tokens 0 1 6 7 of each, rank 1 has 2 3 4 5.
  const SequenceCut cut = SequenceCut::even(2, 8, 2, kZigzag);
  const Documents whole({0, 1, 8, 11, 16});
  const auto [documents, crossings] = cut.part_of(1, whole);
  EXPECT_EQ(documents.offsets(), (Ids{0, 2, 4, 5, 6, 8}));
  EXPECT_EQ(documents.num_states(), 4);
  ASSERT_EQ(crossings.entering.size(), 4U);
  ASSERT_EQ(crossings.leaving.size(), 4U);
  EXPECT_TRUE(crossings.cut());
  EXPECT_EQ(crossings.num_ranks, 2);
  EXPECT_EQ(crossings.num_slots, 4);
  // The second document of the first row: piece 1 of rank 0, then 2 3 and 4 5 here, then 6 7 on rank 0.
  const Crossing& second = crossings.entering[1];
  EXPECT_EQ(second.document, 1);
  EXPECT_EQ(second.own.slot, 1);
  EXPECT_EQ(second.own.first, 2);
  ASSERT_EQ(second.others.size(), 2U);
  EXPECT_EQ(second.others[0].rank, 0);
  EXPECT_EQ(second.others[0].slot, 0);
  EXPECT_EQ(second.others[0].first, 1);
  EXPECT_EQ(second.others[0].length, 1);
  EXPECT_EQ(second.others[1].rank, 1);
  EXPECT_EQ(second.others[1].first, 0);
  EXPECT_EQ(second.others[1].length, 2);
  ASSERT_EQ(crossings.leaving[1].others.size(), 1U);
  EXPECT_EQ(crossings.leaving[1].others[0].rank, 0);
  EXPECT_EQ(crossings.leaving[1].others[0].first, 2);
  EXPECT_EQ(crossings.slot_of_all(crossings.leaving[1].others[0]), 1);
  EXPECT_EQ(crossings.slot_of_all(second.others[1]), 4);
  // The second row: its first document ends inside range 1, whose other token begins the second.
  EXPECT_EQ(documents.entering(2), 2);
  EXPECT_EQ(documents.leaving(2), -1);
  EXPECT_EQ(documents.entering(3), -1);
  EXPECT_EQ(documents.leaving(3), 2);
}

TEST(SequenceCut, RefusesWhatDoesNotFit) {
  EXPECT_THROW(SequenceCut(1, {0, 3, 6, 9}, kZigzag), Error);
  EXPECT_THROW(SequenceCut(1, {0, 3, 2}, kContiguous), Error);
  EXPECT_THROW(SequenceCut(1, {1, 3}, kContiguous), Error);
  const SequenceCut cut = SequenceCut::even(2, 4, 2, kContiguous);
  EXPECT_THROW(cut.part_of(0, Documents({0, 4})), Error);
  EXPECT_THROW(cut.part_of(0, Documents({0, 5, 8})), Error);
}

// Against a walk over the tokens of all ranks: every cut, documents of all lengths, empty ranges and documents.
TEST(SequenceCut, EveryRanksPartAgreesWithAWalkOverTheTokens) {
  auto draw = [index = uint64_t{0}](int64_t below) mutable {
    return static_cast<int64_t>(random_bits(3, hash_of("cuts"), index++) % static_cast<uint64_t>(below));
  };
  for (int trial = 0; trial < 300; ++trial) {
    const SequenceLayout layout = trial % 2 == 0 ? kContiguous : kZigzag;
    const int64_t ranks = 1 + draw(5), ranges = ranks * (layout == kZigzag ? 2 : 1), rows = 1 + draw(3);
    Ids borders = {0};
    for (int64_t range = 0; range < ranges; ++range) borders.push_back(borders.back() + draw(6));
    const int64_t T = borders.back();
    if (T == 0) continue;
    Ids offsets;
    for (int64_t row = 0; row < rows; ++row) {
      offsets.push_back(row * T);
      for (int64_t begin = draw(4); begin < T; begin += draw(7)) offsets.push_back(row * T + begin);
    }
    offsets.push_back(rows * T);
    const Documents whole(offsets);
    const SequenceCut cut(rows, borders, layout);
    // Where each token of the batch is: rank, place there, range.
    struct Place {
      int64_t rank, local, range;
    };
    std::map<int64_t, Place> places;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const Ids tokens = cut.tokens_of(rank);
      EXPECT_EQ(static_cast<int64_t>(tokens.size()), cut.num_tokens(rank));
      EXPECT_TRUE(std::is_sorted(tokens.begin(), tokens.end()));
      for (size_t i = 0; i < tokens.size(); ++i) {
        int64_t range = 0;
        while (borders[range + 1] <= tokens[i] % T) ++range;
        EXPECT_EQ(rank, range < ranks ? range : 2 * ranks - 1 - range);
        EXPECT_TRUE(places.emplace(tokens[i], Place{rank, static_cast<int64_t>(i), range}).second);
      }
    }
    ASSERT_EQ(static_cast<int64_t>(places.size()), rows * T);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const SequenceCut::Part part = cut.part_of(rank, whole);
      const Documents& documents = part.documents;
      const Crossings& crossings = part.crossings;
      const Ids tokens = cut.tokens_of(rank);
      ASSERT_EQ(documents.num_tokens(), static_cast<int64_t>(tokens.size()));
      size_t num_entering = 0, num_leaving = 0;
      for (int64_t i = 0; i < documents.count(); ++i) {
        ASSERT_GT(documents.length(i), 0);
        const int64_t first = tokens[documents.begin(i)], last = tokens[documents.end(i) - 1];
        EXPECT_EQ(last - first + 1, documents.length(i));
        int64_t document = 0;
        while (whole.end(document) <= first) ++document;
        EXPECT_LT(last, whole.end(document));
        const bool began_earlier = whole.begin(document) < first, goes_on = last + 1 < whole.end(document);
        EXPECT_EQ(documents.entering(i) >= 0, began_earlier);
        EXPECT_EQ(documents.leaving(i) >= 0, goes_on);
        // The tokens of the pieces on each side are those of the document there, each where the piece says.
        const auto check = [&](const Crossing& crossing, int64_t from, int64_t to, int64_t state) {
          EXPECT_EQ(crossing.document, i);
          EXPECT_EQ(crossing.own.first, documents.begin(i));
          EXPECT_EQ(crossing.own.length, documents.length(i));
          EXPECT_EQ(crossing.own.slot, state);
          for (const DocumentPiece& piece : crossing.others) {
            ASSERT_GT(piece.length, 0);
            for (int64_t t = 0; t < piece.length; ++t, ++from) {
              EXPECT_EQ(places.at(from).rank, piece.rank);
              EXPECT_EQ(places.at(from).local, piece.first + t);
              EXPECT_EQ(places.at(from).range, places.at(from - t).range);
            }
            const int64_t of_row = layout == kZigzag ? 2 : 1;
            EXPECT_EQ(piece.slot, (from - 1) / T * of_row + (places.at(from - 1).range >= ranks ? 1 : 0));
          }
          EXPECT_EQ(from, to);
        };
        if (began_earlier)
          check(crossings.entering.at(num_entering++), whole.begin(document), first, documents.entering(i));
        if (goes_on) check(crossings.leaving.at(num_leaving++), last + 1, whole.end(document), documents.leaving(i));
      }
      EXPECT_EQ(num_entering, crossings.entering.size());
      EXPECT_EQ(num_leaving, crossings.leaving.size());
    }
  }
}

TEST(SequenceCut, WhatOneRankSeesIsWhatTheOtherShows) {
  for (const SequenceLayout layout : {kContiguous, kZigzag})
    for (const std::vector<int64_t>& offsets :
         {Ids{0, 37, 74}, Ids{0, 1, 9, 9, 37, 38, 60, 74}, Ids{0, 5, 10, 15, 20, 25, 30, 37, 70, 74}}) {
      const SequenceCut cut = SequenceCut::even(2, 37, 4, layout);
      const Documents whole(offsets);
      std::vector<SequenceCut::Part> parts;
      for (int64_t rank = 0; rank < 4; ++rank) parts.push_back(cut.part_of(rank, whole));
      for (int64_t reader = 0; reader < 4; ++reader) {
        // What the tokens see elsewhere, counted by hand: every earlier token of the document in another range.
        std::vector<std::vector<int64_t>> places;
        for (int64_t rank = 0; rank < 4; ++rank) places.push_back(cut.tokens_of(rank));
        std::vector<std::pair<int64_t, int64_t>> expected, got;  // query, key: places in the batch
        for (const Crossing& crossing : parts[reader].crossings.entering)
          for (int64_t i = 0; i < crossing.own.length; ++i) {
            const int64_t query = places[reader][crossing.own.first + i];
            const int64_t own_begin = places[reader][crossing.own.first];
            const int64_t begin = *(std::upper_bound(offsets.begin(), offsets.end(), query) - 1);
            for (int64_t key = begin; key < own_begin; ++key) expected.emplace_back(query, key);
          }
        for (int64_t other = 0; other < 4; ++other) {
          const std::vector<SeenPiece> seen = parts[reader].crossings.seen_on[other];
          const std::vector<DocumentPiece> shown = parts[other].crossings.shown_to[reader];
          ASSERT_EQ(seen.size(), shown.size());
          for (size_t i = 0; i < seen.size(); ++i) {
            EXPECT_EQ(seen[i].piece.first, shown[i].first);
            EXPECT_EQ(seen[i].piece.length, shown[i].length);
            for (int64_t query = 0; query < seen[i].num_queries; ++query)
              for (int64_t key = 0; key < seen[i].piece.length; ++key)
                got.emplace_back(places[reader][seen[i].first_query + query], places[other][seen[i].piece.first + key]);
          }
        }
        std::sort(expected.begin(), expected.end());
        std::sort(got.begin(), got.end());
        EXPECT_EQ(got, expected);
      }
    }
}

}  // namespace
}  // namespace palimpsest
