// The byte tokenizer, and reading a tokenizer.json: damaged and unsupported ones are refused by
// name. package_test.cpp compares ids with the `tokenizers` package.
#include "fsdp/tokenizer.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/deadline.h"
#include "data/bpe_tokenizer.h"
#include "data/folders.h"

namespace fsdp::data {
namespace {

using test::Folder;

TEST(Bytes, TokensAreBytesAndOneEnd) {
  auto bytes = Tokenizer::load("bytes");
  EXPECT_EQ(bytes->vocab_size(), 257);
  EXPECT_EQ(bytes->eos(), 256);
  std::string text = "a\xff\x00ü";
  EXPECT_EQ(bytes->encode(std::string_view("a\xff\0", 3)), (std::vector<int32_t>{97, 255, 0}));
  EXPECT_EQ(bytes->decode(bytes->encode(text)), text);
  EXPECT_EQ(bytes->decode({104, 256, 105}, true), "hi");
  EXPECT_EQ(bytes->decode({104, 256}), "h<|endoftext|>");
  EXPECT_THROW(bytes->decode({257}), Error);
  EXPECT_THROW(bytes->decode({-1}), Error);
}

TEST(Bytes, AStreamHoldsBackHalfACharacter) {
  StreamDecoder stream(Tokenizer::load("bytes"));
  EXPECT_EQ(stream.push(0xe2), "");
  EXPECT_EQ(stream.push(0x82), "");
  EXPECT_EQ(stream.push(0xac), "€");
  EXPECT_EQ(stream.push(0xf0), "");
  EXPECT_EQ(stream.push('x'), "\xef\xbf\xbdx");
  EXPECT_EQ(stream.push(0xc3), "");
  EXPECT_EQ(stream.push(256), "");
  EXPECT_EQ(stream.finish(), "\xef\xbf\xbd");
  EXPECT_EQ(stream.finish(), "");
}

// A small tokenizer.json to damage.
nlohmann::json small() {
  nlohmann::json vocab = {{"a", 0}, {"b", 1}, {"ab", 2}};
  return {
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"a b"}}}},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
      {"decoder", {{"type", "ByteLevel"}}}};
}

TEST(TokenizerJson, WhatIsNotUnderstoodIsRefusedByName) {
  using Json = nlohmann::json;
  struct Case {
    const char* pointer;
    Json value;
    const char* expected;
  };
  std::vector<Case> cases = {
      {"/model/type", "WordPiece", "model: type WordPiece"},
      {"/model/type", "Unigram", "type Unigram"},
      {"/model/dropout", 0.1, "model.dropout"},
      {"/model/unk_token", "<unk>", "model.unk_token"},
      {"/model/byte_fallback", true, "model.byte_fallback"},
      {"/model/continuing_subword_prefix", "##", "continuing_subword_prefix"},
      {"/model/end_of_word_suffix", "</w>", "end_of_word_suffix"},
      {"/model/vocab/c", 2, "another token has id 2"},
      {"/model/vocab/c", -1, "isn't a token id"},
      {"/model/vocab/c", 1e9, "isn't a token id"},
      {"/model/vocab/c", 1'000'000'000'000, "isn't a token id"},
      {"/model/vocab", Json::array(), "model.vocab"},
      {"/model/merges", {"a c"}, "\"c\" isn't in the vocabulary"},
      {"/model/merges", {"a b a"}, "isn't a pair"},
      {"/model/merges", Json::array({Json::array({"a"})}), "isn't a pair"},
      {"/model/merges", Json::array({7}), "isn't a pair"},
      {"/normalizer", {{"type", "NFKC"}}, "normalizer: type NFKC"},
      {"/normalizer",
       {{"type", "Sequence"}, {"normalizers", {{{"type", "Lowercase"}}}}},
       "Lowercase"},
      {"/pre_tokenizer", nullptr, "pre_tokenizer: has no ByteLevel"},
      {"/pre_tokenizer", {{"type", "Metaspace"}}, "pre_tokenizer: type Metaspace"},
      {"/pre_tokenizer", 7, "pre_tokenizer: isn't an object"},
      {"/pre_tokenizer",
       {{"type", "Split"}, {"pattern", {{"String", " "}}}, {"behavior", "Isolated"}},
       "only regular expressions"},
      {"/pre_tokenizer",
       {{"type", "Split"}, {"pattern", {{"Regex", " "}}}, {"behavior", "Removed"}},
       "Removed isn't supported"},
      {"/pre_tokenizer",
       {{"type", "Split"}, {"pattern", {{"Regex", "\\w+"}}}, {"behavior", "Isolated"}},
       "\\w"},
      {"/post_processor", {{"type", "BertProcessing"}}, "post_processor: type BertProcessing"},
      {"/decoder", {{"type", "Metaspace"}}, "decoder: type Metaspace"},
      {"/added_tokens",
       {{{"id", 0}, {"content", "x"}, {"special", true}}},
       "another token has id 0"},
      {"/added_tokens",
       {{{"id", 5}, {"content", "a"}, {"special", true}}},
       "another id in the vocab"},
      {"/added_tokens", {{{"id", 5}, {"content", ""}}}, "is empty"},
      {"/added_tokens", {{{"content", "x"}}}, "added_tokens[0].id"},
  };
  Folder folder;
  for (const Case& entry : cases) {
    Json root = small();
    root[Json::json_pointer(entry.pointer)] = entry.value;
    std::string file = folder.write("tokenizer.json", root.dump());
    std::string error = test::error_of([&] { Tokenizer::load(file); });
    EXPECT_TRUE(test::contains(error, entry.expected)) << entry.pointer << ": " << error;
    EXPECT_TRUE(test::contains(error, file) && test::contains(error, "HINT")) << error;
  }
  folder.write("tokenizer.json", small().dump());
  EXPECT_EQ(Tokenizer::load(folder.path())->encode("abba"), (std::vector<int32_t>{2, 1, 0}));
}

