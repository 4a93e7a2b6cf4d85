// State in a file: a put entry is read back unchanged, in any order and with any number of buffers,
// and disk failures are reported.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <future>
#include <numeric>
#include <random>
#include <thread>

#include "disk/places.h"

namespace fsdp::disk {
namespace {

// Entries of three tensors with odd sizes.
std::vector<std::vector<int64_t>> odd_entries(int count) {
  std::vector<std::vector<int64_t>> entries;
  for (int i = 0; i < count; ++i) entries.push_back({60'001 + 7'777 * i, 4096, 1 + i});
  return entries;
}

// The expected contents of a store: the version of each entry that was put last.
class Oracle {
 public:
  explicit Oracle(std::vector<std::vector<int64_t>> entries)
      : entries_(std::move(entries)), versions_(entries_.size(), 0) {}

  bool same(int entry, std::span<char* const> tensors) const {
    const auto index = static_cast<size_t>(entry);
    if (tensors.size() != entries_[index].size()) return false;
    for (size_t t = 0; t < tensors.size(); ++t) {
      const auto expected = wanted(entry, t);
      if (std::memcmp(tensors[t], expected.data(), expected.size()) != 0) return false;
    }
    return true;
  }

  void renew(int entry, std::span<char* const> tensors) {
    ++versions_[static_cast<size_t>(entry)];
    for (size_t t = 0; t < tensors.size(); ++t) {
      const auto fresh = wanted(entry, t);
      std::memcpy(tensors[t], fresh.data(), fresh.size());
    }
  }

 private:
  std::vector<char> wanted(int entry, size_t tensor) const {
    const auto index = static_cast<size_t>(entry);
    if (versions_[index] == 0)
      return std::vector<char>(static_cast<size_t>(entries_[index][tensor]));
    return contents(entries_[index][tensor], index * 3 + tensor, versions_[index]);
  }

