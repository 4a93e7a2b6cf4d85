// verify: intact checkpoints pass, and any change is found, with its file and tensors.
#include "checkpoint/verify.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "checkpoint/made.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

namespace fs = std::filesystem;

at::Tensor numbers(int64_t rows, int64_t columns) {
  return at::arange(rows * columns, at::kFloat).view({rows, columns});
}

class Verify : public testing::TestWithParam<bool> {  // with a manifest
 protected:
  Verify() : dir(folder.path / "step-1") {
    Made made(dir);
    fill(made);
    made.finish(GetParam());
  }
  static void fill(Made& made) {
    made.tensor({{"model", "embed.weight"}, {"model", "head.weight"}}, numbers(6, 5), 4);
    made.tensor({{"model", "norm.weight"}}, numbers(3, 1).view({3}).to(at::kBFloat16), 3);
    made.value({"extra", "step"}, 7);
    made.tensor({{"model", "large"}}, numbers(300, 500), 100);  // more than a block
  }
  std::vector<Problem> problems() { return verify(dir).problems; }

  static const Problem* about(const std::vector<Problem>& problems, const std::string& file,
                              const std::string& word) {
    for (const auto& problem : problems)
      if (problem.file == file && problem.what.find(word) != std::string::npos) return &problem;
    return nullptr;
  }
  static bool names(const Problem& problem, const std::string& name) {
    return std::count(problem.names.begin(), problem.names.end(), name) == 1;
  }

  Folder folder;
  fs::path dir;
};
INSTANTIATE_TEST_SUITE_P(, Verify, testing::Bool(), [](const auto& info) {
  return info.param ? "WithAManifest" : "WithoutOne";
});

