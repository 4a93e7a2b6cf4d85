// Conversations as JSON lines: every kind of line, what counts in the loss, and bad lines.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "data/batches.h"
#include "data/bpe.h"
#include "data/chat_format.h"
#include "data/folders.h"
#include "data/jsonl.h"
#include "data/source.h"

namespace fsdp::data {
namespace {

using test::contains;
using test::error_of;
using test::Folder;

constexpr const char* kTemplate =
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.thinking }}"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %};\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ note }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}";

JsonlOptions with_template(const Folder& folder, const std::string& text = kTemplate) {
  JsonlOptions options;
  options.chat_template = folder.write("chat.jinja", text);
  return options;
}

// Each document with [what counts], and "$" for the end of a document.
std::string learned(const std::string& path, const Tokenizer& tokenizer,
                    const JsonlOptions& options) {
  std::string all;
  const auto skipped = tokenise_jsonl(path, tokenizer, options, [&](JsonlDocument&& document) {
    bool counts = false;
    for (size_t i = 0; i <= document.ids.size(); ++i) {
      const bool now = i < document.ids.size() && document.counts[i];
      if (now != counts) all += now ? "[" : "]";
      counts = now;
      if (i == document.ids.size()) continue;
      const int32_t id = document.ids[i];
      all += id == tokenizer.eos() ? "$" : std::string(tokenizer.piece(id));
    }
    all += "|";
  });
  if (skipped.count > 0) all += std::to_string(skipped.count) + " skipped: " + skipped.first;
  return all;
}

TEST(Chats, EveryKindOfLineIsKnownByItself) {
  Folder folder;
  const auto tokenizer = Tokenizer::load("bytes");
  const JsonlOptions options = with_template(folder);
  struct Case {
    const char* line;
    LineKind kind;
    const char* expected;
  };
  for (
      const Case& entry : std::vector<Case>{
          {R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})",
           LineKind::kMessages, "<user>a;\n<assistant>[b;]\n|"},
          {R"({"tools": "[1]", "chat_template_kwargs": {"note": "n"}, "messages": [{"role": "assistant", "content": "x"}]})",
           LineKind::kMessages, "<assistant>[x;]\n[1]n|"},
          {R"({"messages": [{"role": "assistant", "content": "a", "reasoning": "r", "tool_calls": [{"b": 1, "a": 2}]}]})",
           LineKind::kMessages, "<assistant>[ar{\"b\": 1, \"a\": 2};]\n|"},
          {R"({"system": "s", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]})",
           LineKind::kShareGpt, "<system>s;\n<user>a;\n<assistant>[b;]\n|"},
          {R"({"instruction": "a", "input": "i", "output": "b"})", LineKind::kAlpaca,
           "<user>a\n\ni;\n<assistant>[b;]\n|"},
          {R"({"instruction": "a", "input": "", "output": "b"})", LineKind::kAlpaca,
           "<user>a;\n<assistant>[b;]\n|"},
          {R"({"prompt": "a", "completion": "b"})", LineKind::kPrompts, "a[b$]|"},
          {R"({"text": "a"})", LineKind::kText, "[a$]|"},
      }) {
    const std::string path = folder.write("c.jsonl", entry.line);
    EXPECT_EQ(kind_of_lines(path, options), entry.kind) << entry.line;
    EXPECT_EQ(learned(path, *tokenizer, options), entry.expected) << entry.line;
  }
}

TEST(Chats, WithoutATemplateInstructionsArePlainAndMessagesAreRefused) {
  Folder folder;
  const auto tokenizer = Tokenizer::load("bytes");
  const std::string alpaca = folder.write("a.jsonl", R"({"instruction": "a", "output": "b"})");
  EXPECT_EQ(learned(alpaca, *tokenizer, {}), "Instruction:\na\n\nResponse:\n[b$]|");
  const std::string chats =
      folder.write("c.jsonl", R"({"messages": [{"role": "user", "content": "a"}]})");
  const std::string error = error_of([&] { learned(chats, *tokenizer, {}); });
  EXPECT_TRUE(contains(error, "no chat template") && contains(error, "--data.chat_template"))
      << error;
}

