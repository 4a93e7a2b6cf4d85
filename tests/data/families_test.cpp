// Compares our ids and texts with those of the `tokenizers` package, with tokenizers configured as
// those of today's model families, and with each supported part in other combinations. Skipped
// without the package.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>

#include "base/subprocess.h"
#include "data/base64.h"
#include "data/folders.h"
#include "data/json_tokenizer.h"
#include "data/unicode.h"
#include "paths.h"

namespace fsdp::data {
namespace {

using test::Folder;

// The folder that make_families.py fills, once for all tests.
class Families : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new Folder;
    code_ =
        run_program({test::python(), paths::source("tests/data/make_families.py"), folder_->path()},
                    false)
            .code;
    for (const auto& entry : std::filesystem::directory_iterator(folder_->path()))
      names_.push_back(entry.path().filename());
    std::sort(names_.begin(), names_.end());
  }
  static void TearDownTestSuite() { delete folder_; }

  void SetUp() override {
    if (code_ == 77 || code_ == 127)
      GTEST_SKIP() << "no Python package tokenizers (FSDP_TEST_PYTHON)";
    ASSERT_EQ(code_, 0);
    ASSERT_EQ(names_.size(), 38u);
  }

  static std::shared_ptr<const Tokenizer> tokenizer(const std::string& name) {
    return Tokenizer::load(*folder_ / name);
  }
  static nlohmann::json read(const std::string& name, const char* file) {
    return nlohmann::json::parse(test::read_file(*folder_ / (name + "/" + file)));
  }

  static inline Folder* folder_ = nullptr;
  static inline int code_ = 0;
  static inline std::vector<std::string> names_;
};

TEST_F(Families, EachGivesTheSameIdsAndDecodesToTheSameText) {
  for (const std::string& name : names_) {
    const auto ours = tokenizer(name);
    const auto cases = read(name, "strings.json");
    ASSERT_GT(cases.size(), 400u);
    for (const auto& entry : cases) {
      const std::string text = test::from_base64(entry["text"].get<std::string>());
      const auto ids = ours->encode(text);
      ASSERT_EQ(ids, entry["ids"].get<std::vector<int32_t>>()) << name << ": " << entry["text"];
      ASSERT_EQ(ours->encode(text, {.special_tokens = true}),
                entry["full"].get<std::vector<int32_t>>())
          << name;
      ASSERT_EQ(repaired(ours->decode(ids)), entry["decoded"].get<std::string>()) << name;
    }
  }
}

TEST_F(Families, AnyIdsDecodeToTheSameText) {
  for (const std::string& name : names_) {
    const auto ours = tokenizer(name);
    for (const auto& entry : read(name, "decodes.json")) {
      const auto ids = entry["ids"].get<std::vector<int32_t>>();
      ASSERT_EQ(repaired(ours->decode(ids)), entry["text"].get<std::string>())
          << name << ": " << entry["ids"];
      ASSERT_EQ(repaired(ours->decode(ids, true)), entry["shown"].get<std::string>())
          << name << ": " << entry["ids"];
    }
  }
}

TEST_F(Families, CutsAndThreadsDoNotChangeTheIds) {
  for (const std::string& name : names_) {
    std::string text;
    for (const auto& entry : read(name, "strings.json"))
      text += test::from_base64(entry["text"].get<std::string>()).substr(0, 300);
    JsonTokenizer cut(name, test::read_file(*folder_ / (name + "/tokenizer.json")), "");
    cut.set_chunk(size_t{1} << 30);
    const auto whole = cut.encode(text, {.threads = 1});
    std::mt19937 random(3);
    for (int i = 0; i < 3; ++i) {
      cut.set_chunk(1 + random() % (i < 2 ? 30 : 3000));
      const auto ids = cut.encode(text, {.threads = 1 + static_cast<int>(random() % 4)});
      EXPECT_TRUE(ids == whole) << name;
    }
  }
}

TEST_F(Families, AStreamShowsWhatDecodeReturns) {
  for (const char* name : {"llama2", "mistral", "gemma3", "t5", "unigram_bytes", "qwen3"}) {
    const auto ours = tokenizer(name);
    for (const char* text :
         {"a word", " two  spaces", "caf\xc3\xa9 \xe4\xbd\xa0 \xf0\x9f\x98\x80", "<s>x"}) {
      StreamDecoder stream(ours, false);
      std::string shown;
      const auto ids = ours->encode(text);
      for (int32_t id : ids) shown += stream.push(id);
      EXPECT_EQ(shown + stream.finish(), ours->decode(ids)) << name << ": " << text;
    }
  }
}

TEST_F(Families, ATokenIsFoundByItsSpellingAndByItsBytes) {
  const auto ours = tokenizer("llama2");
  ASSERT_TRUE(ours->id_of("<0x0A>") && ours->id_of("a"));
  EXPECT_EQ(ours->piece(*ours->id_of("<0x0A>")), "\n");
  EXPECT_EQ(ours->piece(*ours->id_of("a")), "a");
  EXPECT_EQ(ours->id_of("\n"), ours->id_of("<0x0A>"));
  ASSERT_TRUE(ours->id_of("\xe2\x96\x81"));
  EXPECT_EQ(ours->piece(*ours->id_of("\xe2\x96\x81")), " ");
  // An added token's bytes are its own text, without the space that normalizing puts before it.
  EXPECT_EQ(ours->piece(*ours->id_of("<word>")), "<word>");
}

}  // namespace
}  // namespace fsdp::data
