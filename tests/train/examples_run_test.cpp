// Real runs of `fsdp train` on examples: prompts with answers, conversations, pairs of answers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>

#include "train/runs.h"

namespace fsdp::train {
namespace {

using launch::Folder;
using launch::has;

void expect_same_losses(const Folder& folder, const std::string& run, const std::string& other) {
  const std::vector<double> a = losses(folder, run), b = losses(folder, other);
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-5) << run << ", step " << i + 1;
}

// Prompts don't count, so ranks have different numbers of targets, and the mean is over all of
// them.
TEST(Train, AMaskedLossIsTheSameOnAnyNumberOfRanks) {
  Folder folder;
  {
    std::ofstream lines(folder / "chats.jsonl");
    for (int i = 0; i < 400; ++i)
      lines << R"({"prompt": "what is )" << std::string(i % 17, 'x') << i << R"( times two? ",)"
            << R"( "completion": ")" << 2 * i << R"("})" << '\n';
  }
  Said made = fsdp({"tokenize", folder / "chats.jsonl", "--jsonl", "--out", folder / "chats.bin"});
  ASSERT_EQ(made.code, 0) << made.err;
  auto chats = [&](const std::string& run) {
    Words all = tiny_run(folder, run, 6) + Words{"--model.vocab", "257"};
    *std::find(all.begin(), all.end(), folder / "text") = folder / "chats.bin";
    return all;
  };
  Words masked = {"--data.loss_mask", "true", "--train.micro_batch", "2"};
  for (int ranks : {1, 2, 3}) {
    std::string name = "masked-" + std::to_string(ranks);
    Said said = train(ranks, chats(name) + masked);
    ASSERT_EQ(said.code, 0) << said.err;
    expect_same_losses(folder, name, "masked-1");
  }
  ASSERT_EQ(train(1, chats("all") + Words{"--data.loss_mask", "false"}).code, 0);
  EXPECT_NE(losses(folder, "all"), losses(folder, "masked-1"));
  // Found next to the tokens, it is used.
  Said found = train(1, chats("found") + Words{"--train.micro_batch", "2"});
  ASSERT_EQ(found.code, 0) << found.err;
  EXPECT_EQ(losses(folder, "found"), losses(folder, "masked-1"));
  EXPECT_NE((found.out + found.err).find("data.loss_mask is true"), std::string::npos);
}

// Samples are examples side by side. Ranks, micro-batches and where a run stopped change no loss.
TEST(Train, PackedExamplesHaveTheSameLossesOnAnyNumberOfRanksAndResumed) {
  Folder folder;
  {
    std::ofstream lines(folder / "chats.jsonl");
    for (int i = 0; i < 300; ++i)
      lines << R"({"prompt": "what )" << std::string(i % 11, 'x') << R"(? ", "completion": ")"
            << 2 * i << R"("})" << '\n';
  }
  auto run = [&](int ranks, const std::string& name, int steps, const Words& more) {
    Words all = tiny_run(folder, name, steps) + Words{"--optim.schedule", "constant"} + more;
    *std::find(all.begin(), all.end(), folder / "text") = folder / "chats.jsonl";
    *(std::find(all.begin(), all.end(), "--optim.warmup_steps") + 1) = "2";
    return train(ranks, all);
  };
  const Said one = run(1, "one", 6, {});
  ASSERT_EQ(one.code, 0) << one.err;
  EXPECT_TRUE(has(one.out, "data.packing is true: " + (folder / "chats.jsonl"))) << one.out;
  EXPECT_TRUE(has(one.out, "packed     300 examples in ")) << one.out;
  EXPECT_TRUE(has(one.out, "% padding")) << one.out;
  const Said three = run(3, "three", 6, {"--train.micro_batch", "1", "--train.eval_every", "2"});
  ASSERT_EQ(three.code, 0) << three.err;
  expect_same_losses(folder, "three", "one");
  ASSERT_EQ(run(3, "parts", 3, {}).code, 0);
  const Said resumed = train(2, {"--dir", folder / "parts", "--resume", "--steps", "6"});
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  expect_same_losses(folder, "parts", "one");
  const Said cut = run(1, "cut", 6, {"--data.packing", "false"});
  ASSERT_EQ(cut.code, 0) << cut.err;
  EXPECT_NE(losses(folder, "cut"), losses(folder, "one"));
}