  std::vector<std::vector<int64_t>> entries_;
  std::vector<uint64_t> versions_;
};

class Store : public EveryWay {};
INSTANTIATE_TEST_SUITE_P(Disk, Store, testing::ValuesIn(kWays), way_name);

TEST_P(Store, UsesTheWayItWasAskedFor) {
  const StateStore store(directory.path, odd_entries(4), options());
  EXPECT_STREQ(store.engine(), GetParam().uring ? "io_uring" : "threads");
  EXPECT_LE(store.file().direct(), GetParam().direct);
}

TEST_P(Store, WhatWasPutComesBackBitForBitStepAfterStep) {
  const auto entries = odd_entries(13);
  for (const int buffers : {2, 3, 6, 20}) {
    StateStore store(directory.path, entries, options(buffers));
    Oracle oracle(entries);
    for (int step = 0; step < 4; ++step)
      for (int entry = 0; entry < 13; ++entry) {
        const auto tensors = store.get(entry);
        ASSERT_TRUE(oracle.same(entry, tensors)) << buffers << " buffers, entry " << entry;
        oracle.renew(entry, tensors);
        store.put(entry);
      }
  }
}

TEST_P(Store, AnyOrderWorksAndUnchangedEntriesStay) {
  const auto entries = odd_entries(9);
  StateStore store(directory.path, entries, options());
  Oracle oracle(entries);
  std::mt19937 random(7);
  for (int i = 0; i < 200; ++i) {
    const int entry = static_cast<int>(random() % entries.size());
    const auto tensors = store.get(entry);
    ASSERT_TRUE(oracle.same(entry, tensors)) << "get " << i << ", entry " << entry;
    const bool change = random() % 3 > 0;
    if (change) oracle.renew(entry, tensors);
    store.put(entry, change);
    if (random() % 16 == 0) store.flush();
  }
}

TEST_P(Store, FromTheSecondStepOnTheLearnedOrderIsReadAhead) {
  std::vector<int> order(12);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(3));
  StateStore store(directory.path, odd_entries(12), options(3));
  const auto step = [&] {
    for (const int entry : order) {
      store.get(entry);
      store.put(entry, /*changed=*/false);
    }
  };
  step();
  const auto first = store.counts();
  step();
  step();
  const auto later = store.counts();
  EXPECT_LT(first.ahead, 12);
  // All but the first get of the second step, which had no known predecessor.
  EXPECT_GE(later.ahead - first.ahead, 23);
}

TEST_P(Store, MemoryIsTheBuffersWhateverTheSizeOfTheState) {
  const StateStore store(directory.path, std::vector<std::vector<int64_t>>(50, {1 << 16, 1 << 16}),
                         options(3));
  EXPECT_EQ(store.bytes_in_memory(), 3 * (2 << 16));
  EXPECT_EQ(store.bytes_on_disk(), 50 * (2 << 16));
}

TEST_P(Store, ThreadsMayShareIt) {
  const int workers = 4, each = 5;
  const auto entries = odd_entries(workers * each);
  StateStore store(directory.path, entries, options(workers + 1));
  std::vector<std::future<bool>> done;
  for (int worker = 0; worker < workers; ++worker)
    done.push_back(std::async(std::launch::async, [&, worker] {
      Oracle oracle(entries);  // of this worker's entries
      bool right = true;
      for (int step = 0; step < 6; ++step)
        for (int i = 0; i < each; ++i) {
          const int entry = worker + i * workers;
          const auto tensors = store.get(entry);
          right &= oracle.same(entry, tensors);
          oracle.renew(entry, tensors);
          store.put(entry);
        }
      return right;
    }));
  for (auto& worker : done) EXPECT_TRUE(worker.get());
}

TEST_P(Store, HoldingMoreThanThereAreBuffersIsAnError) {
  StateStore store(directory.path, odd_entries(5), options(2));
  store.get(0);
  store.get(1);
  EXPECT_TRUE(holds(error_of([&] { store.get(2); }), "all 2 buffers"));
}

TEST_P(Store, GetAndPutComeInPairs) {
  StateStore one(directory.path, odd_entries(3), options());
  one.get(1);
  EXPECT_TRUE(holds(error_of([&] { one.get(1); }), "already held"));
  StateStore other(directory.path, odd_entries(3), options());
  EXPECT_TRUE(holds(error_of([&] { other.put(1); }), "not held"));
  StateStore third(directory.path, odd_entries(3), options());
  EXPECT_TRUE(holds(error_of([&] { third.get(3); }), "no entry 3"));
}

// --- failures ---

TEST_P(Store, ADescriptorThatIsClosedUnderneathIsAnErrorWithFileAndOffset) {
  StateStore store(directory.path, odd_entries(8), options());
  const int other = ::open("/dev/null", O_RDONLY);  // reads return nothing, writes fail
  ASSERT_EQ(::dup2(other, store.file().descriptor()), store.file().descriptor());
  ::close(other);
  const std::string said = error_of([&] {
    for (int entry = 0; entry < 8; ++entry) {
      store.get(entry);
      store.put(entry);
    }
    store.flush();
  });
  EXPECT_TRUE(holds(said, store.file().path())) << said;
  EXPECT_TRUE(holds(said, " bytes at ")) << said;
  EXPECT_TRUE(holds(said, "HINT")) << said;
}

TEST_P(Store, ATruncatedFileIsAnError) {
  StateStore store(directory.path, odd_entries(8), options(2));
  ASSERT_EQ(::ftruncate(store.file().descriptor(), store.file().bytes() / 2 + 100), 0);
  const std::string said = error_of([&] {
    for (int entry = 0; entry < 8; ++entry) {
      store.get(entry);
      store.put(entry, /*changed=*/false);
    }
  });
  EXPECT_TRUE(holds(said, "the file ends there")) << said;
}

TEST_P(Store, AReadErrorHasTheSystemsMessage) {
  const WithSeams broken(
      {.disk = [](const char* call, int64_t) { return std::string(call) == "read" ? EIO : 0; }});
  StateStore store(directory.path, odd_entries(8), options());
  const std::string said = error_of([&] { store.get(0); });
  EXPECT_TRUE(holds(said, "reading")) << said;
  EXPECT_TRUE(holds(said, std::generic_category().message(EIO))) << said;
}

TEST_P(Store, AFailedBackgroundWriteMakesEveryLaterCallThrow) {
  const WithSeams broken({.disk = [](const char* call, int64_t) {
    return std::string(call) == "write" ? ENOSPC : 0;
  }});
  StateStore store(directory.path, odd_entries(8), options());
  store.get(0);
  store.put(0);  // starts without an error
  const std::string said = error_of([&] { store.flush(); });
  EXPECT_TRUE(holds(said, "writing")) << said;
  EXPECT_TRUE(holds(said, std::generic_category().message(ENOSPC))) << said;
  EXPECT_EQ(error_of([&] { store.get(1); }), said);
  EXPECT_EQ(error_of([&] { store.put(1); }), said);
  EXPECT_EQ(error_of([&] { store.flush(); }), said);
}

TEST_P(Store, InterruptedCallsAreRetried) {
  static std::atomic<int> calls;
  calls = 0;
  const WithSeams signals({.disk = [](const char* call, int64_t) {
    return std::string(call) != "allocate" && ++calls % 3 != 0 ? EINTR : 0;
  }});
  const auto entries = odd_entries(6);
  StateStore store(directory.path, entries, options());
  Oracle oracle(entries);
  for (int i = 0; i < 12; ++i) {
    const auto tensors = store.get(i % 6);
    ASSERT_TRUE(oracle.same(i % 6, tensors));
    oracle.renew(i % 6, tensors);
    store.put(i % 6);
  }
}

TEST_P(Store, ADiskThatDoesNotAnswerIsAnErrorAfterTheLimit) {
  static std::promise<void> answer;
  answer = {};
  static std::shared_future<void> answered;
  answered = answer.get_future().share();
  const WithSeams silent({.disk = [](const char* call, int64_t) {
    if (std::string(call) == "read") answered.wait();
    return 0;
  }});
  auto chosen = options();
  chosen.engine.limit = std::chrono::milliseconds(20);
  StateStore store(directory.path, odd_entries(4), chosen);
  const std::string said = error_of([&] { store.get(0); });
  answer.set_value();  // before the store is destroyed, which waits for transfers in flight
  EXPECT_TRUE(holds(said, "no progress for")) << said;
}

TEST_P(Store, CanBeDestroyedWithTransfersInFlight) {
  for (int i = 0; i < 20; ++i) {
    StateStore store(directory.path, odd_entries(12), options(6));
    for (int entry = 0; entry <= i % 7; ++entry) {
      store.get(entry);
      store.put(entry);
    }
  }
}

}  // namespace
}  // namespace fsdp::disk
