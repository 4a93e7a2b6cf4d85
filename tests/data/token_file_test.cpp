// Token files byte by byte, as the other programs write them, and damaged ones.
#include "data/token_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <numeric>

#include "data/folders.h"
#include "data/token_writer.h"

namespace fsdp::data {
namespace {

using test::bytes_of;
using test::contains;
using test::error_of;
using test::Folder;

std::vector<int64_t> all(const TokenFile& file) {
  std::vector<int64_t> ids(file.tokens());
  file.read(0, file.tokens(), ids.data());
  return ids;
}

std::string llmc_header(int32_t magic, int32_t version, int32_t count) {
  std::vector<int32_t> header(256);
  header[0] = magic, header[1] = version, header[2] = count;
  return bytes_of(header);
}

// An index as Megatron writes it: two documents, the second of two sequences.
std::string megatron_index(uint8_t code, int64_t width, std::vector<int32_t> lengths = {3, 1, 2},
                           std::vector<int64_t> documents = {0, 1, 3}) {
  std::vector<int64_t> pointers;
  int64_t at = 0;
  for (int32_t length : lengths) {
    pointers.push_back(at);
    at += length * width;
  }
  return std::string("MMIDIDX\0\0", 9) + bytes_of(std::vector<int64_t>{1}) +
         std::string(1, static_cast<char>(code)) +
         bytes_of(std::vector<int64_t>{static_cast<int64_t>(lengths.size()),
                                       static_cast<int64_t>(documents.size())}) +
         bytes_of(lengths) + bytes_of(pointers) + bytes_of(documents);
}

TEST(TokenFiles, NanogptIsSixteenBitsAToken) {
  Folder folder;
  auto file = TokenFile::open(
      folder.write("a.bin", bytes_of(std::vector<uint16_t>{1, 65535, 50256, 0, 7})));
  EXPECT_EQ(file->format(), Format::kNanogpt);
  EXPECT_EQ(all(*file), (std::vector<int64_t>{1, 65535, 50256, 0, 7}));
  int64_t two[2];
  file->read(2, 2, two);
  EXPECT_EQ(two[0], 50256);
  EXPECT_EQ(two[1], 0);
}

TEST(TokenFiles, BothHeadersOfLlmcAreRead) {
  Folder folder;
  std::string narrow = llmc_header(20240520, 1, 3) + bytes_of(std::vector<uint16_t>{1, 2, 65535});
  std::string wide =
      llmc_header(20240801, 7, 2) + bytes_of(std::vector<uint32_t>{128000, 4000000000u});
  auto a = TokenFile::open(folder.write("a.bin", narrow)),
       b = TokenFile::open(folder.write("b.bin", wide));
  EXPECT_EQ(a->format(), Format::kLlmc);
  EXPECT_EQ(all(*a), (std::vector<int64_t>{1, 2, 65535}));
  EXPECT_EQ(all(*b), (std::vector<int64_t>{128000, 4000000000}));
}

TEST(TokenFiles, EveryTypeOfMegatronIsReadWithItsDocuments) {
  Folder folder;
  auto check = [&](uint8_t code, int64_t width, const std::string& tokens, int64_t last) {
    folder.write("m.idx", megatron_index(code, width));
    auto file = TokenFile::open(folder.write("m.bin", tokens));
    EXPECT_EQ(file->format(), Format::kMegatron);
    EXPECT_EQ(all(*file), (std::vector<int64_t>{1, 2, 3, 4, 5, last})) << int{code};
    EXPECT_EQ(file->document_starts(0, 6), (std::vector<int64_t>{0, 3}));
    EXPECT_EQ(file->document_starts(1, 2), (std::vector<int64_t>{}));
    EXPECT_EQ(file->document_starts(3, 1), (std::vector<int64_t>{3}));
    EXPECT_EQ(TokenFile::open(folder / "m.idx")->tokens(), 6);
  };
  check(1, 1, bytes_of(std::vector<uint8_t>{1, 2, 3, 4, 5, 255}), 255);
  check(2, 1, bytes_of(std::vector<int8_t>{1, 2, 3, 4, 5, 127}), 127);
  check(3, 2, bytes_of(std::vector<int16_t>{1, 2, 3, 4, 5, 32767}), 32767);
  check(4, 4, bytes_of(std::vector<int32_t>{1, 2, 3, 4, 5, 128000}), 128000);
  check(5, 8, bytes_of(std::vector<int64_t>{1, 2, 3, 4, 5, 6}), 6);
  check(8, 2, bytes_of(std::vector<uint16_t>{1, 2, 3, 4, 5, 65535}), 65535);
}

TEST(TokenFiles, ForeignFilesAreRefusedWithTheReason) {
  Folder folder;
  std::string zeros(200, '\0');
  struct Case {
    std::string content;
    const char* expected;
  };
  std::vector<Case> cases = {
      {"", "empty"},
      {"\x7f"
       "ELF" +
           zeros,
       "ELF"},
      {"PK\x03\x04" + zeros, "zip"},
      {"\x1f\x8b\x08" + zeros, "gzip"},
      {"\x93NUMPY" + zeros, "NumPy"},
      {"\x80\x04" + zeros + ".", "pickle"},
      {"version https://git-lfs.github.com/spec/v1\n", "Git LFS"},
      {"Once upon a time there was a file of text.\n", "text"},
      {std::string(7, '\x01'), "odd"},
      {llmc_header(20240520, 1, 4) + std::string(6, '\x01'), "truncated"},
      {llmc_header(20240520, 1, 4) + std::string(10, '\x01'), "too long"},
      {llmc_header(20240801, 7, 4) + std::string(8, '\x01'), "truncated"},
      {llmc_header(20240520, 2, 4) + std::string(8, '\x01'), "version is 2"},
      {llmc_header(20240801, 1, 4) + std::string(16, '\x01'), "version is 1"},
      {llmc_header(20240520, 1, -4), "-4 tokens"},
      {llmc_header(20240520, 1, 4).substr(0, 800), "shorter than llm.c's header"},
      {llmc_header(__builtin_bswap32(20240520), __builtin_bswap32(1), 0) + zeros, "big-endian"},
  };
  for (const Case& entry : cases) {
    std::string file = folder.write("x.bin", entry.content);
    std::string error = error_of([&] { TokenFile::open(file); });
    EXPECT_TRUE(contains(error, entry.expected) && contains(error, file))
        << entry.expected << ": " << error;
  }
  std::string plain = folder.write("x.bin", std::string(2000, '\x01'));
  EXPECT_TRUE(
      contains(error_of([&] { TokenFile::open(plain, Format::kLlmc); }), "llm.c's magic number"));
  EXPECT_TRUE(contains(error_of([&] { TokenFile::open(plain, Format::kMegatron); }), "x.idx"));
  EXPECT_TRUE(contains(error_of([&] { TokenFile::open(plain, Format::kText); }), "\"text\""));
  EXPECT_TRUE(contains(error_of([&] { TokenFile::open(folder / "none.bin"); }), "none.bin"));
  EXPECT_TRUE(contains(error_of([&] { TokenFile::open(folder.path()); }), "is a directory"));
}

TEST(TokenFiles, DamagedIndexesOfMegatronAreRefused) {
  Folder folder;
  std::string good = megatron_index(8, 2), tokens(12, '\x01');
  auto error = [&](std::string index, const std::string& bin) {
    folder.write("m.idx", index);
    std::string path = folder.write("m.bin", bin);
    return error_of([&] { TokenFile::open(path); });
  };
  auto with = [&](size_t at, std::string part) {
    return std::string(good).replace(at, part.size(), part);
  };
  std::string huge = bytes_of(std::vector<int64_t>{INT64_MAX / 4});
  EXPECT_EQ(error(good, tokens), "");
  EXPECT_TRUE(contains(error(good, tokens.substr(2)), "truncated"));
  EXPECT_TRUE(contains(error(good, tokens + "12"), "too long"));
  EXPECT_TRUE(contains(error(good.substr(0, 20), tokens), "Megatron's magic number"));
  EXPECT_TRUE(contains(error(good.substr(0, good.size() - 1), tokens), "truncated"));
  EXPECT_TRUE(contains(error(with(0, "XX"), tokens), "Megatron's magic number"));
  EXPECT_TRUE(contains(error(with(9, "\x02"), tokens), "version is 2"));
  EXPECT_TRUE(contains(error(with(9, std::string("\0\0\0\0\0\0\0\x01", 8)), tokens), "big-endian"));
  EXPECT_TRUE(contains(error(with(17, "\x06"), tokens), "type 6"));
  EXPECT_TRUE(contains(error(with(17, "\xff"), tokens), "type 255"));
  EXPECT_TRUE(contains(error(with(18, huge), tokens), "sequences"));
  EXPECT_TRUE(contains(error(with(26, huge), tokens), "document ends"));
  EXPECT_TRUE(contains(error(good + "123", tokens), "multimodal"));
  EXPECT_TRUE(contains(error(megatron_index(8, 2, {3, -1, 4}), tokens), "length of -1"));
  EXPECT_TRUE(contains(error(megatron_index(8, 2, {3, 1, 2}, {0, 9, 3}), tokens), "out of order"));
  EXPECT_TRUE(contains(error(with(34 + 12 + 8, "\x09"), tokens), "doesn't follow"));
}

TEST(TokenFiles, WhatIsWrittenIsReadAgain) {
  Folder folder;
  std::vector<int32_t> one(1000), two = {5, 6};
  std::iota(one.begin(), one.end(), 0);
  std::vector<int64_t> both(one.begin(), one.end());
  both.insert(both.end(), two.begin(), two.end());
  for (Format format : {Format::kNanogpt, Format::kLlmc, Format::kMegatron}) {
    for (int64_t vocab : {1000, 65536, 65537, 128256}) {
      if (vocab > 65536 && format == Format::kNanogpt) continue;
      std::string path = folder / "w.bin";
      TokenWriter writer(path, format, vocab, true);
      writer.add(one, std::vector<uint8_t>(1000, 1));
      EXPECT_FALSE(std::filesystem::exists(path) && vocab == 1000 && format == Format::kNanogpt);
      writer.add(two, {0, 1});
      writer.finish();
      auto file = TokenFile::open(path);
      EXPECT_EQ(file->format(), format);
      EXPECT_EQ(all(*file), both);
      uint8_t counts[3];
      MaskFile(*file).read(999, 3, counts);
      EXPECT_EQ(counts[0] + counts[1] * 2 + counts[2] * 4, 5);
      if (format == Format::kMegatron) {
        EXPECT_EQ(file->document_starts(0, 1002), (std::vector<int64_t>{0, 1000}));
      }
    }
  }
  EXPECT_TRUE(contains(error_of([&] { TokenWriter(folder / "n.bin", Format::kNanogpt, 65537); }),
                       "16 bits"));
  EXPECT_TRUE(contains(
      error_of([&] { TokenWriter(folder / "n.bin", Format::kLlmc, 10).add({10}); }), "vocabulary"));
  EXPECT_TRUE(contains(error_of([&] { TokenWriter(folder / "n.bin", Format::kLlmc, 10).finish(); }),
                       "no tokens"));
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    EXPECT_TRUE(entry.path().filename().string().starts_with("w.")) << entry.path();
  }
}

TEST(TokenFiles, AMaskMustFitItsTokens) {
  Folder folder;
  auto file = TokenFile::open(folder.write("a.bin", bytes_of(std::vector<uint16_t>{1, 2, 3})));
  EXPECT_TRUE(contains(error_of([&] { MaskFile mask(*file); }), "a.mask"));
  folder.write("a.mask", std::string("\x01\x00", 2));
  EXPECT_TRUE(contains(error_of([&] { MaskFile mask(*file); }), "2 bytes for 3 tokens"));
  folder.write("a.mask", std::string("\x01\x00\x05", 3));
  uint8_t counts[3];
  EXPECT_TRUE(contains(error_of([&] { MaskFile(*file).read(0, 3, counts); }), "byte 2 is 5"));
}

TEST(TokenFiles, DocumentsAreFoundAmongThousands) {
  Folder folder;
  std::vector<int32_t> lengths;
  std::vector<int64_t> documents = {0}, starts;
  int64_t at = 0;
  for (int i = 0; i < 3000; ++i) {
    lengths.push_back(i % 5);  // some are empty
    starts.push_back(at);
    at += lengths.back();
    documents.push_back(i + 1);
  }
  folder.write("m.idx", megatron_index(8, 2, lengths, documents));
  auto file = TokenFile::open(folder.write("m.bin", std::string(static_cast<size_t>(2 * at), 'x')));
  for (int64_t first = 0; first + 40 <= at; first += 37) {
    std::vector<int64_t> expected;
    for (int64_t start : starts)
      if (start >= first && start < first + 40 && (expected.empty() || expected.back() != start))
        expected.push_back(start);
    EXPECT_EQ(file->document_starts(first, 40), expected) << first;
  }
}

TEST(TokenFiles, AFileThatIsCutWhileItIsReadIsAnError) {
  Folder folder;
  const std::string path = folder.write("a.bin", std::string(10'000, '\1'));
  auto file = TokenFile::open(path);
  std::filesystem::resize_file(path, 4'000);
  int64_t ids[100];
  file->read(1'900, 100, ids);
  const std::string said = error_of([&] { file->read(1'950, 100, ids); });
  EXPECT_TRUE(contains(said, path)) << said;
  EXPECT_TRUE(contains(said, "it had 10000 bytes, and ends at byte 4000")) << said;
  EXPECT_TRUE(contains(said, "resume the run")) << said;
}

// In a child, whose limit on open files isn't this process's.
TEST(TokenFiles, ThereMayBeMoreThanTheProcessMayOpen) {
  Folder folder;
  std::vector<std::string> paths;
  for (int i = 0; i < 200; ++i)
    paths.push_back(folder.write(std::to_string(i) + ".bin", std::string(64, '\1')));
  const pid_t child = fork();
  if (child == 0) {
    const rlimit limit{64, 64};
    setrlimit(RLIMIT_NOFILE, &limit);
    const std::string said = error_of([&] {
      std::vector<std::shared_ptr<TokenFile>> files;
      for (const std::string& path : paths) files.push_back(TokenFile::open(path));
      int64_t ids[32];
      for (const auto& file : files) file->read(0, 32, ids);
    });
    _exit(said.empty() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace fsdp::data
