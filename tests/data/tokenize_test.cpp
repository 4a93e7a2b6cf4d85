// fsdp tokenize as people run it.
#include <gtest/gtest.h>

#include "base/subprocess.h"
#include "data/folders.h"
#include "data/token_file.h"
#include "paths.h"

namespace fsdp::data {
namespace {

using test::contains;
using test::Folder;

// With what it prints on both streams.
Finished tokenize(const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {
      "/bin/sh", "-c", "exec \"$@\" 2>&1", "sh", paths::program("fsdp"), "tokenize"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return run_program(command, false);
}

std::vector<int64_t> all(const std::string& path) {
  auto file = TokenFile::open(path);
  std::vector<int64_t> ids(file->tokens());
  file->read(0, file->tokens(), ids.data());
  return ids;
}

TEST(Tokenize, WritesEveryFormat) {
  Folder folder;
  folder.write("t/1.txt", "hi");
  folder.write("t/2.txt", "\xff");
  for (const char* format : {"llmc", "nanogpt", "megatron"}) {
    std::string out = folder / (std::string(format) + ".bin");
    Finished result = tokenize({folder / "t", "--out", out, "--format", format});
    ASSERT_EQ(result.code, 0) << result.output;
    EXPECT_TRUE(contains(result.output, "tokens     5 (0.60 bytes per token)")) << result.output;
    EXPECT_EQ(all(out), (std::vector<int64_t>{'h', 'i', 256, 255, 256}));
    EXPECT_EQ(enum_name(TokenFile::open(out)->format()), format);
  }
}

TEST(Tokenize, ReplacesNothingUnlessTold) {
  Folder folder;
  std::string text = folder.write("a.txt", "abc"), out = folder / "a.bin";
  ASSERT_EQ(tokenize({text, "--out", out, "--format", "megatron"}).code, 0);
  Finished again = tokenize({text, "--out", out, "--format", "nanogpt"});
  EXPECT_EQ(again.code, 1);
  EXPECT_TRUE(contains(again.output, "already exists") && contains(again.output, "--force"));
  ASSERT_EQ(tokenize({text, "--out", out, "--format", "nanogpt", "--force"}).code, 0);
  EXPECT_EQ(TokenFile::open(out)->format(),
            Format::kNanogpt);  // no index of the older file is left
}

TEST(Tokenize, PromptsAndCompletionsGiveAMask) {
  Folder folder;
  std::string lines =
      folder.write("c.jsonl", "{\"q\": \"ab\", \"a\": \"c\"}\n{\"q\": \"d\", \"a\": \"e\"}\n");
  std::string out = folder / "c.bin";
  Finished result =
      tokenize({lines, "--jsonl", "--prompt-field", "q", "--completion-field", "a", "--out", out});
  ASSERT_EQ(result.code, 0) << result.output;
  EXPECT_EQ(all(out), (std::vector<int64_t>{'a', 'b', 'c', 256, 'd', 'e', 256}));
  EXPECT_EQ(test::read_file(folder / "c.mask"), std::string("\0\0\1\1\0\1\1", 7));
}

TEST(Tokenize, HoldsOutDocumentsSpreadOverTheData) {
  Folder folder;
  std::string lines;
  for (int i = 0; i < 100; ++i)
    lines += "{\"text\": \"" + std::string(1, static_cast<char>('a' + i % 26)) + "\"}\n";
  std::string out = folder / "v.bin";
  Finished result =
      tokenize({folder.write("v.jsonl", lines), "--jsonl", "--out", out, "--valid-share", "0.1"});
  ASSERT_EQ(result.code, 0) << result.output;
  EXPECT_EQ(TokenFile::open(out)->tokens(), 180);
  EXPECT_EQ(TokenFile::open(folder / "v.valid.bin")->tokens(), 20);
  std::vector<int64_t> held = all(folder / "v.valid.bin");
  EXPECT_EQ(held[0], 'a' + 4);         // the fifth document
  EXPECT_EQ(held[18], 'a' + 94 % 26);  // and every tenth after it
  Finished one = tokenize(
      {folder.write("one.txt", "text"), "--out", folder / "one.bin", "--valid-share", "0.1"});
  EXPECT_EQ(one.code, 1);
  EXPECT_TRUE(contains(one.output, "too few"));
  EXPECT_FALSE(std::filesystem::exists(folder / "one.bin"));
}

TEST(Tokenize, ShowsTokensAndDecodesFiles) {
  Folder folder;
  Finished shown = tokenize({"--show", "a\n"});
  EXPECT_EQ(shown.code, 0);
  EXPECT_TRUE(contains(shown.output, "97  [a]") && contains(shown.output, "10  [\\n]"))
      << shown.output;
  EXPECT_TRUE(contains(shown.output, "2 tokens, 2 bytes"));
  std::string out = folder / "a.bin";
  ASSERT_EQ(tokenize({folder.write("a.txt", "hello world"), "--out", out}).code, 0);
  Finished decoded = tokenize({"--decode", out, "--skip", "6", "--first", "5"});
  EXPECT_EQ(decoded.code, 0);
  EXPECT_TRUE(contains(decoded.output, "world\n") && contains(decoded.output, "of 12 (llmc)"))
      << decoded.output;
}

constexpr const char* kChat =
    R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n"}]})"
    "\n";
constexpr const char* kChatTemplate =
    "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}";

TEST(Tokenize, ConversationsAreKnownByTheirNameAndFirstLine) {
  Folder folder;
  const std::string chats = folder.write("c.jsonl", std::string(kChat) + "bad\n" + kChat);
  const std::string chat_template = folder.write("t.jinja", kChatTemplate), out = folder / "c.bin";
  Finished result = tokenize({chats, "--chat-template", chat_template, "--out", out});
  EXPECT_EQ(result.code, 1);
  EXPECT_TRUE(contains(result.output, chats + ": line 2: isn't JSON")) << result.output;
  result = tokenize({chats, "--chat-template", chat_template, "--skip-bad-lines", "--out", out});
  ASSERT_EQ(result.code, 0) << result.output;
  EXPECT_TRUE(contains(result.output, "files      1 (conversations (messages))")) << result.output;
  EXPECT_TRUE(contains(result.output, "skipped 1 bad lines of " + chats)) << result.output;
  const std::string prompt = "<user>a;<assistant>", both = prompt + "b\n;" + prompt + "b\n;";
  EXPECT_EQ(all(out), std::vector<int64_t>(both.begin(), both.end()));
  const std::string mask = std::string(prompt.size(), '\0') + "\1\1\1";
  EXPECT_EQ(test::read_file(folder / "c.mask"), mask + mask);
}

TEST(Tokenize, ShowsWhatIsTrainedOn) {
  Folder folder;
  const std::string chats = folder.write("c.jsonl", std::string(kChat) + kChat + kChat);
  const std::string chat_template = folder.write("t.jinja", kChatTemplate);
  const Finished shown = tokenize({chats, "--chat-template", chat_template, "--show", "2"});
  ASSERT_EQ(shown.code, 0) << shown.output;
  EXPECT_TRUE(contains(shown.output,
                       "line 2: 22 tokens, 3 trained on ---\n"
                       "<user>a;<assistant>[[b\n;]]\n"))
      << shown.output;
  EXPECT_FALSE(contains(shown.output, "line 3")) << shown.output;
}

TEST(Tokenize, ErrorsSayWhatToDo) {
  Folder folder;
  std::string text = folder.write("a.txt", "abc");
  struct Case {
    std::vector<std::string> arguments;
    const char* expected;
    int code = 1;
  };
  std::vector<Case> cases = {
      {{}, "no input was given", 2},
      {{text}, "--out FILE.bin", 2},
      {{text, "--out", folder / "a.tok"}, "must end in .bin", 2},
      {{folder / "none", "--out", folder / "a.bin"}, "none"},
      {{folder.write("z.txt", std::string("a\0", 2)), "--out", folder / "a.bin"}, "zero byte"},
      {{folder.write("l.jsonl", "{}"), "--out", folder / "a.bin"}, "line 1: has no \"text\""},
      {{folder / "l.jsonl", text, "--out", folder / "a.bin"}, "some inputs are JSON lines"},
      {{folder.write("e/l.jsonl", "{}"), "--jsonl", "--out", folder / "a.bin"}, "line 1"},
      {{folder.write("m.jsonl", kChat), "--out", folder / "a.bin"}, "has no chat template"},
      {{folder / "m.jsonl", "--show", "some"}, "takes a number", 2},
      {{text, "--show", "3"}, "all of which is trained on"},
      {{text, "--tokenizer", "nothing.json", "--out", folder / "a.bin"}, "nothing.json"},
      {{text, "--out", folder / "no/such/a.bin"}, "can't write"},
      {{"--decode", folder.write("long.txt", "A text that no token file looks like.")},
       "it is text"},
  };
  for (const Case& entry : cases) {
    Finished result = tokenize(entry.arguments);
    EXPECT_EQ(result.code, entry.code) << entry.expected;
    EXPECT_TRUE(contains(result.output, entry.expected) && contains(result.output, "HINT"))
        << result.output;
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "a.bin"));
  EXPECT_EQ(tokenize({text, "--format", "csv"}).code, 2);
}

}  // namespace
}  // namespace fsdp::data
