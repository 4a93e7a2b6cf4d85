// Folders of checkpoints: two writers, lost manifests, and which checkpoints count as whole.
#include "checkpoint/folder.h"

#include <gtest/gtest.h>

#include "checkpoint/intact.h"
#include "checkpoint/made.h"
#include "checkpoint/verify.h"
#include "fsdp/checkpoint.h"

namespace fsdp::checkpoint {
namespace {

namespace fs = std::filesystem;

void write_checkpoint(const fs::path& dir, int64_t value) {
  fs::remove(dir);
  Made made(dir);
  made.tensor({{std::string("model"), std::string("x")}}, at::arange(60'000, at::kFloat), 30'000);
  made.value({std::string("extra"), std::string("value")}, value);
  made.finish(true);
}

int64_t value_in(const fs::path& dir) {
  return std::get<int64_t>(read_extra(dir).at("value"));
}

Partial begun(const fs::path& dir, const std::string& writer, int64_t value) {
  Partial partial{dir, writer};
  begin_partial(partial);
  write_checkpoint(partial.path(), value);
  return partial;
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

TEST(TwoWriters, OfOneNameOneGetsAnErrorAndTheOtherIsWhole) {
  Folder folder;
  const auto first = begun(folder / "step-1", "a", 1);
  const auto second = begun(folder / "step-1", "b", 2);
  EXPECT_NE(first.path(), second.path());
  EXPECT_TRUE(has(error_of([&] { publish_partial(first); }), "another process saves"));
  publish_partial(second);
  EXPECT_EQ(latest(folder.path), folder / "step-1");
  EXPECT_EQ(value_in(folder / "step-1"), 2);
  EXPECT_TRUE(verify(folder / "step-1").problems.empty());
  EXPECT_EQ(names_in(folder.path), (std::vector<std::string>{"latest", "step-1"}));
}

TEST(TwoWriters, OfOtherNamesBothSucceed) {
  Folder folder;
  const auto first = begun(folder / "step-1", "a", 1);
  const auto second = begun(folder / "step-2", "b", 2);
  publish_partial(second);
  publish_partial(first);
  EXPECT_EQ(list(folder.path).size(), 2u);
  EXPECT_EQ(value_in(folder / "latest"), 1);
}

TEST(TwoWriters, NamesOfUnfinishedCheckpointsAreReserved) {
  for (const std::string name : {"run/a.partial.7-c0ffee", "a.damaged", "a.damaged.2"})
    EXPECT_TRUE(has(error_of([&] { checked_name(name); }), "reserved")) << name;
}

class Whole : public testing::Test {
 protected:
  Whole() {
    for (int64_t step : {1, 2, 3})
      publish_partial(begun(dir(step), "a" + std::to_string(step), step));
  }
  fs::path dir(int64_t step) const { return folder / ("step-" + std::to_string(step)); }

  Folder folder;
};

TEST_F(Whole, ACheckpointIsWholeWithItsManifest) {
  EXPECT_EQ(problem_in(dir(3)), "");
  fs::remove(dir(3) / kManifestName);
  EXPECT_TRUE(has(problem_in(dir(3)), "is missing"));
  EXPECT_EQ(latest(folder.path), dir(2));
  EXPECT_TRUE(has(error_of([&] { read_extra(dir(3)); }), ".manifest.json: is missing"));
}

TEST_F(Whole, AManifestOfAnotherCheckpointIsAnError) {
  fs::copy_file(dir(2) / kManifestName, dir(3) / kManifestName,
                fs::copy_options::overwrite_existing);
  EXPECT_NE(error_of([&] { read_extra(dir(3)); }), "");
  EXPECT_EQ(latest(folder.path), dir(2));  // .metadata doesn't have the sums that it lists
}

TEST_F(Whole, DamagedOnesAreNotCountedWhenOldOnesAreDeleted) {
  flip(dir(3) / kMetadataName, 100);
  fs::remove(dir(2) / kManifestName);
  keep_last(folder.path, 1);
  EXPECT_EQ(value_in(dir(1)), 1);
  EXPECT_EQ(latest(folder.path), dir(1));
}

TEST_F(Whole, OneThatIsSetAsideIsNeverCountedOrDeleted) {
  EXPECT_EQ(set_aside(dir(3)), folder / "step-3.damaged");
  EXPECT_EQ(latest(folder.path), dir(2));
  EXPECT_EQ(list(folder.path).size(), 2u);
  keep_last(folder.path, 1);
  EXPECT_EQ(value_in(folder / "step-3.damaged"), 3);
  publish_partial(begun(dir(3), "b", 4));
  EXPECT_EQ(set_aside(dir(3)), folder / "step-3.damaged.2");
}

TEST_F(Whole, AManifestIsMadeAgainOnlyForTheBytesThatWereSaved) {
  const auto before = files::read_whole(dir(3) / kManifestName, 1 << 20);
  fs::remove(dir(3) / kManifestName);
  EXPECT_EQ(verify(dir(3)).problems.size(), 1u);
  restore_manifest(dir(3));
  EXPECT_EQ(files::read_whole(dir(3) / kManifestName, 1 << 20), before);
  fs::remove(dir(3) / kManifestName);
  flip(dir(3) / "__0_0.distcp", 1000);
  EXPECT_TRUE(has(error_of([&] { restore_manifest(dir(3)); }), "aren't what was saved"));
  EXPECT_FALSE(fs::exists(dir(3) / kManifestName));
}

// As Python and older versions write them.
TEST_F(Whole, WithoutAMarkThereNeedNotBeAManifest) {
  auto metadata = read_metadata(dir(3));
  metadata.mark.clear();
  files::write_whole(dir(3) / kMetadataName, encode(metadata));
  fs::remove(dir(3) / kManifestName);
  EXPECT_EQ(problem_in(dir(3)), "");
  EXPECT_EQ(value_in(dir(3)), 3);
  EXPECT_TRUE(has(error_of([&] { restore_manifest(dir(3)); }), "doesn't say"));
}

}  // namespace
}  // namespace fsdp::checkpoint
