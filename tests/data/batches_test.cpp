// Batches: the stream of samples is the same at every world size, from any position, and with any
// number of batches loaded ahead.
#include "data/batches.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "data/folders.h"

namespace fsdp::data {
namespace {

using test::contains;
using test::error_of;

// Token i is i % vocab. By its index, a document begins at each multiple of 50.
class Counting : public TokenSource {
 public:
  explicit Counting(int64_t tokens, int64_t vocab = 1'000'000) : tokens_(tokens), vocab_(vocab) {}
  int64_t tokens() const override { return tokens_; }
  void read(int64_t first, int64_t count, int64_t* ids) const override {
    if (first < 0 || first + count > tokens_) throw std::logic_error("read beyond the end");
    if (fail_at >= first && fail_at < first + count)
      throw Error("the disk is gone.", "get another.");
    for (int64_t i = 0; i < count; ++i) ids[i] = (first + i) % vocab_;
  }
  void read_mask(int64_t first, int64_t count, uint8_t* counts) const override {
    for (int64_t i = 0; i < count; ++i) counts[i] = !masked || (first + i) % 3 == 0;
  }
  bool has_mask() const override { return masked; }
  std::vector<int64_t> document_starts(int64_t first, int64_t count) const override {
    std::vector<int64_t> starts;
    for (int64_t i = first; indexed && i < first + count; ++i) {
      if (i % 50 == 0) starts.push_back(i);
    }
    return starts;
  }
  std::string where(int64_t token) const override {
    return "counting: token " + std::to_string(token);
  }
  SourceInfo info() const override { return {}; }

  bool masked = false, indexed = false;
  int64_t fail_at = -1;

