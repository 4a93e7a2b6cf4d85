// Sources: many files form one sequence of tokens, however it is read.
#include "data/source.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>

#include "data/bpe.h"
#include "data/folders.h"
#include "data/jsonl.h"
#include "data/text_source.h"
#include "data/token_file.h"
#include "data/token_writer.h"

namespace fsdp::data {
namespace {

using test::bytes_of;
using test::contains;
using test::error_of;
using test::Folder;

std::vector<int64_t> all(const TokenSource& source) {
  std::vector<int64_t> ids(source.tokens());
  source.read(0, source.tokens(), ids.data());
  return ids;
}

// Every range that is read must equal that range of the whole.
void expect_random_access(const TokenSource& source) {
  auto whole = all(source);
  std::mt19937 random(3);
  for (int i = 0; i < 200; ++i) {
    auto first = static_cast<int64_t>(random() % whole.size());
    auto count = static_cast<int64_t>(random() % (whole.size() - first + 1));
    std::vector<int64_t> part(count);
    source.read(first, count, part.data());
    ASSERT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + first))
        << first << " " << count;
  }
}

SourceOptions text_options(std::vector<std::string> paths) {
  SourceOptions options;
  options.paths = std::move(paths);
  options.tokenizer = Tokenizer::load("bytes");
  return options;
}

// A BPE tokenizer with all bytes, two merges and an end-of-document token.
std::string write_tokenizer(const Folder& folder) {
  nlohmann::json vocab;
  for (int byte = 0; byte < 256; ++byte)
    vocab[token_of_byte(static_cast<unsigned char>(byte))] = byte;
  vocab["th"] = 256, vocab["the"] = 257;
  nlohmann::json root = {
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"t h", "th e"}}}},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
      {"added_tokens", {{{"id", 258}, {"content", "<|endoftext|>"}, {"special", true}}}}};
  return folder.write("tok/tokenizer.json", root.dump());
}

TEST(Sources, TextIsItsBytesWithAnEndBehindEachFile) {
  Folder folder;
  folder.write("t/b.txt", "xy");
  folder.write("t/a/deep.md", "\xff");
  folder.write("t/a/.hidden", "no");
  folder.write("t/.git/config", "no");
  folder.write("t/empty.txt", "");
  folder.write("t/picture.png", std::string("a\0b", 3));
  auto source = open_source(text_options({folder / "t"}));
  EXPECT_EQ(all(*source), (std::vector<int64_t>{255, 256, 'x', 'y', 256}));
  EXPECT_EQ(source->info().files, 2);
  EXPECT_EQ(source->info().bytes, 3);
  EXPECT_EQ(source->info().kind, "text as bytes");
  EXPECT_EQ(source->where(3), (folder / "t/b.txt") + ": byte 1");
}

TEST(Sources, LargeAndSmallFilesAreReadAlike) {
  Folder folder;
  std::mt19937 random(1);
  std::vector<int64_t> expected;
  std::vector<std::string> paths;
  for (size_t size : {1, 5000, (1 << 20) + 3, 1 << 20, 77}) {
    std::string text(size, ' ');
    for (char& c : text) c = static_cast<char>('a' + random() % 26);
    paths.push_back(folder.write("f" + std::to_string(paths.size()), text));
    for (char c : text) expected.push_back(c);
    expected.push_back(256);
  }
  auto source = open_source(text_options(paths));
  EXPECT_TRUE(all(*source) == expected);
  expect_random_access(*source);
}

TEST(Sources, TokenFilesOfAFolderFollowEachOther) {
  Folder folder;
  auto write = [&](const char* name, Format format, std::vector<int32_t> ids) {
    std::filesystem::create_directories(folder / "d");
    TokenWriter writer(folder / name, format, 300);
    writer.add(ids);
    writer.finish();
  };
  write("d/2.bin", Format::kLlmc, {3, 4});
  write("d/1.bin", Format::kMegatron, {1, 2});
  write("d/3.bin", Format::kNanogpt, {5});
  folder.write("d/notes.txt", "not tokens");
  SourceOptions options;
  options.paths = {folder / "d"};
  auto source = open_source(options);
  EXPECT_EQ(all(*source), (std::vector<int64_t>{1, 2, 3, 4, 5}));
  EXPECT_EQ(source->info().kind, "mixed");
  EXPECT_EQ(source->document_starts(0, 5), (std::vector<int64_t>{0}));
  expect_random_access(*source);
  options.format = Format::kLlmc;
  EXPECT_TRUE(contains(error_of([&] { open_source(options); }), "1.bin"));
}

