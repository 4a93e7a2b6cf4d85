// Packing: every document is whole and in one sample, whoever asks.
#include "data/packing.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>

#include "data/batches.h"
#include "data/folders.h"

namespace fsdp::data {
namespace {

using test::contains;
using test::error_of;

// Token i is i. A token counts if it isn't a multiple of 3.
class Listed : public TokenSource {
 public:
  explicit Listed(const std::vector<int64_t>& lengths) {
    for (int64_t length : lengths) {
      starts_.push_back(tokens_);
      tokens_ += length;
    }
  }
  int64_t tokens() const override { return tokens_; }
  void read(int64_t first, int64_t count, int64_t* ids) const override {
    for (int64_t i = 0; i < count; ++i) ids[i] = first + i;
  }
  void read_mask(int64_t first, int64_t count, uint8_t* counts) const override {
    for (int64_t i = 0; i < count; ++i) counts[i] = (first + i) % 3 != 0;
  }
  bool has_mask() const override { return true; }
  std::vector<int64_t> document_starts(int64_t first, int64_t count) const override {
    return {std::lower_bound(starts_.begin(), starts_.end(), first),
            std::lower_bound(starts_.begin(), starts_.end(), first + count)};
  }
  bool lists_documents() const override { return lists; }
  std::string where(int64_t token) const override { return std::to_string(token); }
  SourceInfo info() const override { return {.pairs = pairs}; }

  bool lists = true, pairs = false;

 private:
  std::vector<int64_t> starts_;
  int64_t tokens_ = 0;
};

// Of 1 to 40 tokens, the same every time.
std::vector<int64_t> many_lengths(int64_t count) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < count; ++i) lengths.push_back(1 + i * 7919 % 40);
  return lengths;
}

TEST(Packing, HasEachDocumentOnceAndWhole) {
  const Listed source(many_lengths(500));
  const Packing packing(source, 64);
  std::map<int64_t, int64_t> seen;  // tokens by the first
  int64_t before = -1;
  for (int64_t sample = 0; sample < packing.samples(); ++sample) {
    const auto documents = packing.documents(sample);
    int64_t places = 0;
    for (const PackedDocument& document : documents) {
      EXPECT_TRUE(seen.emplace(document.first, document.tokens).second);
      places += document.tokens - 1;
    }
    EXPECT_LE(places, 64);
    EXPECT_LE(static_cast<int64_t>(documents.size()) + (places < 64 ? 1 : 0), packing.most());
    EXPECT_GT(documents.front().first, before);  // samples are in the order of the source
    before = documents.front().first;
  }
  int64_t first = 0, whole = 0;
  for (int64_t length : many_lengths(500)) {
    if (length > 1) {
      EXPECT_EQ(seen[first], length) << first;
    }
    whole += length > 1 ? 1 : 0;
    first += length;
  }
  EXPECT_EQ(static_cast<int64_t>(seen.size()), whole);  // one token alone has no target
  EXPECT_LT(packing.padding(), 0.02);
}

TEST(Packing, FillsSamplesBestAndSaysWhatIsLost) {
  const Listed source({5, 4, 3, 12, 2});  // places: 4, 3, 2, 11, 1
  const Packing packing(source, 6);
  ASSERT_EQ(packing.samples(), 3);
  auto firsts = [&](int64_t sample) {
    std::vector<int64_t> all;
    for (const PackedDocument& document : packing.documents(sample)) all.push_back(document.first);
    return all;
  };
  EXPECT_EQ(firsts(0), (std::vector<int64_t>{0, 9}));   // 4 + 2
  EXPECT_EQ(firsts(1), (std::vector<int64_t>{5, 24}));  // 3 + 1, and padding
  EXPECT_EQ(firsts(2), (std::vector<int64_t>{12}));     // 6 of 11
  EXPECT_EQ(packing.most(), 3);
  EXPECT_EQ(packing.summary(),
            "5 examples in 3 samples, 11.1 % padding; 1 longer than data.seq loses the end, 5 "
            "tokens");
  EXPECT_NEAR(packing.usual_length(), (16 + 9 + 4 + 36 + 1) / 16.0, 1e-12);
}

TEST(Packing, PutsFewShortDocumentsTogether) {
  const Listed source(std::vector<int64_t>(200, 3));
  EXPECT_EQ(Packing(source, 64).most(), 17);  // and padding
  EXPECT_EQ(Packing(source, 1024).most(), 33);
  EXPECT_EQ(Packing(source, 64).samples(), 13);
}