 private:
  int64_t tokens_, vocab_;
};

BatchOptions options(int64_t seq, int64_t batch) {
  BatchOptions result;
  result.seq = seq;
  result.batch = batch;
  result.seed = 11;
  return result;
}

// The samples of the next batch, over all ranks in order.
std::vector<int64_t> samples_of(std::vector<std::unique_ptr<Batches>>& ranks, int64_t seq) {
  std::vector<int64_t> samples;
  for (auto& rank : ranks) {
    Batch batch = rank->next();
    for (int64_t row = 0; row < batch.samples; ++row) {
      int64_t first = batch.ids[row][0].item<int64_t>();
      EXPECT_EQ(first % seq, 0);
      EXPECT_TRUE(at::equal(batch.ids[row], at::arange(first, first + seq)));
      EXPECT_TRUE(at::equal(batch.targets[row], at::arange(first + 1, first + seq + 1)));
      samples.push_back(first / seq);
    }
  }
  return samples;
}

std::vector<std::unique_ptr<Batches>> world(int size, const std::shared_ptr<TokenSource>& source,
                                            BatchOptions chosen) {
  std::vector<std::unique_ptr<Batches>> ranks;
  for (int rank = 0; rank < size; ++rank) {
    chosen.rank = rank;
    chosen.world = size;
    ranks.push_back(std::make_unique<Batches>(source, chosen));
  }
  return ranks;
}

TEST(Batches, TheOrderIsTheSameAtEveryWorldSizeAndEachSampleComesOnceAnEpoch) {
  auto source = std::make_shared<Counting>(8 * 100 + 5);  // 100 samples: 8 batches and a third
  std::vector<int64_t> reference;
  for (int size : {1, 2, 3, 4, 6, 12}) {
    auto ranks = world(size, source, options(8, 12));
    EXPECT_EQ(ranks[0]->samples_per_epoch(), 100);
    std::vector<int64_t> stream;
    for (int step = 0; step < 25; ++step) {  // three epochs
      auto samples = samples_of(ranks, 8);
      ASSERT_EQ(samples.size(), 12u);
      stream.insert(stream.end(), samples.begin(), samples.end());
    }
    EXPECT_EQ(ranks[0]->position(), 300);
    if (reference.empty()) reference = stream;
    EXPECT_EQ(stream, reference) << size;
  }
  for (int epoch = 0; epoch < 3; ++epoch) {
    std::set<int64_t> seen(reference.begin() + epoch * 100, reference.begin() + (epoch + 1) * 100);
    EXPECT_EQ(seen.size(), 100u);
    EXPECT_EQ(*seen.rbegin(), 99);
  }
  EXPECT_NE(std::vector(reference.begin(), reference.begin() + 100),
            std::vector(reference.begin() + 100, reference.begin() + 200));
}

TEST(Batches, AResumedStreamGoesOnAtTheNextSampleAtAnyWorldSize) {
  auto source = std::make_shared<Counting>(4 * 50 + 1);
  auto whole = world(1, source, options(4, 6));
  std::vector<int64_t> stream;
  for (int step = 0; step < 20; ++step) {
    for (int64_t sample : samples_of(whole, 4)) stream.push_back(sample);
  }
  for (int stop : {1, 7, 8, 9, 13}) {
    for (int size : {1, 2, 3}) {
      auto resumed_options = options(4, 6);
      resumed_options.position = stop * 6;
      resumed_options.prefetch = size - 1;
      auto resumed = world(size, source, resumed_options);
      EXPECT_EQ(samples_of(resumed, 4),
                std::vector(stream.begin() + stop * 6, stream.begin() + stop * 6 + 6));
      EXPECT_EQ(resumed[0]->position(), stop * 6 + 6);
    }
  }
}

TEST(Batches, OfASplitShareNoTargetAtAnyWorldSize) {
  auto source = std::make_shared<Counting>(8 * 200 + 3);
  Split split = split_samples(200, 0.1);
  auto targets_of = [&](const SampleSet& set, int size) {
    auto chosen = options(8, 12);
    chosen.samples = set;
    chosen.repeat = false;
    auto ranks = world(size, source, chosen);
    EXPECT_EQ(ranks[0]->samples_per_epoch(), set.size());
    std::multiset<int64_t> targets;
    for (int64_t done = 0; done < set.size(); done += 12)
      for (auto& rank : ranks) {
        Batch batch = rank->next();
        for (int64_t row = 0; row < batch.samples; ++row)
          for (int64_t i = 0; i < 8; ++i) targets.insert(batch.targets[row][i].item<int64_t>());
      }
    return targets;
  };
  auto training = targets_of(split.training, 1), validation = targets_of(split.validation, 1);
  EXPECT_EQ(training, targets_of(split.training, 3));
  EXPECT_EQ(validation, targets_of(split.validation, 2));
  EXPECT_EQ(validation.size(), 20u * 8);
  std::set<int64_t> all(training.begin(), training.end());
  EXPECT_EQ(all.size(), 180u * 8);
  for (int64_t target : validation) EXPECT_TRUE(all.insert(target).second) << target;
  EXPECT_EQ(*all.begin(), 1);
  EXPECT_EQ(*all.rbegin(), 200 * 8);
}

TEST(Batches, WithoutShufflingSamplesComeInOrderAndTheLastBatchIsShort) {
  auto source = std::make_shared<Counting>(4 * 10 + 3);
  for (int64_t prefetch : {0, 3}) {
    auto chosen = options(4, 4);
    chosen.shuffle = false;
    chosen.repeat = false;
    chosen.prefetch = prefetch;
    auto ranks = world(2, source, chosen);
    EXPECT_EQ(samples_of(ranks, 4), (std::vector<int64_t>{0, 1, 2, 3}));
    EXPECT_EQ(samples_of(ranks, 4), (std::vector<int64_t>{4, 5, 6, 7}));
    for (auto& rank : ranks) {
      Batch last = rank->next();
      EXPECT_EQ(last.all_samples, 2);
      EXPECT_EQ(last.samples, 1);
      EXPECT_EQ(last.tokens, 4);
      EXPECT_EQ(last.ids.sizes(), (std::vector<int64_t>{2, 4}));
      EXPECT_TRUE(last.targets[1].eq(-100).all().item<bool>());
      for (int i = 0; i < 2; ++i) {  // also when asked again
        Batch end = rank->next();
        EXPECT_EQ(end.all_samples, 0);
        EXPECT_EQ(end.tokens, 0);
        EXPECT_TRUE(end.targets.eq(-100).all().item<bool>());
      }
      EXPECT_EQ(rank->position(), 10);
    }
  }
}

TEST(Batches, ABatchMayBeLargerThanAnEpoch) {
  auto chosen = options(4, 8);
  Batches batches(std::make_shared<Counting>(4 * 3 + 1), chosen);
  std::map<int64_t, int> seen;
  for (int step = 0; step < 3; ++step) {
    Batch batch = batches.next();
    for (int64_t row = 0; row < 8; ++row) ++seen[batch.ids[row][0].item<int64_t>()];
  }
  EXPECT_EQ(seen, (std::map<int64_t, int>{{0, 8}, {4, 8}, {8, 8}}));
}

TEST(Batches, MaskedTokensAreNoTargets) {
  auto source = std::make_shared<Counting>(100);
  source->masked = true;
  auto chosen = options(9, 1);
  chosen.shuffle = false;
  Batch batch = Batches(source, chosen).next();
  EXPECT_EQ(batch.tokens, 3);
  std::vector<int64_t> expected = {-100, -100, 3, -100, -100, 6, -100, -100, 9};
  EXPECT_TRUE(at::equal(batch.targets[0], at::tensor(expected)));
  EXPECT_FALSE(batch.documents.defined());
}

TEST(Batches, DocumentsAreCountedAfterTheirEndAndByTheIndex) {
  auto source = std::make_shared<Counting>(1000, 10);  // token 7 at 7, 17, ...
  auto chosen = options(20, 1);
  chosen.shuffle = false;
  chosen.document_mask = true;
  chosen.eos = 7;
  Batch batch = Batches(source, chosen).next();
  std::vector<int64_t> expected = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2};
  EXPECT_TRUE(at::equal(batch.documents[0], at::tensor(expected)));
  EXPECT_EQ(batch.room, 8);

