// Checksums of blocks, the manifest that holds them, and reads that are checked against them.
#include "checkpoint/manifest.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "checkpoint/files.h"
#include "checkpoint/test_files.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

namespace fs = std::filesystem;

std::string bytes_of(int64_t size) {
  std::string bytes(static_cast<size_t>(size), '\0');
  uint64_t state = 1;
  for (auto& byte : bytes)
    byte = static_cast<char>((state = state * 6364136223846793005u + 1) >> 56);
  return bytes;
}

FileSums sums_of(const std::string& bytes) {
  return {static_cast<int64_t>(bytes.size()), block_sums(bytes.data(), bytes.size())};
}

TEST(Sums, AreXxh3OfEachBlock) {
  EXPECT_EQ(block_sum("", 0), 0x2d06800538d394c2u);  // as the library documents it
  for (int64_t size :
       {int64_t{0}, int64_t{1}, kSumBlock - 1, kSumBlock, kSumBlock + 1, 3 * kSumBlock + 77}) {
    const std::string bytes = bytes_of(size);
    const FileSums sums = sums_of(bytes);
    EXPECT_EQ(sums.size, size);
    ASSERT_EQ(static_cast<int64_t>(sums.sums.size()), block_count(size));
    for (size_t i = 0; i < sums.sums.size(); ++i) {
      const std::string block = bytes.substr(i * kSumBlock, kSumBlock);
      EXPECT_EQ(sums.sums[i], block_sum(block.data(), block.size()));
    }
  }
}

TEST(Sums, AnOutputReturnsThoseOfItsFile) {
  const std::string large = bytes_of(40 << 20);  // more than are on their way at a time
  for (const size_t piece : {size_t{100'003}, size_t{kSumBlock}, large.size()}) {
    const Folder folder;
    files::Output out(folder / "a", 1 << 20);
    out.append("small");
    out.align(64);
    for (size_t at = 0; at < large.size(); at += piece)
      out.append(large.data() + at, std::min(piece, large.size() - at));
    const FileSums sums = out.close();
    const std::string written = files::read_whole(folder / "a", 1 << 30);
    EXPECT_EQ(written.substr(64), large) << piece;
    EXPECT_EQ(sums.size, static_cast<int64_t>(written.size()));
    EXPECT_EQ(sums.sums, sums_of(written).sums) << piece;
  }
}

TEST(Manifests, ReadBackUnchanged) {
  const Folder folder;
  Manifest manifest;
  manifest.files["__0_0.distcp"] = sums_of(bytes_of(3 * kSumBlock + 1));
  manifest.files[".metadata"] = sums_of(bytes_of(100));
  manifest.files["empty \"name\" ö"] = sums_of("");
  EXPECT_FALSE(read_manifest(folder.path));
  write_manifest(folder.path, manifest);
  const auto back = read_manifest(folder.path);
  ASSERT_TRUE(back);
  ASSERT_EQ(back->files.size(), 3u);
  for (const auto& [name, file] : manifest.files) {
    EXPECT_EQ(back->files.at(name).size, file.size);
    EXPECT_EQ(back->files.at(name).sums, file.sums);
  }
}

TEST(Manifests, AnyChangedByteIsAnError) {
  const std::string good = encode_manifest({{{"a", sums_of(bytes_of(kSumBlock + 1))}}});
  decode_manifest(good, "here");
  for (size_t i = 0; i + 1 < good.size(); ++i)  // without the final newline
    for (int bit : {0, 3, 7}) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ (1 << bit));
      try {
        decode_manifest(bad, "here");
        ADD_FAILURE() << "byte " << i << ": " << bad;
      } catch (const Error& error) {
        EXPECT_EQ(error.message().rfind("here: ", 0), 0u) << error.message();
      }
    }
  for (size_t size = 0; size + 1 < good.size(); ++size)
    EXPECT_THROW(decode_manifest(good.substr(0, size), "here"), Error) << size;
}

TEST(Manifests, NamesStayInTheirDirectory) {
  for (const std::string name : {"", ".", "..", "../a", "/a", "a/b"})
    EXPECT_THROW(decode_manifest(encode_manifest({{{name, FileSums{}}}}), "here"), Error) << name;
}

// --- checked reads ---

TEST(CheckedReads, ReturnTheBytesAtAnyOffset) {
  const Folder folder;
  const std::string bytes = bytes_of(3 * kSumBlock + 1000);
  const FileSums sums = files::write_whole(folder / "a", bytes);
  const std::vector<int64_t> edges = {
      0, 1, kSumBlock - 1, kSumBlock, kSumBlock + 1, 2 * kSumBlock, 3 * kSumBlock + 999};
  for (int64_t begin : edges)
    for (int64_t size : {int64_t{0}, int64_t{1}, int64_t{500}, kSumBlock, 2 * kSumBlock + 3}) {
      if (begin + size > static_cast<int64_t>(bytes.size())) continue;
      const files::Input fresh(folder / "a", &sums);
      std::string read(static_cast<size_t>(size), '\0');
      for (int again = 0; again < 2; ++again) {  // the second time the blocks are already checked
        fresh.read(begin, read.data(), read.size());
        EXPECT_TRUE(read == bytes.substr(static_cast<size_t>(begin), static_cast<size_t>(size)))
            << begin << " " << size;
      }
    }
  const files::Input in(folder / "a", &sums);
  char byte = 0;
  EXPECT_THROW(in.read(static_cast<int64_t>(bytes.size()), &byte, 1), Error);
}

TEST(CheckedReads, OnlyTheDamagedBlockIsAnError) {
  const Folder folder;
  std::string bytes = bytes_of(3 * kSumBlock);
  const FileSums sums = files::write_whole(folder / "a", bytes);
  bytes[static_cast<size_t>(kSumBlock + 5)] ^= 1;
  files::write_whole(folder / "a", bytes);
  const files::Input in(folder / "a", &sums);
  std::string read(10, '\0');
  in.read(100, read.data(), read.size());
  in.read(2 * kSumBlock, read.data(), read.size());
  try {
    in.read(2 * kSumBlock - 10, read.data(), read.size());  // far from the bit, in the same block
    ADD_FAILURE() << "the damage was not noticed";
  } catch (const Error& error) {
    EXPECT_NE(error.message().find("bytes 262144 to 524288"), std::string::npos) << error.what();
    EXPECT_NE(error.message().find((folder / "a").string()), std::string::npos) << error.what();
  }
  fs::resize_file(folder / "a", 3 * kSumBlock - 1);
  EXPECT_THROW(files::Input(folder / "a", &sums), Error);
}

}  // namespace
}  // namespace fsdp::checkpoint