TEST(Packing, KeepsPairsTogetherAndLeavesLongOnesOut) {
  Listed source({3, 2, 4, 5, 2, 2, 1, 3});  // places: 3, 7, 2; a pair without an answer
  source.pairs = true;
  const Packing packing(source, 6);
  ASSERT_EQ(packing.samples(), 1);
  std::vector<int64_t> firsts;
  for (const PackedDocument& document : packing.documents(0)) firsts.push_back(document.first);
  EXPECT_EQ(firsts, (std::vector<int64_t>{0, 3, 14, 16}));
  EXPECT_EQ(packing.most(), 6);  // padding is a fifth document
  EXPECT_EQ(packing.summary(),
            "2 pairs in 1 samples, 16.7 % padding; 1 longer than data.seq is left out");
}

TEST(Packing, NeedsAListOfDocuments) {
  Listed source({5, 5});
  source.lists = false;
  EXPECT_TRUE(contains(error_of([&] { Packing(source, 6); }), "data.packing"));
  EXPECT_TRUE(contains(error_of([&] { Packing(Listed({1, 1}), 6); }), "no document of two tokens"));
}

BatchOptions packed(const std::shared_ptr<TokenSource>& source, int64_t seq) {
  BatchOptions options{.seq = seq, .batch = 6, .seed = 3, .prefetch = 1};
  options.packing = std::make_shared<Packing>(*source, seq);
  return options;
}

TEST(PackedBatches, HaveInputsTargetsAndNumbersOfWholeDocuments) {
  auto source = std::make_shared<Listed>(std::vector<int64_t>{5, 4, 2});
  BatchOptions options = packed(source, 6);
  options.shuffle = false;
  options.batch = 2;
  const Batch batch = Batches(source, options).next();
  EXPECT_TRUE(at::equal(batch.ids, at::tensor({0, 1, 2, 3, 9, 0, 5, 6, 7, 0, 0, 0}).view({2, 6})));
  EXPECT_TRUE(
      at::equal(batch.targets,
                at::tensor({1, 2, -100, 4, 10, -100, -100, 7, 8, -100, -100, -100}).view({2, 6})));
  EXPECT_TRUE(
      at::equal(batch.documents, at::tensor({0, 0, 0, 0, 1, 2, 0, 0, 0, 1, 1, 1}).view({2, 6})));
  EXPECT_EQ(batch.tokens, 6);
  EXPECT_EQ(batch.room, 3);
}

TEST(PackedBatches, OfPairsCountThoseWithTwoAnswers) {
  auto source = std::make_shared<Listed>(std::vector<int64_t>{3, 2, 2, 4});
  source->pairs = true;
  const Batch batch = Batches(source, packed(source, 12)).next();
  // The second document of the first pair is tokens 3 and 4; the first of the other 5 and 6, and 6
  // doesn't count.
  EXPECT_EQ(batch.tokens, 6);  // one pair in each of six samples
}

// All rows of some batches, over all ranks in order.
at::Tensor rows_of(const std::shared_ptr<TokenSource>& source, BatchOptions options, int world,
                   int64_t position) {
  std::vector<at::Tensor> rows;
  std::vector<std::unique_ptr<Batches>> ranks;
  for (int rank = 0; rank < world; ++rank) {
    options.rank = rank;
    options.world = world;
    options.position = position;
    ranks.push_back(std::make_unique<Batches>(source, options));
  }
  for (int64_t at = position; at < 60; at += options.batch)
    for (auto& rank : ranks) {
      const Batch batch = rank->next();
      rows.push_back(at::cat({batch.ids, batch.targets, batch.documents}, 1));
    }
  return at::cat(rows);
}

TEST(PackedBatches, AreTheSameAtEveryWorldSizeAndFromAnyPosition) {
  auto source = std::make_shared<Listed>(many_lengths(60));  // more than one epoch
  const BatchOptions options = packed(source, 50);
  const at::Tensor whole = rows_of(source, options, 1, 0);
  for (int world : {2, 3}) EXPECT_TRUE(at::equal(rows_of(source, options, world, 0), whole));
  EXPECT_TRUE(at::equal(rows_of(source, options, 2, 18), whole.slice(0, 18)));
}

}  // namespace
}  // namespace fsdp::data
