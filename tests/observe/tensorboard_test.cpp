// Event files, read back by TensorBoard if a Python has it.
#include "observe/tensorboard.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "base/environment.h"
#include "base/subprocess.h"
#include "fsdp/error.h"
#include "observe/folder.h"
#include "paths.h"

namespace fsdp::observe {
namespace {

class Events : public InFolder {
 protected:
  // What TensorBoard reads from the folder; null if it isn't installed.
  nlohmann::json read_back() {
    auto python = environment::text("FSDP_TEST_PYTHON").value_or("python3");
    auto finished =
        run_program({python, paths::source("tests/observe/read_events.py"), folder_.string()}, true,
                    {}, {{"PYTHONDONTWRITEBYTECODE", "1"}});
    if (finished.code == 77) return {};
    EXPECT_EQ(finished.code, 0) << finished.output;
    return nlohmann::json::parse(finished.output, nullptr, false);
  }
};

TEST(Crc32c, GivesThePublishedValues) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(crc32c(std::string(32, '\xFF')), 0x62A8AB43u);
  EXPECT_EQ(masked_crc32c(std::string(32, '\0')),
            ((0x8A9136AAu >> 15 | 0x8A9136AAu << 17) + 0xA282EAD8u));
}

TEST_F(Events, AreReadByTensorBoardWithEqualValues) {
  std::vector<float> values = {0,
                               -1.5F,
                               3.14159265F,
                               1e-30F,
                               std::numeric_limits<float>::max(),
                               std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::quiet_NaN()};
  std::mt19937 random(3);
  for (int i = 0; i < 500; ++i)
    values.push_back(
        std::ldexp(static_cast<float>(random()), static_cast<int>(random() % 40) - 50));
  {
    EventWriter writer(path(""));
    for (size_t i = 0; i < values.size(); ++i)
      writer.scalar("train/loss", values[i], static_cast<int64_t>(i) * 10'000'000'000);
    writer.scalar("größe", 1, 1);
    writer.text("config", "a = \"ä\"\n" + std::string(300, 'x'), 7);
  }
  auto seen = read_back();
  if (seen.is_null()) GTEST_SKIP() << "FSDP_TEST_PYTHON has no tensorboard";
  const auto& loss = seen["scalars"]["train/loss"];
  ASSERT_EQ(loss.size(), values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(loss[i][0], static_cast<int64_t>(i) * 10'000'000'000);
    float value = std::strtof(loss[i][1].get<std::string>().c_str(), nullptr);
    if (std::isnan(values[i])) {
      EXPECT_TRUE(std::isnan(value));
    } else {
      EXPECT_EQ(value, values[i]);
    }
  }
  EXPECT_EQ(seen["scalars"]["größe"][0][0], 1);
  EXPECT_EQ(seen["texts"]["config"][0][0], 7);
  EXPECT_EQ(seen["texts"]["config"][0][1], "a = \"ä\"\n" + std::string(300, 'x'));
  EXPECT_EQ(seen["plugins"]["config"], "text");
}

TEST_F(Events, OfAResumedRunReplaceThoseAfterItsStep) {
  {
    EventWriter first(path(""));
    for (int step = 1; step <= 10; ++step) first.scalar("loss", 100 + step, step);
    first.flush();
    EventWriter second(path(""), 6);  // in the same second, and while the first is open
    for (int step = 7; step <= 8; ++step) second.scalar("loss", 200 + step, step);
    EXPECT_LT(first.file(), second.file());
  }
  auto seen = read_back();
  if (seen.is_null()) GTEST_SKIP() << "FSDP_TEST_PYTHON has no tensorboard";
  nlohmann::json expected = nlohmann::json::array();
  for (int step = 1; step <= 6; ++step)
    expected.push_back({step, std::to_string(100 + step) + ".0"});
  for (int step = 7; step <= 8; ++step)
    expected.push_back({step, std::to_string(200 + step) + ".0"});
  EXPECT_EQ(seen["scalars"]["loss"], expected);
}

TEST_F(Events, AreFramedRecordByRecord) {
  std::string file;
  {
    EventWriter writer(path("deep/folder"));
    writer.scalar("a", 1, 1);
    file = writer.file();
  }
  std::string bytes = read(file);
  size_t at = 0, records = 0;
  auto number = [&](size_t from, size_t count) {
    uint64_t value = 0;
    for (size_t i = 0; i < count; ++i)
      value |= uint64_t(static_cast<unsigned char>(bytes.at(from + i))) << 8 * i;
    return value;
  };
  for (; at < bytes.size(); ++records) {
    uint64_t size = number(at, 8);
    EXPECT_EQ(number(at + 8, 4), masked_crc32c(bytes.substr(at, 8)));
    EXPECT_EQ(number(at + 12 + size, 4), masked_crc32c(bytes.substr(at + 12, size)));
    at += 16 + size;
  }
  EXPECT_EQ(at, bytes.size());
  EXPECT_EQ(records, 2u);  // the version, and the scalar
}

TEST_F(Events, AFolderThatCannotBeMadeIsAnError) {
  write(path("file"), "");
  EXPECT_THROW(EventWriter(path("file/below")), Error);
}

}  // namespace
}  // namespace fsdp::observe