TEST_P(Verify, AnIntactCheckpointHasNoProblems) {
  for (int threads : {0, 1, 3}) {
    int64_t last = 0, whole = 0;
    const auto found = verify(dir, {.threads = threads, .progress = [&](int64_t done, int64_t all) {
                                      EXPECT_GE(done, last);
                                      last = done;
                                      whole = all;
                                    }});
    for (const auto& problem : found.problems) ADD_FAILURE() << problem.file << problem.what;
    EXPECT_EQ(found.sums, GetParam() ? ChecksumKind::kBlocks : ChecksumKind::kRecords);
    EXPECT_EQ(found.files, GetParam() ? 4 : 3);
    EXPECT_EQ(found.tensors, 4);
    EXPECT_EQ(last, whole);
    EXPECT_GT(whole, 600'000);
  }
}

TEST_P(Verify, AnyChangedBitOfATensorIsFoundUnderAllOfItsNames) {
  const auto metadata = read_metadata(dir);
  for (const auto& [name, entry] : metadata.tensors)
    for (const auto& chunk : entry.chunks) {
      const files::Input in(dir / chunk.place.file);
      const auto stored = find_tensor(in, chunk.place, name);
      const int64_t bytes =
          at::elementSize(entry.dtype) * c10::multiply_integers(chunk.rectangle.sizes);
      for (const int64_t at :
           {stored.offset, stored.offset + bytes / 2, stored.offset + bytes - 1}) {
        flip(dir / chunk.place.file, at);
        const auto found = problems();
        ASSERT_EQ(found.size(), 1u) << name;
        EXPECT_EQ(found[0].file, chunk.place.file);
        EXPECT_LE(found[0].begin, at);
        EXPECT_GT(found[0].end, at);
        EXPECT_TRUE(names(found[0], name));
        EXPECT_TRUE(name != "model.head.weight" || names(found[0], "model.embed.weight"));
        flip(dir / chunk.place.file, at);
      }
    }
  EXPECT_TRUE(problems().empty());
}

TEST_P(Verify, WithAManifestAnyChangedByteIsFound) {
  if (!GetParam()) GTEST_SKIP() << "bytes around records have no CRC-32";
  for (const std::string file : {".metadata", ".manifest.json", "__0_0.distcp", "__1_0.distcp"}) {
    const auto size = static_cast<int64_t>(fs::file_size(dir / file));
    for (int64_t at = 0; at < size - 1; at += std::max<int64_t>(1, size / 60)) {
      flip(dir / file, at);
      const auto found = problems();
      EXPECT_TRUE(std::any_of(found.begin(), found.end(),
                              [&](const auto& problem) { return problem.file == file; }))
          << file << " at " << at;
      flip(dir / file, at);
    }
  }
  EXPECT_TRUE(problems().empty());
}

TEST_P(Verify, EveryProblemIsListed) {
  const int64_t whole = static_cast<int64_t>(fs::file_size(dir / "__1_0.distcp"));
  flip(dir / "__0_0.distcp", 100'000);
  fs::resize_file(dir / "__1_0.distcp", whole - 1000);
  std::ofstream(dir / "notes.txt") << "mine";
  fs::create_directory(dir / "more");
  const auto found = problems();
  EXPECT_TRUE(about(found, "__0_0.distcp", "differs from what was written"));
  const auto* cut = about(found, "__1_0.distcp", "truncated");
  ASSERT_TRUE(cut);
  EXPECT_EQ(cut->begin, whole - 1000);
  EXPECT_EQ(cut->end, whole);
  EXPECT_TRUE(names(*cut, "model.large"));
  EXPECT_FALSE(names(*cut, "model.embed.weight"));
  EXPECT_TRUE(about(found, "notes.txt", "nothing lists it"));
  EXPECT_TRUE(about(found, "more", "nothing lists it"));
}

TEST_P(Verify, MissingAndLongerFilesAreFound) {
  fs::remove(dir / "__1_0.distcp");
  std::ofstream(dir / "__0_0.distcp", std::ios::app) << "tail";
  auto found = problems();
  const auto* missing = about(found, "__1_0.distcp", "is missing");
  ASSERT_TRUE(missing);
  EXPECT_TRUE(names(*missing, "model.head.weight"));
  EXPECT_FALSE(names(*missing, "model.norm.weight"));
  EXPECT_TRUE(about(found, "__0_0.distcp", "longer"));
  fs::remove(dir / ".metadata");
  EXPECT_TRUE(about(problems(), ".metadata", "is missing"));
}

TEST_P(Verify, PartsMustCoverTheTensorAndNotOverlap) {
  const auto made = [&](const std::string& name, const std::function<void(Metadata&)>& change) {
    dir = folder.path / name;
    Made made(dir);
    fill(made);
    change(made.metadata);
    made.finish(GetParam());
    return problems();
  };
  const auto chunks = [](Metadata & metadata) -> auto& {
    return metadata.tensors.at("model.large").chunks;
  };
  auto found = made("a", [&](Metadata& m) { chunks(m).pop_back(); });
  const auto* gap = about(found, ".metadata", "don't cover all of [300, 500]");
  ASSERT_TRUE(gap);
  EXPECT_TRUE(names(*gap, "model.large"));
  found = made("b", [&](Metadata& m) { chunks(m)[1].rectangle = {{99, 0}, {200, 500}}; });
  EXPECT_TRUE(about(found, ".metadata", "overlap"));
  found = made("c", [&](Metadata& m) {  // the same number of elements, in another shape
    m.tensors.at("model.large").sizes = {500, 300};
    chunks(m)[0].rectangle = {{0, 0}, {500, 100}};
    chunks(m)[1].rectangle = {{0, 100}, {500, 200}};
  });
  const auto* other = about(found, "__0_0.distcp", "doesn't match .metadata");
  ASSERT_TRUE(other);
  EXPECT_TRUE(names(*other, "model.large"));
  found = made("d", [&](Metadata& m) { chunks(m)[1].place.offset += 64; });
  EXPECT_FALSE(found.empty());
}

TEST(VerifyWhat, EmptyFilesOfRanksWithNothingToWriteAreFine) {
  Folder folder;
  const auto dir = folder.path / "a";
  Made made(dir);
  made.tensor({{"model", "x"}}, numbers(4, 4), 4);
  made.finish(false);
  EXPECT_EQ(fs::file_size(dir / "__1_0.distcp"), 0u);
  EXPECT_TRUE(verify(dir).problems.empty());
}

TEST(VerifyWhat, AMissingDirectoryIsAnError) {
  Folder folder;
  EXPECT_THROW(verify(folder.path / "none"), Error);
}

}  // namespace
}  // namespace fsdp::checkpoint
