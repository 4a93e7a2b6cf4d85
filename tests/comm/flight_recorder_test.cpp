// The ring of the flight recorder, and its file.
#include "comm/core/flight_recorder.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace fsdp::comm::flight {
namespace {

using std::chrono::milliseconds;

Description all_reduce(int64_t count, const char* label = "") {
  ScopedLabel scope(label);
  return describe(Operation::kAllReduce, c10::ScalarType::Float, count);
}

Record record_of(uint64_t number) {
  Record record;
  EXPECT_TRUE(read(number, record)) << number;
  return record;
}

TEST(FlightRecorder, ACallPassesThroughItsStates) {
  Group* group = add_group("states", "shm", {0, 2});
  EXPECT_EQ(group->ranks, "[0, 2]");
  const uint64_t number =
      issued(group, all_reduce(7, "unit a"), {.in = 7, .out = 7}, milliseconds(100));
  Record record = record_of(number);
  EXPECT_EQ(record.group, group);
  EXPECT_EQ(record.sequence, 1u);
  EXPECT_EQ(record.what.count, 7);
  EXPECT_STREQ(record.what.label, "unit a");
  EXPECT_EQ(record.timeout_ms, 100);
  EXPECT_GT(record.issued_ns, 0);
  EXPECT_EQ(record.started_ns, 0);
  EXPECT_EQ(record.ended_ns, 0);
  started(number);
  EXPECT_GE(record_of(number).started_ns, record.issued_ns);
  EXPECT_EQ(group->completed, 0u);
  finished(number);
  record = record_of(number);
  EXPECT_GE(record.ended_ns, record.started_ns);
  EXPECT_FALSE(record.failed);
  EXPECT_EQ(group->completed, 1u);
  const uint64_t second = issued(group, all_reduce(1), {}, milliseconds(1));
  finished(second, /*failed=*/true);
  EXPECT_TRUE(record_of(second).failed);
  EXPECT_EQ(record_of(second).sequence, 2u);
  EXPECT_EQ(group->completed, 1u);
}

TEST(FlightRecorder, TheSecondCommunicatorOfANameHasANumber) {
  add_group("twice", "shm", {0});
  EXPECT_EQ(add_group("twice", "shm", {0})->name, "twice#2");
  EXPECT_EQ(add_group("twice", "shm", {0})->name, "twice#3");
}

TEST(FlightRecorder, WithoutACommunicatorNothingIsRecorded) {
  const uint64_t before = last_number();
  const uint64_t number = issued(nullptr, all_reduce(1), {}, milliseconds(1));
  started(number);
  finished(number);
  EXPECT_EQ(number, 0u);
  EXPECT_EQ(last_number(), before);
}

TEST(FlightRecorder, TheRingKeepsTheLastTwoThousand) {
  Group* group = add_group("ring", "shm", {0});
  const uint64_t first = issued(group, all_reduce(0), {}, milliseconds(1));
  for (int64_t i = 1; i < 5000; ++i) issued(group, all_reduce(i), {}, milliseconds(1));
  const uint64_t last = last_number();
  ASSERT_EQ(last, first + 4999);
  for (uint64_t number = last - kKept + 1; number <= last; ++number)
    EXPECT_EQ(record_of(number).what.count, static_cast<int64_t>(number - first));
  Record record;
  EXPECT_FALSE(read(first, record));
  started(first);  // of an overwritten record: changes nothing
  finished(first, true);
  for (uint64_t number = last - kKept + 1; number <= last; ++number)
    EXPECT_EQ(record_of(number).ended_ns, 0);
}

TEST(FlightRecorder, ReadersSeeWholeRecordsWhileOthersWrite) {
  Group* group = add_group("threads", "shm", {0});
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (int thread = 0; thread < 3; ++thread)
    writers.emplace_back([&, thread] {
      for (int64_t i = 1; i <= 20000; ++i) {
        const int64_t value = thread * 100000 + i;
        Description what = all_reduce(value);
        what.identity = value;
        const uint64_t number = issued(group, what, {value, value}, milliseconds(value));
        started(number);
        finished(number);
      }
    });
  int64_t seen = 0;
  std::thread reader([&] {
    Record record;
    for (bool again = true; again;) {
      again = !stop;  // once more when all have written
      for (uint64_t number = last_number(); number > 0; --number) {
        if (!read(number, record)) break;
        if (record.group != group) break;
        ++seen;
        ASSERT_EQ(record.what.count, record.what.identity);
        ASSERT_EQ(record.amounts.in, record.what.count);
        ASSERT_EQ(record.amounts.out, record.what.count);
        ASSERT_EQ(record.timeout_ms, record.what.count);
      }
    }
  });
  for (std::thread& writer : writers) writer.join();
  stop = true;
  reader.join();
  EXPECT_GT(seen, 0);
  EXPECT_EQ(group->issued, 60000u);
}

class FlightFile : public ::testing::Test {
 protected:
  FlightFile() {
    std::string pattern = (std::filesystem::temp_directory_path() / "flight-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
    join(1, 2, "a run");
    set_directory(folder_ + "/inner/flight");
  }
  ~FlightFile() override { std::filesystem::remove_all(folder_); }

  std::string content() const {
    std::ifstream file(folder_ + "/inner/flight/rank-1", std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  std::string folder_;
};

TEST_F(FlightFile, AFaultWritesOnePickleAndWhatFollowsKeepsIt) {
  Group* group = add_group("file", "shm", {0, 1});
  issued(group, all_reduce(3, "caf\xc3\xa9 \xff end"), {}, milliseconds(1));
  ASSERT_TRUE(write(Cause::kRequest, "asked"));
  EXPECT_NE(content().find("asked"), std::string::npos);
  ASSERT_TRUE(write(Cause::kFault, "the first fault"));
  const std::string text = content();
  EXPECT_EQ(text.substr(0, 2), "\x80\x02");
  EXPECT_EQ(text.back(), '.');
  EXPECT_NE(text.find("the first fault"), std::string::npos);
  EXPECT_NE(text.find("caf\xc3\xa9 ? end"), std::string::npos) << "labels must be UTF-8";
  EXPECT_FALSE(write(Cause::kFault, "the second fault"));
  EXPECT_FALSE(write(Cause::kRequest, "asked"));
  EXPECT_EQ(content(), text);
  int files = 0;
  for ([[maybe_unused]] const auto& file :
       std::filesystem::directory_iterator(folder_ + "/inner/flight"))
    ++files;
  EXPECT_EQ(files, 1) << "a draft is left";
  join(1, 2, "the next run");  // begins anew
  set_directory(folder_ + "/inner/flight");
  EXPECT_FALSE(write(Cause::kFault, "the second fault")) << "nothing was called in this world";
  issued(add_group("file", "shm", {0, 1}), all_reduce(3), {}, milliseconds(1));
  EXPECT_TRUE(write(Cause::kFault, "the second fault"));
  EXPECT_NE(content().find("the next run"), std::string::npos);
  EXPECT_EQ(content().find("the first fault"), std::string::npos);
}

TEST_F(FlightFile, ThreadsThatFailAtOnceWriteOneFile) {
  issued(add_group("at once", "shm", {0, 1}), all_reduce(3), {}, milliseconds(1));
  std::atomic<int> written{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] { written += write(Cause::kFault, "a fault") ? 1 : 0; });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(written, 1);
  EXPECT_EQ(content().back(), '.');
}

}  // namespace
}  // namespace fsdp::comm::flight