TEST(Sources, MasksAreReadBesideTheirTokens) {
  Folder folder;
  folder.write("a.bin", bytes_of(std::vector<uint16_t>{1, 2, 3}));
  folder.write("a.mask", std::string("\x00\x01\x00", 3));
  SourceOptions options;
  options.paths = {folder / "a.bin", folder / "a.bin"};
  options.loss_mask = true;
  auto source = open_source(options);
  EXPECT_TRUE(source->has_mask());
  std::vector<uint8_t> counts(6);
  source->read_mask(0, 6, counts.data());
  EXPECT_EQ(counts, (std::vector<uint8_t>{0, 1, 0, 0, 1, 0}));
  options.loss_mask = false;
  auto plain = open_source(options);
  plain->read_mask(1, 4, counts.data());
  EXPECT_EQ(counts[0] + counts[1] + counts[2] + counts[3], 4);
}

TEST(Sources, TokenisedTextIsTheSameFromMemoryAndFromTheCache) {
  Folder folder;
  std::string tokenizer_file = write_tokenizer(folder);
  auto options =
      text_options({folder.write("t/1.txt", "the thaw"), folder.write("t/2.txt", "eth")});
  options.tokenizer = Tokenizer::load(tokenizer_file);
  std::vector<int64_t> expected = {257, ' ', 256, 'a', 'w', 258, 'e', 256, 258};
  EXPECT_EQ(all(*open_source(options)), expected);

  options.cache_dir = folder / "cache";
  auto cached = open_source(options);
  EXPECT_EQ(all(*cached), expected);
  EXPECT_EQ(cached->info().kind, "text");
  EXPECT_EQ(cached->info().files, 2);
  auto entries = [&] {
    int count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(options.cache_dir)) {
      count += entry.path().extension() == ".bin";
    }
    return count;
  };
  EXPECT_EQ(entries(), 1);
  open_source(options);
  EXPECT_EQ(entries(), 1);
  folder.write("t/2.txt", "ethe");  // another size: another key
  EXPECT_EQ(all(*open_source(options)).back(), 258);
  EXPECT_EQ(open_source(options)->tokens(), 9);
  EXPECT_EQ(entries(), 2);
}

TEST(Sources, WhatCannotBeReadIsRefusedWithAHint) {
  Folder folder;
  auto error = [&](SourceOptions options) {
    std::string text = error_of([&] { open_source(options); });
    EXPECT_TRUE(contains(text, "HINT")) << text;
    return text;
  };
  EXPECT_TRUE(contains(error(text_options({})), "no data"));
  EXPECT_TRUE(contains(error(text_options({folder / "none"})), "none"));
  EXPECT_TRUE(contains(error(text_options({folder.path()})), "no text"));
  EXPECT_TRUE(contains(error(text_options({folder.write("e.txt", "")})), "no text"));
  EXPECT_TRUE(
      contains(error(text_options({folder.write("z", std::string("a\0", 2))})), "zero byte"));
  EXPECT_TRUE(contains(error(text_options({folder.write("c.jsonl", "{}")})), "line 1: has no"));
  auto options = text_options({folder.write("t.txt", "text")});
  options.loss_mask = true;
  EXPECT_TRUE(contains(error(options), "loss mask"));
  options.loss_mask = false;
  options.tokenizer = nullptr;
  EXPECT_TRUE(contains(error(options), "no tokenizer"));
  options.format = Format::kLlmc;
  options.paths = {folder.path()};
  EXPECT_TRUE(contains(error(options), "no token file"));
}

// A memory map would end the process by SIGBUS.
TEST(Sources, TextThatIsCutWhileItIsInUseIsAnErrorThatNamesTheFile) {
  Folder folder;
  for (const size_t size :
       {size_t{5000}, size_t{2} << 20}) {  // opened for each read, and kept open
    const std::string path = folder.write("cut.txt", std::string(size, 'a'));
    const auto source = open_source(text_options({path}));
    std::filesystem::resize_file(path, 100);
    const std::string error = error_of([&] { all(*source); });
    EXPECT_TRUE(contains(
        error, path + " was cut while it was in use: it had " + std::to_string(size) + " bytes"))
        << error;
  }
  const std::string path = folder.write("cut.txt", std::string(5000, 'a'));
  const std::vector<FoundFile> files = {describe_file(path)};
  std::filesystem::resize_file(path, 100);
  const std::string error = error_of(
      [&] { tokenise_files(files, *Tokenizer::load("bytes"), 2, [](std::vector<int32_t>&&) {}); });
  EXPECT_TRUE(contains(error, path + " was cut while it was in use: it had 5000 bytes")) << error;
}