TEST(Chats, ABadLineStopsOrIsCountedAndSkipped) {
  Folder folder;
  const auto tokenizer = Tokenizer::load("bytes");
  JsonlOptions options =
      with_template(folder,
                    "{% for m in messages %}{{ m.content }}{{ raise_exception('no') if "
                    "m.content == 'bad' }}{% endfor %}");
  const std::string good = R"({"messages": [{"role": "assistant", "content": "a"}]})";
  const std::string deep = R"({"messages": [{"role": "user", "content": )" +
                           std::string(300'000, '[') + std::string(300'000, ']') + "}]}";
  struct Case {
    const char* line;
    const char* why;
  };
  for (const Case& entry : std::vector<Case>{
           {"{", "isn't JSON"},
           {"7", "isn't an object"},
           {deep.c_str(), "more than 100 levels"},
           {R"({"text": "a"})", "unlike the first line, which has conversations (messages)"},
           {R"({"messages": []})", "has no messages"},
           {R"({"messages": [7]})", "message 1 isn't an object"},
           {R"({"messages": [{"content": "a"}]})", "message 1 has no \"role\""},
           {R"({"messages": [{"role": "user"}]})", "message 1 has no \"content\""},
           {R"({"messages": [{"role": "user", "content": 7}]})", "message 1 has no \"content\""},
           {R"({"messages": [{"role": "user", "content": "a"}], "tools": "["})",
            "\"tools\" is text"},
           {R"({"messages": [{"role": "user", "content": "bad"}]})",
            "chat.jinja: line 1: the template"},
       }) {
    const std::string path =
        folder.write("c.jsonl", good + "\n\n" + std::string(entry.line) + "\n" + good + "\n");
    options.bad_lines = BadLines::kStop;
    const std::string error = error_of([&] { learned(path, *tokenizer, options); });
    EXPECT_TRUE(contains(error, path + ": line 3: ") && contains(error, entry.why)) << error;
    options.bad_lines = BadLines::kSkip;
    const std::string rest = learned(path, *tokenizer, options);
    EXPECT_TRUE(rest.starts_with("[a]|[a]|1 skipped: " + path + ": line 3: ")) << rest;
    EXPECT_TRUE(contains(rest, entry.why)) << rest;
  }
  const std::string from =
      folder.write("s.jsonl", R"({"conversations": [{"from": "nobody", "value": "a"}]})");
  EXPECT_TRUE(
      contains(error_of([&] { learned(from, *tokenizer, options = {}); }), "chat template"));
  EXPECT_TRUE(contains(error_of([&] { learned(from, *tokenizer, with_template(folder)); }),
                       "turn 1 is from \"nobody\""));
}

// A byte-level tokenizer with special tokens.
std::string tokenizer_folder(const Folder& folder, const std::string& config) {
  nlohmann::json vocab;
  for (int byte = 0; byte < 256; ++byte)
    vocab[token_of_byte(static_cast<unsigned char>(byte))] = byte;
  vocab["ab"] = 256;
  const nlohmann::json root = {
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"a b"}}}},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}},
      {"added_tokens",
       {{{"id", 257}, {"content", "<s>"}, {"special", true}},
        {{"id", 258}, {"content", "<end>"}, {"special", true}}}}};
  folder.write("tok/tokenizer.json", root.dump());
  folder.write("tok/tokenizer_config.json", config);
  return folder / "tok";
}

TEST(Chats, TheTokenizersTemplateAndSpecialTokensAreUsed) {
  Folder folder;
  const std::string in_config =
      R"({"eos_token": "<end>", "bos_token": "<s>", "chat_template": [{"name": "other", "template": "x"},)"
      R"( {"name": "default", "template": "{{ bos_token }}{% for m in messages %}{{ m.role[0] }})"
      R"({{ m.content }}{{ eos_token }}\n{% endfor %}"}]})";
  const std::string chats = folder.write(
      "c.jsonl",
      R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})");
  const std::string where = tokenizer_folder(folder, in_config);
  auto tokenizer = Tokenizer::load(where);
  // "ua" and "ab" would merge: a prompt ends where the answer begins, as at inference.
  std::vector<int32_t> ids;
  std::vector<uint8_t> counts;
  tokenise_jsonl(chats, *tokenizer, {}, [&](JsonlDocument&& document) {
    ids = document.ids;
    counts = document.counts;
  });
  EXPECT_EQ(ids, (std::vector<int32_t>{257, 'u', 'a', 258, '\n', 'a', 'b', 258, '\n'}));
  EXPECT_EQ(counts, (std::vector<uint8_t>{0, 0, 0, 0, 0, 0, 1, 1, 0}));

  folder.write("tok/chat_template.jinja", "{{ messages[1].content }}");
  tokenizer = Tokenizer::load(where);
  EXPECT_EQ(learned(chats, *tokenizer, {}), "[b]|");
  Folder copy;
  tokenizer->save(copy.path());
  EXPECT_EQ(Tokenizer::load(copy.path())->chat_template(), "{{ messages[1].content }}");
}