TEST(TokenizerJson, WhatIsNoTokenizerIsRefused) {
  Folder folder;
  EXPECT_TRUE(
      test::contains(test::error_of([&] { Tokenizer::load(folder / "none.json"); }), "none.json"));
  EXPECT_TRUE(
      test::contains(test::error_of([&] { Tokenizer::load(folder.path()); }), "tokenizer.json"));
  EXPECT_TRUE(
      test::contains(test::error_of([&] { Tokenizer::load(folder.write("merges.txt", "a b")); }),
                     "save_pretrained"));
  for (const char* text :
       {"", "{", "[]", "7", "version https://git-lfs", "{\"model\": {\"vocab\": {\"a\"",
        "{\"model\": 7}", "{\"model\": {\"vocab\": {}, \"merges\": []}}"}) {
    std::string file = folder.write("tokenizer.json", text);
    EXPECT_TRUE(test::contains(test::error_of([&] { Tokenizer::load(file); }), file)) << text;
  }
}

TEST(TokenizerJson, TheConfigNamesTheEndOfADocument) {
  nlohmann::json root = small();
  root["added_tokens"] = {{{"id", 7}, {"content", "<|endoftext|>"}, {"special", true}},
                          {{"id", 8}, {"content", "<stop>"}, {"special", true}}};
  Folder folder;
  folder.write("tokenizer.json", root.dump());
  EXPECT_EQ(Tokenizer::load(folder.path())->eos(), 7);
  EXPECT_EQ(Tokenizer::load(folder.path())->vocab_size(), 9);
  folder.write("tokenizer_config.json", R"({"eos_token": {"content": "<stop>"}})");
  EXPECT_EQ(Tokenizer::load(folder.path())->eos(), 8);
  EXPECT_THROW(Tokenizer::load(folder.path())->decode({3}),
               Error);  // an unused id
}