  source->indexed = true;  // and one begins at 50, in sample 2: tokens 40 to 59
  chosen.position = 2;
  batch = Batches(source, chosen).next();
  expected = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3};
  EXPECT_TRUE(at::equal(batch.documents[0], at::tensor(expected)));

  chosen.eos = 9;  // 49 ends and 50 begins the same document
  batch = Batches(source, chosen).next();
  expected = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  EXPECT_TRUE(at::equal(batch.documents[0], at::tensor(expected)));
}

// Batches with other documents have the same shape where that is possible.
TEST(Batches, RoomForDocumentsIsTheSameUntilItIsTooLittle) {
  auto chosen = options(40, 1);
  chosen.shuffle = false;
  chosen.document_mask = true;
  for (auto [vocab, room] : {std::pair<int64_t, int64_t>{40, 8}, {6, 8}, {5, 16}, {1, 40}}) {
    chosen.eos = 0;
    Batch batch = Batches(std::make_shared<Counting>(1000, vocab), chosen).next();
    EXPECT_EQ(batch.room, room) << vocab;
  }
}

TEST(Batches, AnIdBeyondTheVocabularyIsNamedWithItsPlace) {
  for (int64_t prefetch : {0, 2}) {
    auto chosen = options(10, 2);
    chosen.shuffle = false;
    chosen.vocab = 35;
    chosen.prefetch = prefetch;
    Batches batches(std::make_shared<Counting>(101), chosen);
    batches.next();
    for (int i = 0; i < 2; ++i) {
      std::string error = error_of([&] { batches.next(); });
      EXPECT_TRUE(contains(error, "counting: token 35 has id 35") && contains(error, "HINT"))
          << error;
    }
  }
}

TEST(Batches, AFailureOfTheLoaderComesOutOfNext) {
  auto source = std::make_shared<Counting>(10 * 20 + 1);
  source->fail_at = 75;
  auto chosen = options(10, 2);
  chosen.shuffle = false;
  chosen.prefetch = 8;
  Batches batches(source, chosen);
  for (int i = 0; i < 3; ++i) batches.next();  // the tokens before 61
  EXPECT_TRUE(contains(error_of([&] { batches.next(); }), "the disk is gone"));
  EXPECT_EQ(batches.position(), 6);
}

TEST(Batches, EndWithoutBeingAsked) {
  for (int i = 0; i < 200; ++i) {
    auto chosen = options(4, 1);
    chosen.prefetch = 1 + i % 3;
    Batches batches(std::make_shared<Counting>(100), chosen);
    for (int step = 0; step < i % 5; ++step) batches.next();
    EXPECT_GE(batches.waited().count(), 0);
  }
}

TEST(Batches, ImpossibleOnesAreRefused) {
  auto source = std::make_shared<Counting>(100);
  auto error = [&](BatchOptions chosen) {
    return error_of([&] { Batches batches(source, chosen); });
  };
  auto three = options(4, 4);
  three.world = 3;
  EXPECT_TRUE(contains(error(three), "divided among 3 ranks"));
  EXPECT_TRUE(contains(error(options(100, 1)), "needs 101"));
  EXPECT_EQ(error(options(99, 1)), "");
  EXPECT_TRUE(contains(error(options(0, 1)), "can't have 1 samples of 0 tokens"));
  auto rank = options(4, 4);
  rank.rank = 1;
  EXPECT_TRUE(contains(error(rank), "rank 1 isn't in a world of 1"));
}

}  // namespace
}  // namespace fsdp::data