TEST(JsonLines, CompletionsCountAndPromptsDoNot) {
  Folder folder;
  std::string path = folder.write("c.jsonl",
                                  "{\"prompt\": \"ab\", \"completion\": \"c\"}\r\n\n"
                                  "{\"prompt\": \"\", \"completion\": \"\\u00e9\"}");
  auto tokenizer = Tokenizer::load("bytes");
  EXPECT_EQ(kind_of_lines(path, {}), LineKind::kPrompts);
  std::vector<int32_t> ids;
  std::vector<uint8_t> counts;
  tokenise_jsonl(path, *tokenizer, {}, [&](JsonlDocument&& document) {
    ids.insert(ids.end(), document.ids.begin(), document.ids.end());
    counts.insert(counts.end(), document.counts.begin(), document.counts.end());
  });
  EXPECT_EQ(ids, (std::vector<int32_t>{'a', 'b', 'c', 256, 0xc3, 0xa9, 256}));
  EXPECT_EQ(counts, (std::vector<uint8_t>{0, 0, 1, 1, 1, 1, 1}));
}

TEST(JsonLines, AreTheSameHoweverTheFileIsRead) {
  Folder folder;
  const std::string lines =
      "\n{\"text\": \"a\"}\n\n \n{\"text\": \"longer than many reads\"}\n\n{\"text\": \"\"}";
  const std::string path = folder.write("c.jsonl", lines);
  const std::string wrong = folder.write("wrong.jsonl", lines + "\n\n{}\n");
  auto tokenizer = Tokenizer::load("bytes");
  for (const int64_t batch : {1, 2, 3, 7, 16, 17, 1 << 20}) {
    JsonlOptions options;
    options.batch = batch;
    EXPECT_EQ(kind_of_lines(path, options), LineKind::kText);
    std::vector<size_t> sizes;
    tokenise_jsonl(path, *tokenizer, options,
                   [&](JsonlDocument&& document) { sizes.push_back(document.ids.size()); });
    EXPECT_EQ(sizes, (std::vector<size_t>{2, 23, 1})) << batch;
    EXPECT_TRUE(contains(
        error_of([&] { tokenise_jsonl(wrong, *tokenizer, options, [](JsonlDocument&&) {}); }),
        "line 9: has no \"text\""))
        << batch;
  }
}

TEST(JsonLines, AFileThatIsCutMeanwhileIsAnErrorThatNamesIt) {
  Folder folder;
  std::string lines;
  for (int i = 0; i < 1000; ++i) lines += "{\"text\": \"a\"}\n";
  const std::string path = folder.write("cut.jsonl", lines);
  JsonlOptions options;
  options.batch = 4096;
  const std::string error = error_of([&] {
    tokenise_jsonl(path, *Tokenizer::load("bytes"), options,
                   [&](JsonlDocument&&) { std::filesystem::resize_file(path, 100); });
  });
  EXPECT_TRUE(contains(error, path + " was cut while it was in use: it had 14000 bytes")) << error;
}

TEST(JsonLines, WhatIsWrongIsNamedByItsLine) {
  Folder folder;
  auto tokenizer = Tokenizer::load("bytes");
  auto error = [&](const std::string& content) {
    std::string path = folder.write("c.jsonl", content);
    return error_of([&] { tokenise_jsonl(path, *tokenizer, {}, [](JsonlDocument&&) {}); });
  };
  EXPECT_EQ(error("{\"text\": \"a\"}\n"), "");
  EXPECT_TRUE(contains(error("{\"text\": \"a\"}\n\n{\"text\": 7}\n"), "line 3"));
  EXPECT_TRUE(contains(error("{\"text\": \"a\"}\n{\"text\": \"b\""), "line 2: isn't JSON"));
  EXPECT_TRUE(contains(error("[1]\n"), "line 1: isn't an object"));
  EXPECT_TRUE(contains(error("{\"body\": \"a\"}\n"), "--text-field"));
  EXPECT_TRUE(
      contains(error("{\"text\": \"a\"}\n{\"prompt\": \"a\", \"completion\": \"b\"}\n"), "unlike"));
  EXPECT_TRUE(contains(error("\n\n"), "no lines"));
}

}  // namespace
}  // namespace fsdp::data
