// The shared-memory collectives against sums computed in one place, with ranks as threads. Tests
// with real processes, and of their failures, are in backends_test and faults_test.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <numeric>

#include "comm/shm/collectives.h"
#include "comm/thread_ranks.h"
#include "fsdp/error.h"

namespace fsdp::comm::shm {
namespace {

using fsdp::testing::expect_no_errors;
using fsdp::testing::LocalExchange;
using fsdp::testing::run_ranks;
using std::chrono::milliseconds;

void serial(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  body(0, count);
}

float value(int rank, int64_t i) {
  return static_cast<float>((rank * 31 + i * 7) % 101) / 8;
}

struct Case {
  int ranks;
  int64_t count;  // elements per rank
  bool shared;    // buffers in shared memory
};

std::vector<std::string> run_group(int size, const std::function<void(Group&)>& body,
                                   milliseconds timeout = milliseconds(30000)) {
  LocalExchange exchange;
  return run_ranks(size, [&](int rank) {
    Group group("test", rank, size, exchange.exchange(), timeout);
    body(group);
  });
}

class ShmCollectives : public ::testing::TestWithParam<Case> {};

TEST_P(ShmCollectives, AllGatherPutsEveryPartInPlace) {
  auto [ranks, count, shared] = GetParam();
  expect_no_errors(run_group(ranks, [&, count = count, shared = shared](Group& group) {
    std::vector<float> own(count), plain(count * group.size());
    auto window = shared ? group.allocate(count * group.size() * 4) : nullptr;
    float* full = shared ? reinterpret_cast<float*>(window->data()) : plain.data();
    for (int round = 0; round < 3; ++round) {
      for (int64_t i = 0; i < count; ++i) own[i] = value(group.rank() + round, i);
      float* in = own.data();
      if (shared) {
        // No rank may still be reading the previous round's values.
        barrier(group);
        in = full + group.rank() * count;
        std::copy(own.begin(), own.end(), in);
      }
      all_gather(group, full, in, count, c10::ScalarType::Float);
      for (int r = 0; r < group.size(); ++r)
        for (int64_t i = 0; i < count; ++i) ASSERT_EQ(full[r * count + i], value(r + round, i));
    }
  }));
}

TEST_P(ShmCollectives, ReduceScatterSumsInRankOrder) {
  auto [ranks, count, shared] = GetParam();
  expect_no_errors(run_group(ranks, [&, count = count, shared = shared](Group& group) {
    int size = group.size();
    std::vector<float> plain(count * size), out(count);
    auto window = shared ? group.allocate(count * size * size * 4) : nullptr;
    float* in = shared ? reinterpret_cast<float*>(window->data()) + group.rank() * count * size
                       : plain.data();
    for (int round = 0; round < 3; ++round) {
      for (int64_t i = 0; i < count * size; ++i) in[i] = value(group.rank() + round, i);
      reduce_scatter(group, out.data(), in, count, c10::ScalarType::Float, ReduceOp::SUM, serial);
      for (int64_t i = 0; i < count; ++i) {
        float sum = value(round, group.rank() * count + i);
        for (int r = 1; r < size; ++r) sum += value(r + round, group.rank() * count + i);
        ASSERT_EQ(out[i], sum) << i;
      }
      // In place: the output is this rank's part of the input.
      reduce_scatter(group, in + group.rank() * count, in, count, c10::ScalarType::Float,
                     ReduceOp::SUM, serial);
      ASSERT_TRUE(std::equal(out.begin(), out.end(), in + group.rank() * count));
    }
  }));
}

TEST_P(ShmCollectives, AllReduceGivesEveryRankTheSameBits) {
  auto [ranks, count, shared] = GetParam();
  expect_no_errors(run_group(ranks, [&, count = count, shared = shared](Group& group) {
    int size = group.size();
    std::vector<float> plain(count);
    auto window = shared ? group.allocate(count * size * 4) : nullptr;
    float* data =
        shared ? reinterpret_cast<float*>(window->data()) + group.rank() * count : plain.data();
    for (auto op : {ReduceOp::SUM, ReduceOp::MAX, ReduceOp::AVG}) {
      for (int64_t i = 0; i < count; ++i) data[i] = value(group.rank(), i);
      all_reduce(group, data, count, c10::ScalarType::Float, op, serial);
      for (int64_t i = 0; i < count; ++i) {
        float expected = value(0, i);
        for (int r = 1; r < size; ++r)
          expected = op == ReduceOp::MAX ? std::max(expected, value(r, i)) : expected + value(r, i);
        if (op == ReduceOp::AVG) expected /= static_cast<float>(size);
        ASSERT_EQ(data[i], expected) << i;
      }
    }
  }));
}

TEST_P(ShmCollectives, BroadcastAndAllToAll) {
  auto [ranks, count, shared] = GetParam();
  expect_no_errors(run_group(ranks, [&, count = count](Group& group) {
    int size = group.size(), rank = group.rank();
    for (int root = 0; root < size; ++root) {
      std::vector<float> data(count);
      if (rank == root)
        for (int64_t i = 0; i < count; ++i) data[i] = value(root, i);
      broadcast(group, data.data(), count, c10::ScalarType::Float, root);
      for (int64_t i = 0; i < count; ++i) ASSERT_EQ(data[i], value(root, i));
    }
    // Rank r sends (r + p) % 3 * count elements to rank p: uneven, sometimes none.
    auto amount = [&](int from, int to) { return (from + to) % 3 * count; };
    std::vector<int64_t> out_counts(size), in_counts(size);
    for (int p = 0; p < size; ++p) in_counts[p] = amount(rank, p), out_counts[p] = amount(p, rank);
    std::vector<float> in(std::accumulate(in_counts.begin(), in_counts.end(), int64_t{0}));
    std::vector<float> out(std::accumulate(out_counts.begin(), out_counts.end(), int64_t{0}));
    size_t at = 0;
    for (int p = 0; p < size; ++p)
      for (int64_t i = 0; i < in_counts[p]; ++i) in[at++] = value(rank * size + p, i);
    all_to_all(group, out.data(), out_counts, in.data(), in_counts, c10::ScalarType::Float);
    at = 0;
    for (int p = 0; p < size; ++p)
      for (int64_t i = 0; i < out_counts[p]; ++i)
        ASSERT_EQ(out[at++], value(p * size + rank, i)) << p << " " << i;
  }));
}

INSTANTIATE_TEST_SUITE_P(RanksAndSizes, ShmCollectives,
                         ::testing::Values(Case{1, 7, false}, Case{1, 7, true}, Case{2, 0, false},
                                           Case{2, 1, false}, Case{2, 1, true},
                                           Case{2, 65536, false}, Case{2, 65537, false},
                                           Case{2, 200003, true}, Case{2, 200003, false},
                                           Case{3, 5, true}, Case{3, 70001, false},
                                           Case{5, 33333, true}, Case{5, 33333, false},
                                           Case{8, 1000, false}),
                         [](const auto& info) {
                           return std::to_string(info.param.ranks) + "ranks_" +
                                  std::to_string(info.param.count) +
                                  (info.param.shared ? "_shared" : "_private");
                         });

TEST(ShmGroup, RanksThatCallDifferentThingsSeeBothCalls) {
  auto errors = run_group(3, [](Group& group) {
    std::vector<float> data(30);
    if (group.rank() == 1)
      all_reduce(group, data.data(), 10, c10::ScalarType::Float, ReduceOp::SUM, serial);
    else
      all_gather(group, data.data(), std::vector<float>(10).data(), 10, c10::ScalarType::Float);
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_NE(errors[rank].find("all_gather of 10 float"), std::string::npos) << errors[rank];
    EXPECT_NE(errors[rank].find("all_reduce(sum) of 10 float"), std::string::npos) << errors[rank];
    EXPECT_NE(errors[rank].find("HINT"), std::string::npos) << errors[rank];
  }
}

TEST(ShmGroup, SizesThatDifferAreShown) {
  auto errors = run_group(2, [](Group& group) {
    std::vector<float> data(group.rank() ? 11 : 10);
    broadcast(group, data.data(), data.size(), c10::ScalarType::Float, 0);
  });
  for (const auto& error : errors) {
    EXPECT_NE(error.find("of 10 float"), std::string::npos) << error;
    EXPECT_NE(error.find("of 11 float"), std::string::npos) << error;
  }
}

TEST(ShmGroup, ARankThatNeverComesIsNamedAtTheTimeout) {
  std::atomic<bool> failed = false;
  auto errors = run_group(
      2,
      [&](Group& group) {
        if (group.rank() == 1) return failed.wait(false);  // stays alive, and makes no call
        try {
          barrier(group);
        } catch (...) {
          failed = true;
          failed.notify_all();
          throw;
        }
      },
      milliseconds(200));
  EXPECT_NE(errors[0].find("no answer in 0.2 s from rank 1"), std::string::npos) << errors[0];
  EXPECT_NE(errors[0].find("has called nothing yet"), std::string::npos) << errors[0];
}

TEST(ShmGroup, ARankThatLeavesIsNamedAtOnce) {
  auto errors = run_group(2, [](Group& group) {
    barrier(group);
    if (group.rank() == 0) barrier(group);
  });
  EXPECT_NE(errors[0].find("rank 1 left"), std::string::npos) << errors[0];
  EXPECT_EQ(errors[1], "");
}

TEST(ShmGroup, AFailureStaysAndReachesTheOthers) {
  auto errors = run_group(3, [](Group& group) {
    if (group.rank() == 2) {
      group.fail("the disk is full");
      throw std::runtime_error("the disk is full");
    }
    EXPECT_THROW(barrier(group), Error);
    barrier(group);
  });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_NE(errors[rank].find("an earlier failure broke"), std::string::npos) << errors[rank];
    EXPECT_NE(errors[rank].find("the disk is full"), std::string::npos) << errors[rank];
  }
}

TEST(ShmGroup, RanksOnTwoHostsAreToldWhatToUse) {
  LocalExchange exchange;
  auto plain = exchange.exchange();
  auto errors = run_ranks(2, [&](int rank) {
    auto mine = plain;
    if (rank == 1)
      mine.set = [&](const std::string& key, const std::string& text) {
        plain.set(key, key == "host/1" ? "another host" : text);
      };
    Group group("test", rank, 2, mine, milliseconds(5000));
  });
  EXPECT_NE(errors[0].find("cannot reach rank 1"), std::string::npos) << errors[0];
  EXPECT_NE(errors[0].find("mpi"), std::string::npos);
  EXPECT_NE(errors[0].find("nccl"), std::string::npos);
}

}  // namespace
}  // namespace fsdp::comm::shm
