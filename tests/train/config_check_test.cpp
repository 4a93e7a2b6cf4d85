// Combinations of options: which are accepted, and which are refused with a hint.
#include "train/config_check.h"

#include "train/config_testing.h"
#include "train/config_values.h"

namespace fsdp::train {
namespace {

std::string clash(const Words& flags, int world = 1) {
  return refusal([&] {
    Config config = from_text("[train]\nsteps = 100\n");
    auto all = options(config);
    for (size_t i = 0; i < flags.size(); i += 2) set(*find(all, flags[i]), Words{flags[i + 1]});
    check(config, world);
  });
}

TEST(Check, TakesWhatGoesTogether) {
  EXPECT_EQ(clash({}), "(accepted)");
  EXPECT_EQ(clash({"train.batch", "12", "train.micro_batch", "2"}, 3), "(accepted)");
  EXPECT_EQ(clash({"train.batch", "1", "context.size", "4"}, 4), "(accepted)");
  EXPECT_EQ(clash({"train.batch", "4", "context.size", "8"}, 32), "(accepted)");  // a ring
  EXPECT_EQ(clash({"optim.type", "sgd", "optim.momentum", "0"}), "(accepted)");
  EXPECT_EQ(clash({"lora.rank", "8", "lora.rslora", "true", "init_from", "m", "data.train", "d"}),
            "(accepted)");
  EXPECT_EQ(clash({"shard.reshard_after_forward", "2"}, 4), "(accepted)");
  EXPECT_EQ(clash({"train.graph", "on", "data.loss_mask", "true"}), "(accepted)");
  EXPECT_EQ(clash({"train.graph", "on", "data.packing", "true"}), "(accepted)");
  EXPECT_EQ(clash({"shard.reshard_after_forward", "false", "shard.strategy", "shard_grad_op"}, 4),
            "(accepted)");
  EXPECT_EQ(clash({"optim.schedule", "wsd", "optim.decay_steps", "90", "optim.warmup_steps", "10"}),
            "(accepted)");
}

TEST(Check, NamesTheNearestBatchesThatCanBeDivided) {
  EXPECT_TRUE(has(clash({"train.batch", "32"}, 3),
                  "train.batch = 32 can't be divided among 3 ranks. | the nearest that works: "
                  "--batch 30 or 33."));
  EXPECT_TRUE(has(clash({"train.batch", "2"}, 4), "--batch 4."));
  EXPECT_TRUE(has(clash({"train.batch", "20", "train.micro_batch", "4"}, 2),
                  "the 10 samples per rank (train.batch = 20, 2 ranks) aren't a multiple of "
                  "train.micro_batch = 4. | use --batch 16 or 24"));
}

TEST(Check, RefusesEveryCombinationThatCannotBe) {
  struct Case {
    Words flags;
    const char* part;
    int world = 1;
  };
  const std::vector<Case> cases = {
      {{"train.steps", "0"}, "the length of the run isn't set"},
      {{"train.tokens", "100000"}, "more than one of"},
      {{"train.epochs", "1"}, "more than one of"},
      {{"train.steps", "0", "train.tokens", "100"}, "less than one step of 32 x 256 tokens"},
      {{"train.steps", "0", "train.epochs", "1", "data.train", "random"}, "has no epochs"},
      {{"model.heads", "3"}, "model.dim = 256 isn't a multiple of model.heads = 3"},
      {{"model.heads", "256"}, "is odd"},
      {{"model.kv_heads", "3"}, "isn't a multiple of model.kv_heads = 3"},
      {{"model.type", "gpt2", "model.kv_heads", "2"}, "model.kv_heads = 2 has no effect"},
      {{"model.type", "gpt2", "model.max_tokens", "128"}, "more than the 128 positions"},
      {{"model.type", "gpt2", "model.rope_base", "5e5"}, "model.rope_base = 5e5 has no effect"},
      {{"model.dropout", "0.1"}, "set model.type to gpt2"},
      {{"model.width", "64"}, "set model.type to mlp"},
      {{"lora.alpha", "8"}, "lora.alpha has no effect"},
      {{"lora.targets", "q_proj"}, "lora.targets has no effect"},
      {{"lora.init_from", "adapters"}, "lora.init_from has no effect"},
      {{"lora.rank", "8"}, "there are no weights to adapt"},
      {{"lora.rank", "8", "init_from", "m", "model.type", "mlp", "data.train", "random"},
       "can't have adapters"},
      {{"lora.base", "nf4"}, "lora.base has no effect"},
      {{"lora.rank", "8", "lora.base", "nf4", "init_from", "m", "model.type", "gpt2"},
       "no linears that can be quantised"},
      {{"lora.rank", "8", "lora.base", "nf4", "init_from", "m", "shard.precision", "fp8"},
       "no such products"},
      {{"init_from", "m"}, "there is nothing to train these weights on"},
      {{"optim_from", "m"}, "optim_from has no effect"},
      {{"optim.warmup_steps", "1", "optim.warmup_share", "0.1"}, "are both set"},
      {{"model.rope_factor", "32"}, "set model.rope_scaling to llama3"},
      {{"model.rope_scaling", "llama3", "model.rope_low_freq", "4"}, "isn't below"},
      {{"model.type", "mlp"}, "an mlp can't be trained on text"},
      {{"model.type", "mlp", "data.train", "random", "model.heads", "8"}, "has no effect"},
      {{"model.type", "mlp", "data.train", "random", "train.sample_every", "8"}, "has no effect"},
      {{"model.type", "mlp", "data.train", "random", "train.steps", "0", "train.tokens", "1e6"},
       "an mlp has no tokens to count"},
      {{"data.train", "random", "data.valid", "x"}, "combines"},
      {{"data.train", "random", "data.format", "text"}, "reads no files"},
      {{"data.loss_mask", "true", "data.format", "text"}, "is for token files"},
      {{"data.format", "nanogpt"}, "names no file"},
      {{"data.format", "nanogpt", "data.train", "x"}, "set model.vocab"},
      {{"optim.type", "sgd", "optim.beta1", "0.8"}, "set optim.type to adamw"},
      {{"optim.momentum", "0.8"}, "set optim.type to sgd"},
      {{"optim.schedule", "wsd"}, "set optim.decay_steps"},
      {{"optim.decay_steps", "5"}, "set optim.schedule to wsd"},
      {{"optim.schedule", "constant", "optim.final_ratio", "0.5"}, "has no effect"},
      {{"optim.warmup_steps", "101"}, "more than the run's 100 steps"},
      {{"optim.schedule", "wsd", "optim.decay_steps", "60", "optim.warmup_steps", "50"},
       "plus optim.decay_steps is more"},
      {{"shard.shard_ranks", "2"}, "set shard.strategy to hybrid_shard", 4},
      {{"shard.strategy", "hybrid_shard", "shard.shard_ranks", "3"}, "can't be divided", 4},
      {{"shard.reshard_after_forward", "3"}, "doesn't divide the 4 ranks", 4},
      {{"shard.reshard_after_forward", "true", "shard.strategy", "shard_grad_op"}, "contradicts"},
      {{"shard.reshard_after_forward", "false", "shard.strategy", "no_shard"}, "has no effect"},
      {{"shard.wrap_min_params", "5"}, "set shard.wrap to size"},
      {{"shard.precision", "fp32", "shard.reduce", "bf16"}, "would round gradients"},
      {{"shard.strategy", "no_shard", "shard.gather", "fp8"}, "gathers no parameters"},
      {{"shard.strategy", "no_shard", "shard.reduce", "int8"}, "summed by an all-reduce"},
      {{"shard.precision", "fp32", "shard.gradients", "bf16"}, "would round gradients"},
      {{"shard.precision", "fp16", "shard.gradients", "bf16"}, "computed in fp16"},
      {{"fp8.recipe", "rowwise"}, "set shard.precision to fp8"},
      {{"shard.precision", "bf16", "fp8.skip", "o_proj"}, "shard.precision is bf16"},
      {{"shard.precision", "fp8", "model.type", "gpt2"}, "no linears that can compute in fp8"},
      {{"shard.precision", "fp8", "fp8.least", "8"}, "16"},
      {{"train.graph", "on", "shard.precision", "fp16"}, "set shard.precision to bf16"},
      {{"train.graph", "on", "data.document_mask", "true", "shard.precision", "fp32"},
       "set shard.precision to bf16"},
      {{"data.packing", "true", "data.document_mask", "true"}, "set one of the two"},
      {{"data.packing", "true", "data.train", "random"}, "reads no files"},
      {{"train.dpo_beta", "0.2"}, "set train.objective to dpo"},
      {{"train.objective", "dpo"}, "set lora.rank"},
      {{"train.objective", "dpo", "lora.rank", "4", "init_from", "m"}, "leave data.packing"},
      {{"train.graph", "on", "offload.optimizer", "true"}, "set offload.optimizer to false"},
      {{"activations.every", "2"},
       "set activations.mode to selective or feed_forward or full or offload or long"},
      {{"activations.mode", "full", "activations.every", "999"}, "there are only"},
      {{"activations.mode", "full", "activations.keep_last", "999"}, "there are only"},
      {{"activations.keep_last", "1"}, "set activations.mode to selective"},
      {{"model.type", "mlp", "data.train", "random", "activations.mode", "feed_forward"},
       "no feed-forward layers"},
      {{"train.graph", "on", "offload.parameters", "true"}, "offload.gradients to false"},
      {{"train.graph", "on", "activations.mode", "offload"}, "activations move to host memory"},
      {{"train.graph", "on", "activations.mode", "long"}, "activations move to host memory"},
      {{"activations.mode", "feed_forward", "activations.tile", "64"},
       "recompute feed-forward layers already"},
      {{"model.type", "mlp", "data.train", "random", "activations.tile", "64"},
       "no feed-forward layers in blocks"},
      {{"offload.fraction", "0.5"}, "nothing is offloaded"},
      {{"offload.step_in_backward", "true"}, "offload.optimizer is not"},
      {{"optim.type", "muon", "offload.optimizer", "true", "offload.step_in_backward", "true"},
       "muon needs whole matrices"},
      {{"optim.muon_steps", "6"}, "optim.muon_steps = 6 has no effect"},
      {{"offload.optimizer", "true", "offload.step_in_backward", "true"}, "train.clip"},
      {{"offload.directory", "/tmp"}, "offload.optimizer is not"},
      {{"context.size", "2"}, "1 ranks can't be divided"},
      {{"context.size", "3", "context.kind", "ulysses", "model.dim", "384", "model.heads", "6",
        "data.seq", "255", "model.kv_heads", "2"},
       "can't exchange 6 heads with 2 of keys",
       3},
      {{"context.size", "4", "data.seq", "250"}, "--data.seq 252", 4},
      {{"context.size", "8", "context.kind", "ulysses"}, "can't exchange 4 heads", 8},
      {{"context.kind", "ring"}, "context.kind has no effect"},
      {{"context.size", "8", "data.seq", "248"}, "16 chunks", 8},
      {{"context.size", "2", "context.kind", "ring", "model.type", "mistral", "model.window", "64"},
       "no sliding windows",
       2},
      {{"context.size", "2", "context.kind", "ring", "model.type", "gpt2", "model.dropout", "0.1"},
       "no dropout",
       2},
      {{"context.size", "2", "train.batch", "5"}, "among 2 groups of ranks", 4},
      {{"context.size", "2", "model.type", "mlp", "data.train", "random"}, "no sequences", 2},
      {{"resume", "true"}, "needs the run's directory"},
  };
  for (const Case& one : cases) {
    EXPECT_TRUE(has(clash(one.flags, one.world), one.part)) << testing::PrintToString(one.flags);
  }
}

}  // namespace
}  // namespace fsdp::train