nlohmann::json small_with(const std::string& pattern) {
  nlohmann::json root = small();
  root["pre_tokenizer"] = {
      {"type", "Sequence"},
      {"pretokenizers",
       {{{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}},
        {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
  return root;
}

// It took 16 s: each of 200,000 characters looked at all that follow.
TEST(HostileTokenizers, APatternThatTakesTooLongIsNamed) {
  const test::WithDeadline deadline;
  Folder folder;
  const std::string file = folder.write("tokenizer.json", small_with("[^z]++z|[^z]").dump());
  const auto tokenizer = Tokenizer::load(file);
  for (const size_t size : {200'000, 1'000'000}) {  // one piece of work, and several
    const std::string text(size, 'a');
    for (const int threads : {1, 3}) {
      const std::string error =
          test::error_of([&] { tokenizer->encode(text, {.threads = threads}); });
      EXPECT_TRUE(test::contains(error, file) && test::contains(error, "[^z]++z|[^z]")) << error;
    }
  }
  // A budget belongs to a text, not to each of its pieces.
  nlohmann::json root = small_with("[^y]{8}");
  root["pre_tokenizer"]["pretokenizers"].insert(
      root["pre_tokenizer"]["pretokenizers"].begin() + 1,
      small_with("(?:a|a?)(?:a|a?)(?:a|a?)(?:a|a?)(?:a|a?)(?:a|a?)(?:a|a?)(?:a|a?)(?:a|a?)z|a")
          ["pre_tokenizer"]["pretokenizers"][0]);
  const auto many = Tokenizer::load(folder.write("tokenizer.json", root.dump()));
  EXPECT_TRUE(test::contains(test::error_of([&] { many->encode(std::string(200'000, 'a')); }),
                             "more than 200 times"));
}

// Each piece of work looked at all of the word, from its own place on.
TEST(HostileTokenizers, AWordOfManyChunksIsLookedAtOnce) {
  const test::WithDeadline deadline;
  const auto json = small_with("[^\\s]+|\\s+");
  BpeTokenizer cut("cut", json.dump(), ""), whole("whole", json.dump(), "");
  cut.set_chunk(16);
  whole.set_chunk(size_t{1} << 30);
  std::string text;
  while (text.size() < 300'000) text += "ab";
  for (const std::string& each : {text, text + " " + text, "a b " + text}) {
    const auto ids = cut.encode(each, {.threads = 2});
    EXPECT_EQ(ids.size(), whole.encode(each, {.threads = 1}).size());
    EXPECT_EQ(ids, whole.encode(each, {.threads = 1}));
  }
}

// Each of these tokens looked at all the spaces beside it.
TEST(HostileTokenizers, TokensOfSpacesTakeTheSpacesOnce) {
  const test::WithDeadline deadline;
  const auto token = [](int id, const char* content, bool left, bool right) {
    return nlohmann::json{{"id", id}, {"content", content}, {"lstrip", left}, {"rstrip", right}};
  };
  const std::string spaces(200'000, ' ');
  for (const auto& [left, right] : {std::pair{true, false}, {false, true}, {true, true}}) {
    nlohmann::json root = small();
    root["added_tokens"] = {token(7, " ", left, right), token(8, "x", left, right)};
    BpeTokenizer tokenizer("spaces", root.dump(), "");
    const auto ids = tokenizer.encode("a" + spaces + "x" + spaces + "b", {});
    EXPECT_EQ(std::count(ids.begin(), ids.end(), 7), 400'000);
    EXPECT_EQ(std::count(ids.begin(), ids.end(), 8), 1);
    EXPECT_EQ(ids.front(), 0);
    EXPECT_EQ(ids.back(), 1);
  }
  nlohmann::json root = small();
  root["added_tokens"] = {token(7, std::string(1'001, 'x').c_str(), false, false)};
  EXPECT_TRUE(test::contains(test::error_of([&] { BpeTokenizer("long", root.dump(), ""); }),
                             "added_tokens[0].content"));
}

TEST(HostileTokenizers, AFifoInPlaceOfAFileIsRefused) {
  const test::WithDeadline deadline;
  Folder folder;
  ASSERT_EQ(::mkfifo((folder / "tokenizer.json").c_str(), 0600), 0);
  EXPECT_TRUE(
      test::contains(test::error_of([&] { Tokenizer::load(folder.path()); }), "it is a FIFO"));
  std::filesystem::remove(folder / "tokenizer.json");
  folder.write("tokenizer.json", small().dump());
  ASSERT_EQ(::mkfifo((folder / "tokenizer_config.json").c_str(), 0600), 0);
  EXPECT_TRUE(
      test::contains(test::error_of([&] { Tokenizer::load(folder.path()); }), "it is a FIFO"));
}

}  // namespace
}  // namespace fsdp::data
