// Compares our ids with those of the `tokenizers` package, with tokenizers that it trained and on
// difficult text. One ctest entry, because making the tokenizers takes most of the time. Skipped
// without the package.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>

#include "base/subprocess.h"
#include "data/base64.h"
#include "data/folders.h"
#include "data/json_tokenizer.h"
#include "data/unicode.h"
#include "fsdp/tokenizer.h"
#include "paths.h"

namespace fsdp::data {
namespace {

using test::Folder;

// The folder that make_tokenizers.py fills, once for all tests.
class Package : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new Folder;
    code_ = run_program(
                {test::python(), paths::source("tests/data/make_tokenizers.py"), folder_->path()},
                false)
                .code;
  }
  static void TearDownTestSuite() { delete folder_; }

  void SetUp() override {
    if (code_ == 77 || code_ == 127)
      GTEST_SKIP() << "no Python package tokenizers (FSDP_TEST_PYTHON)";
    ASSERT_EQ(code_, 0);
  }

  static std::shared_ptr<const Tokenizer> tokenizer(const std::string& name) {
    return Tokenizer::load(*folder_ / name);
  }
  static std::string corpus() { return test::read_file(*folder_ / "corpus.bin"); }
  static std::vector<int32_t> corpus_ids(const std::string& name) {
    std::string bytes = test::read_file(*folder_ / (name + "/corpus.ids"));
    std::vector<int32_t> ids(bytes.size() / 4);
    std::memcpy(ids.data(), bytes.data(), bytes.size());
    return ids;
  }

  static inline Folder* folder_ = nullptr;
  static inline int code_ = 0;
};

// Shows only the first difference: lists of millions of ids don't help.
void expect_same(const std::vector<int32_t>& ours, const std::vector<int32_t>& theirs,
                 const std::string& what) {
  auto [a, b] = std::mismatch(ours.begin(), ours.end(), theirs.begin(), theirs.end());
  EXPECT_TRUE(a == ours.end() && b == theirs.end())
      << what << ": " << ours.size() << " and " << theirs.size() << " ids, first different at "
      << a - ours.begin() << ": " << (a == ours.end() ? -1 : *a) << " and "
      << (b == theirs.end() ? -1 : *b);
}

TEST_F(Package, MegabytesOfMixedAndBrokenTextGiveTheSameIds) {
  std::string text = corpus();
  ASSERT_GT(text.size(), 2'900'000u);
  ASSERT_LT(valid_prefix(text), text.size());
  for (const char* name : {"gpt2", "llama3", "qwen2"}) {
    auto ids = tokenizer(name)->encode(text);
    ASSERT_GT(ids.size(), 300'000u);
    expect_same(ids, corpus_ids(name), name);
  }
}

TEST_F(Package, SingleStringsGiveTheSameIdsAndDecodeToTheSameText) {
  for (const char* name :
       {"gpt2", "prefix", "gaps", "whole", "some_bytes", "cased", "qwen2", "llama3"}) {
    auto ours = tokenizer(name);
    auto cases =
        nlohmann::json::parse(test::read_file(*folder_ / (std::string(name) + "/strings.json")));
    ASSERT_GT(cases.size(), 600u);
    for (const auto& entry : cases) {
      std::string text = test::from_base64(entry["text"].get<std::string>());
      auto theirs = entry["ids"].get<std::vector<int32_t>>();
      auto ids = ours->encode(text);
      ASSERT_EQ(ids, theirs) << name << ": " << entry["text"];
      EncodeOptions full;
      full.special_tokens = true;
      ASSERT_EQ(ours->encode(text, full), entry["full"].get<std::vector<int32_t>>()) << name;
      // The package makes decoded bytes valid UTF-8; here the caller does.
      ASSERT_EQ(repaired(ours->decode(ids)), entry["decoded"].get<std::string>()) << name;
    }
  }
}

TEST_F(Package, CutsAndThreadsDoNotChangeTheIds) {
  std::string text = corpus().substr(1'000'000, 100'000) + std::string(900, ' ') + "x" +
                     std::string(900, '\n') + std::string(700, 'q');
  for (const char* name : {"gpt2", "gaps", "cased", "llama3", "qwen2"}) {
    JsonTokenizer cut(name, test::read_file(*folder_ / (std::string(name) + "/tokenizer.json")),
                      "");
    cut.set_chunk(size_t{1} << 30);
    EncodeOptions alone;
    alone.threads = 1;
    auto whole = cut.encode(text, alone);
    std::mt19937 random(7);
    for (int i = 0; i < 12; ++i) {
      cut.set_chunk(1 + random() % (i < 4 ? 20 : 5000));
      EncodeOptions many;
      many.threads = 1 + static_cast<int>(random() % 8);
      expect_same(cut.encode(text, many), whole, name);
    }
  }
}

TEST_F(Package, BatchesAreTheSameAsSingleTexts) {
  auto ours = tokenizer("llama3");
  std::string text = corpus();
  std::vector<std::string_view> texts = {"", "a", std::string_view(text).substr(0, 2'500'000)};
  for (size_t at = 0; at < 100'000; at += 997)
    texts.push_back(std::string_view(text).substr(at, 997));
  auto batch = ours->encode_batch(texts);
  for (size_t i = 0; i < texts.size(); ++i) expect_same(batch[i], ours->encode(texts[i]), "text");
}

TEST_F(Package, ValidTextComesBackFromItsIds) {
  std::string text = repaired(corpus().substr(0, 1'000'000));
  for (const char* name : {"gpt2", "llama3"}) {
    auto ours = tokenizer(name);
    // Tokens with lstrip or rstrip swallow spaces; without them decoding returns the text.
    std::string plain;
    for (char c : text) plain += c == '<' ? '(' : c;
    EXPECT_TRUE(ours->decode(ours->encode(plain)) == plain) << name;
  }
}

TEST_F(Package, AStreamShowsTheSameTextCharacterByCharacter) {
  auto ours = tokenizer("gpt2");
  std::string text = repaired(corpus().substr(0, 20'000));
  auto ids = ours->encode(text);
  StreamDecoder stream(ours, false);
  std::string shown;
  for (int32_t id : ids) {
    std::string part = stream.push(id);
    ASSERT_EQ(valid_prefix(part), part.size());
    shown += part;
  }
  shown += stream.finish();
  EXPECT_TRUE(shown == repaired(ours->decode(ids)));
}

TEST_F(Package, ASavedTokenizerIsTheSame) {
  Folder copy;
  auto ours = tokenizer("llama3");
  ours->save(copy.path());
  auto again = Tokenizer::load(copy.path());
  EXPECT_EQ(again->json(), ours->json());
  EXPECT_EQ(again->eos(), ours->eos());
  EXPECT_EQ(again->eos(), ours->id_of("<|endoftext|>"));
  EXPECT_EQ(again->bos(), ours->id_of("<|begin_of_text|>"));
}

}  // namespace
}  // namespace fsdp::data