TEST(Chats, ASourceHasTheirMaskAndWhereTheyBegin) {
  Folder folder;
  const std::string line =
      R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})";
  folder.write("d/1.jsonl", line + "\n" + line + "\n");
  folder.write("d/2.jsonl", line + "\n");
  folder.write("d/README.md", "not data");
  const std::string tok = tokenizer_folder(folder, R"({"eos_token": "<end>"})");
  for (const std::string& cache : {std::string(), folder / "cache"}) {
    SourceOptions options{.paths = {folder / "d"},
                          .tokenizer = Tokenizer::load(tok),
                          .loss_mask = true,
                          .cache_dir = cache};
    options.lines.chat_template = folder.write(
        "t.jinja", "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}");
    for (int again = 0; again < 2; ++again) {
      const auto source = open_source(options);
      std::vector<int64_t> ids(source->tokens());
      std::vector<uint8_t> counts(ids.size());
      source->read(0, source->tokens(), ids.data());
      source->read_mask(0, source->tokens(), counts.data());
      EXPECT_EQ(ids,
                (std::vector<int64_t>{'a', 258, 'b', 258, 'a', 258, 'b', 258, 'a', 258, 'b', 258}));
      EXPECT_EQ(counts, (std::vector<uint8_t>{0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1}));
      EXPECT_EQ(source->document_starts(0, 12), (std::vector<int64_t>{0, 4, 8}));
      EXPECT_FALSE(source->ends_document(1));  // it ends a turn
      EXPECT_EQ(source->info().kind, "conversations (messages) of JSON lines");
    }
    options.loss_mask = false;
    EXPECT_FALSE(open_source(options)->has_mask());
    BatchOptions batches{.seq = 11, .batch = 1, .document_mask = true, .eos = 258, .prefetch = 0};
    const Batch batch = Batches(open_source(options), batches).next();
    const auto* documents = batch.documents.const_data_ptr<int64_t>();
    EXPECT_EQ(std::vector<int64_t>(documents, documents + 11),
              (std::vector<int64_t>{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2}));
  }
}

// The chosen answer is first. What both have in common doesn't count.
TEST(Chats, PairsAreTwoDocumentsEach) {
  Folder folder;
  SourceOptions options{.tokenizer = Tokenizer::load(tokenizer_folder(folder, "{}")),
                        .loss_mask = true};
  options.lines.chat_template =
      folder.write("t.jinja",
                   "{% for m in messages %}{% if m.role == 'user' %}?{% else %}!{% endif %}"
                   "{{ m.content }}{% endfor %}");
  const auto read = [&](const std::string& line) {
    options.paths = {folder.write("p.jsonl", line)};
    const auto source = open_source(options);
    EXPECT_TRUE(source->info().pairs && source->lists_documents());
    std::vector<int64_t> ids(source->tokens());
    std::vector<uint8_t> counts(ids.size());
    source->read(0, source->tokens(), ids.data());
    source->read_mask(0, source->tokens(), counts.data());
    const auto starts = source->document_starts(0, source->tokens());
    std::string text;
    for (size_t i = 0; i < ids.size(); ++i) {
      if (std::find(starts.begin(), starts.end(), i) != starts.end()) text += "|";
      text += ids[i] < 128 ? std::string(1, static_cast<char>(ids[i])) : "$";
      if (counts[i]) text += "+";
    }
    return text;
  };
  EXPECT_EQ(read(R"({"prompt": "xy", "chosen": "c", "rejected": "de"})"), "|xyc+|xyd+e+");
  const std::string asked = R"([{"role": "user", "content": "a"}, )",
                    told = R"({"role": "assistant", "content": "b"}, )",
                    again = R"({"role": "user", "content": "c"}, )";
  const auto answer = [](const char* text) {
    return std::string(R"({"role": "assistant", "content": ")") + text + R"("}])";
  };
  const std::string expected = "|?a!b?c!+d+|?a!b?c!+e+f+";
  EXPECT_EQ(read(R"({"chosen": )" + asked + told + again + answer("d") + R"(, "rejected": )" +
                 asked + told + again + answer("ef") + "}"),
            expected);
  const std::string prompt = asked + told + R"({"role": "user", "content": "c"}])";
  EXPECT_EQ(read(R"({"prompt": )" + prompt + R"(, "chosen": [)" + answer("d") +
                 R"(, "rejected": [)" + answer("ef") + "}"),
            expected);
  EXPECT_TRUE(contains(error_of([&] {
                         read(R"({"prompt": "a", "chosen": "b", "rejected": [)" + answer("c") +
                              "}");
                       }),
                       "has messages and a text as answers"));
  EXPECT_TRUE(
      contains(error_of([&] { read(R"({"chosen": [], "rejected": [)" + answer("c") + "}"); }),
               "has an answer without text"));
}

TEST(Chats, WhyAMaskIsUsedIsSaid) {
  Folder folder;
  const std::string chats =
      folder.write("c.jsonl", R"({"conversations": [{"from": "human", "value": "a"}]})");
  EXPECT_EQ(reason_for_mask({chats}, {}), chats +
                                              " has conversations (ShareGPT), and only the "
                                              "assistant's words count in the loss");
  EXPECT_EQ(reason_for_mask({folder.path()}, {}), reason_for_mask({chats}, {}));
  EXPECT_EQ(reason_for_packing({chats}, {}),
            chats + " has conversations (ShareGPT), and each stays whole");
  EXPECT_EQ(reason_for_packing({folder.path()}, {}), reason_for_packing({chats}, {}));
  EXPECT_EQ(reason_for_mask({folder.write("t.jsonl", R"({"text": "a"})")}, {}), "");
  EXPECT_EQ(reason_for_mask({folder.write("b.jsonl", "bad")}, {}), "");
  for (const char* name : {"t.jsonl", "b.jsonl", "none"})
    EXPECT_EQ(reason_for_packing({folder / name}, {}), "") << name;
}

}  // namespace
}  // namespace fsdp::data