// Adapters learn to prefer even answers. They start as the base does, so the first loss is log 2.
TEST(Train, PairsOfAnswersAreLearnedFromOnAnyNumberOfRanks) {
  Folder folder;
  ASSERT_EQ(train(1, tiny_run(folder, "base", 2)).code, 0);
  const std::string pairs = folder / "pairs.jsonl";
  {
    std::ofstream lines(pairs);
    for (int i = 0; i < 60; ++i)
      lines << R"({"prompt": "say )" << std::string(i % 5, 'x') << R"(", "chosen": ")" << 2 * i
            << R"( even", "rejected": ")" << 2 * i + 1 << R"( odd"})" << '\n';
  }
  const Words how = {"--init-from",
                     folder / "base",
                     "--data.train",
                     pairs,
                     "--lora.rank",
                     "4",
                     "--data.seq",
                     "64",
                     "--train.batch",
                     "6",
                     "--optim.lr",
                     "1e-2",
                     "--train.dpo_beta",
                     "0.5",
                     "--steps",
                     "8",
                     "--optim.warmup_steps",
                     "1",
                     "--train.sample_tokens",
                     "0"};
  for (int ranks : {1, 2, 3}) {
    const std::string name = "dpo-" + std::to_string(ranks);
    const Said said = train(ranks, how + Words{"--dir", folder / name});
    ASSERT_EQ(said.code, 0) << said.err;
    EXPECT_TRUE(has(said.out, "train.objective is dpo")) << said.out;
    EXPECT_TRUE(has(said.out, "packed     60 pairs in ")) << said.out;
    expect_same_losses(folder, name, "dpo-1");
    EXPECT_NEAR(losses(folder, name).front(), std::log(2.0), 1e-6);
    EXPECT_TRUE(has(said.out, "evaluation after step 8: loss 0.")) << said.out;
    EXPECT_FALSE(has(said.out, "perplexity")) << said.out;
    const auto lines = metrics(folder, name);
    EXPECT_GT(lines.back()["reward_accuracy"].get<double>(), 0.9);
    EXPECT_GT(lines.back()["reward_chosen"].get<double>(),
              lines.back()["reward_rejected"].get<double>());
  }
  EXPECT_LT(losses(folder, "dpo-1").back(), 0.6);
  Words plain = how + Words{"--dir", folder / "none", "--train.objective", "next_token"};
  const auto beta = std::find(plain.begin(), plain.end(), "--train.dpo_beta");
  plain.erase(beta, beta + 2);
  const Said without = train(1, plain);
  EXPECT_TRUE(has(without.err, "only train.objective = dpo learns from")) << without.err;
}

// Read directly, conversations are the tokens and the mask that fsdp tokenize makes of them.
TEST(Train, ConversationsAreReadDirectly) {
  Folder folder;
  const std::string chats = folder / "chats.jsonl", chat_template = folder / "t.jinja";
  std::ofstream(chat_template)
      << "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}";
  {
    std::ofstream lines(chats);
    for (int i = 0; i < 400; ++i)
      lines << R"({"messages": [{"role": "user", "content": "what is )" << i
            << R"( times two?"}, {"role": "assistant", "content": ")" << 2 * i << R"("}]})" << '\n';
    lines << "bad\n";
  }
  Said made = fsdp({"tokenize", chats, "--chat-template", chat_template, "--skip-bad-lines",
                    "--out", folder / "chats.bin"});
  ASSERT_EQ(made.code, 0) << made.err;
  const auto run = [&](const std::string& name, const std::string& data, const Words& more) {
    Words all = tiny_run(folder, name, 4) + Words{"--model.vocab", "257"} + more;
    *std::find(all.begin(), all.end(), folder / "text") = data;
    return train(1, all);
  };
  const Words with_template = {"--data.chat_template", chat_template, "--data.packing", "false"};
  const Said stopped = run("stopped", chats, with_template);
  EXPECT_EQ(stopped.code, 1);
  EXPECT_NE(stopped.err.find("chats.jsonl: line 401: isn't JSON"), std::string::npos)
      << stopped.err;
  const Said direct = run("direct", chats, with_template + Words{"--data.bad_lines", "skip"});
  ASSERT_EQ(direct.code, 0) << direct.err;
  const std::string all = direct.out + direct.err;
  EXPECT_NE(all.find("skipped 1 bad lines"), std::string::npos) << all;
  EXPECT_NE(all.find("only the assistant's words count in the loss"), std::string::npos) << all;
  ASSERT_EQ(run("tokens", folder / "chats.bin", {}).code, 0);
  EXPECT_EQ(losses(folder, "direct"), losses(folder, "tokens"));
}

}  // namespace
}  // namespace fsdp::train
