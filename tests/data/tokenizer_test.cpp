// The byte tokenizer, and reading a tokenizer.json: damaged and unsupported ones are refused by
// name. package_test.cpp compares ids with the `tokenizers` package.
#include "fsdp/tokenizer.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/deadline.h"
#include "data/folders.h"
#include "data/json_tokenizer.h"

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
  const std::string long_text(1'001, 'x');
  std::vector<Case> cases = {
      {"/model/type", "WordPiece", "model: type WordPiece"},
      {"/model/type", "Unigram", "type Unigram isn't supported behind the pre-tokenizer ByteLevel"},
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
      {"/normalizer", {{"type", "NFKD"}}, "normalizer: type NFKD"},
      {"/normalizer", {{"type", "Sequence"}, {"normalizers", {{{"type", "Nmt"}}}}}, "Nmt"},
      {"/normalizer", {{"type", "Precompiled"}}, "normalizer.precompiled_charsmap: is missing"},
      {"/normalizer", {{"type", "Prepend"}}, "normalizer.prepend"},
      {"/normalizer", {{"type", "Prepend"}, {"prepend", long_text}}, "has 1001 bytes"},
      {"/normalizer", {{"type", "Replace"}, {"content", "x"}}, "normalizer.pattern"},
      {"/normalizer",
       {{"type", "Replace"}, {"pattern", {{"String", ""}}}, {"content", "x"}},
       "neither a String nor a Regex"},
      {"/normalizer",
       {{"type", "Replace"}, {"pattern", {{"Regex", "a*"}}}, {"content", "x"}},
       "matches the empty text"},
      {"/pre_tokenizer", nullptr, "decoder: type ByteLevel needs the pre-tokenizer ByteLevel"},
      {"/pre_tokenizer", {{"type", "BertPreTokenizer"}}, "pre_tokenizer: type BertPreTokenizer"},
      {"/pre_tokenizer", {{"type", "Metaspace"}}, "pre_tokenizer.replacement"},
      {"/pre_tokenizer", {{"type", "Metaspace"}, {"replacement", "ab"}}, "isn't one character"},
      {"/pre_tokenizer",
       {{"type", "Metaspace"}, {"replacement", "_"}, {"prepend_scheme", "last"}},
       "last isn't supported"},
      {"/pre_tokenizer",
       {{"type", "Metaspace"}, {"replacement", "_"}, {"add_prefix_space", false}},
       "contradicts prepend_scheme"},
      {"/pre_tokenizer", 7, "pre_tokenizer: isn't an object"},
      {"/pre_tokenizer", {{"type", "Digits"}}, "individual_digits"},
      {"/pre_tokenizer",
       {{"type", "Split"}, {"pattern", {{"Regex", " "}}}, {"behavior", "Sideways"}},
       "Sideways isn't supported"},
      {"/pre_tokenizer",
       {{"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "ByteLevel"}}, {{"type", "Digits"}, {"individual_digits", true}}}}},
       "a step follows ByteLevel"},
      {"/pre_tokenizer",
       {{"type", "Split"}, {"pattern", {{"Regex", "\\w+"}}}, {"behavior", "Isolated"}},
       "\\w"},
      {"/post_processor", {{"type", "BertProcessing"}}, "post_processor: type BertProcessing"},
      {"/decoder", {{"type", "Metaspace"}}, "decoder: type Metaspace"},
      {"/decoder", {{"type", "WordPiece"}}, "decoder: type WordPiece"},
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

// A small tokenizer.json of characters.
nlohmann::json characters() {
  nlohmann::json root = small();
  root["model"]["vocab"] = {{"a", 0}, {"b", 1}, {"ab", 2}, {"_", 3}, {"<unk>", 4}};
  root["model"]["unk_token"] = "<unk>";
  root["pre_tokenizer"] = nullptr;
  root["decoder"] = {{"type", "Fuse"}};
  return root;
}

nlohmann::json scores() {
  nlohmann::json root = characters();
  nlohmann::json vocab = nlohmann::json::array();
  for (const auto& [token, score] :
       {std::pair{"<unk>", 0.0}, {"a", -1.0}, {"b", -1.5}, {"ab", -2.0}})
    vocab.push_back(nlohmann::json::array({token, score}));
  root["model"] = {{"type", "Unigram"}, {"unk_id", 0}, {"vocab", vocab}};
  return root;
}

TEST(TokenizerJson, PartsForCharactersAreCheckedToo) {
  using Json = nlohmann::json;
  const Json metaspace = {{"type", "Metaspace"}, {"replacement", "_"}, {"prepend_scheme", "first"}};
  Json strip_first = characters();
  strip_first["pre_tokenizer"] = metaspace;
  strip_first["normalizer"] = {{"type", "Strip"}, {"strip_left", true}, {"strip_right", false}};
  Json emptied = characters();
  emptied["normalizer"] = {{"type", "Replace"}, {"pattern", {{"String", "x"}}}, {"content", ""}};
  emptied["added_tokens"] = {{{"id", 9}, {"content", "xx"}, {"normalized", true}}};
  const auto changed = [](Json root, const char* pointer, const Json& value) {
    root[Json::json_pointer(pointer)] = value;
    return root;
  };
  const std::vector<std::pair<Json, const char*>> cases = {
      {strip_first, "first isn't supported with a normalizer"},
      {emptied, "\"xx\" is normalized to nothing"},
      {changed(characters(), "/decoder", nullptr), "decoder: is missing"},
      {changed(characters(), "/decoder", {{"type", "ByteLevel"}}), "needs the pre-tokenizer"},
      {changed(characters(), "/decoder", {{"type", "CTC"}}), "decoder: type CTC"},
      {changed(characters(), "/decoder", {{"type", "Strip"}, {"content", "ab"}}),
       "decoder.content"},
      {changed(characters(), "/decoder", {{"type", "Strip"}, {"content", "a"}}), "decoder.start"},
      {changed(characters(), "/model/unk_token", "x"), "\"x\" isn't in the vocabulary"},
      {changed(scores(), "/model/unk_id", nullptr), "model.unk_id: is missing"},
      {changed(scores(), "/model/unk_id", 4), "4 isn't in the vocabulary"},
      {changed(scores(), "/model/vocab/1", Json::array({"a"})), "isn't a token and its score"},
      {changed(scores(), "/model/vocab/1", Json::array({"b", 1})), "appears twice"},
      {changed(scores(), "/model/vocab/1", Json::array({std::string(1'001, 'x'), 1})),
       "1001 bytes"},
      {changed(scores(), "/model/vocab", Json::array()), "model.vocab: is empty"},
  };
  for (const auto& [root, expected] : cases) {
    const std::string error = test::error_of([&] { JsonTokenizer("small", root.dump(), ""); });
    EXPECT_TRUE(test::contains(error, expected)) << root << ": " << error;
  }
  EXPECT_EQ(JsonTokenizer("small", characters().dump(), "").encode("abxb", {}),
            (std::vector<int32_t>{2, 4, 1}));
  EXPECT_EQ(JsonTokenizer("small", scores().dump(), "").encode("abxyb", {}),
            (std::vector<int32_t>{3, 0, 2}));
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
  JsonTokenizer cut("cut", json.dump(), ""), whole("whole", json.dump(), "");
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
    JsonTokenizer tokenizer("spaces", root.dump(), "");
    const auto ids = tokenizer.encode("a" + spaces + "x" + spaces + "b", {});
    EXPECT_EQ(std::count(ids.begin(), ids.end(), 7), 400'000);
    EXPECT_EQ(std::count(ids.begin(), ids.end(), 8), 1);
    EXPECT_EQ(ids.front(), 0);
    EXPECT_EQ(ids.back(), 1);
  }
  nlohmann::json root = small();
  root["added_tokens"] = {token(7, std::string(1'001, 'x').c_str(), false, false)};
  EXPECT_TRUE(test::contains(test::error_of([&] { JsonTokenizer("long", root.dump(), ""); }),
                             "added_tokens[0].content"));
}

// Each step doubles the text, or puts much in the place of each character.
TEST(HostileTokenizers, StepsThatMakeTooMuchTextAreNamed) {
  const test::WithDeadline deadline;
  const auto sequence = [](const char* key, const nlohmann::json& step, int count) {
    nlohmann::json steps = nlohmann::json::array();
    for (int i = 0; i < count; ++i) steps.push_back(step);
    return nlohmann::json{{"type", "Sequence"}, {key, steps}};
  };
  const auto replace = [](const std::string& by) {
    return nlohmann::json{{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", by}};
  };
  const std::string text(200'000, 'a');
  for (const auto& step : {sequence("normalizers", replace("aa"), 60),
                           sequence("normalizers", replace(std::string(900, 'a')), 2)}) {
    nlohmann::json root = characters();
    root["normalizer"] = step;
    const std::string error =
        test::error_of([&] { JsonTokenizer("doubled", root.dump(), "").encode(text, {}); });
    EXPECT_TRUE(test::contains(error, "doubled: normalizer.normalizers makes more than")) << error;
  }
  nlohmann::json root = characters();
  root["decoder"] = sequence("decoders", replace("aa"), 60);
  EXPECT_TRUE(test::contains(test::error_of([&] { JsonTokenizer("doubled", root.dump(), ""); }),
                             "doubled: decoder.decoders makes more than"));
  root = characters();
  const nlohmann::json one = {
      {"type", "Split"}, {"pattern", {{"Regex", "."}}}, {"behavior", "Isolated"}};
  auto& steps = root["pre_tokenizer"] = sequence("pretokenizers", one, 60);
  for (int i = 0; i < 60; i += 2) {
    steps["pretokenizers"][i] = {
        {"type", "Metaspace"}, {"replacement", i % 4 ? "_" : "-"}, {"split", false}};
  }
  EXPECT_TRUE(
      test::contains(test::error_of([&] {
                       JsonTokenizer("doubled", root.dump(), "").encode(text.substr(0, 20'000), {});
                     }),
                     "looks at each byte of a text more than 200 times"));
  steps = sequence("pretokenizers", one, 65);
  EXPECT_TRUE(test::contains(test::error_of([&] { JsonTokenizer("long", root.dump(), ""); }),
                             "has too many steps"));
}

// A text without a pre-tokenizer is one word, and so is one without spaces.
TEST(HostileTokenizers, AWordOfMegabytesTakesTimeLinearInIt) {
  const test::WithDeadline deadline;
  const std::string text(2'000'000, 'a');
  nlohmann::json root = scores();
  std::string token;
  for (int i = 0; i < 8; ++i)
    root["model"]["vocab"].push_back(nlohmann::json::array({token += "aa", -3.0 * (i + 1)}));
  EXPECT_EQ(JsonTokenizer("long", root.dump(), "").encode(text, {}).size(), 2'000'000u);
  root = characters();
  root["model"]["vocab"]["aa"] = 9;
  root["model"]["vocab"]["aaaa"] = 10;
  root["model"]["merges"] = {"a a", "aa aa"};
  EXPECT_EQ(JsonTokenizer("long", root.dump(), "").encode(text, {}).size(), 500'000u);
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
