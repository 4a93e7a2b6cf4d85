#include "train/config_check.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/sharding.h"
#include "train/config_values.h"
#include "train/share.h"

namespace fsdp::train {
namespace {

// A key without effect is an error: whoever set it expects one. Default values pass, because
// written configs contain every key.
void check_effects(const Config& config) {
  Config copy = config, defaults;
  const auto chosen = options(copy), usual = options(defaults);
  for (size_t i = 0; i < chosen.size(); ++i) {
    const OnlyWith& only = chosen[i].check.only_with;
    const std::string given = value_text(chosen[i]), standard = value_text(usual[i]);
    if (!only.field || given == standard) continue;
    for (const Option& other : chosen) {
      const auto* field = std::get_if<EnumField>(&other.target);
      if (!field || field->address() != only.field) continue;
      std::string names;
      bool holds = false;
      for (size_t value : only.values) {
        names += (names.empty() ? "" : " or ") + field->name(value);
        holds = holds || field->name() == field->name(value);
      }
      if (!holds)
        throw Error(formatted("{} = {} has no effect: {} is {}.", chosen[i].name(), given,
                              other.name(), field->name()),
                    formatted("leave it at {}, or set {} to {}.", standard, other.name(), names));
    }
  }
}

void check_model(const Config& config) {
  const models::ModelConfig& model = config.model;
  check(model);
  if (model.type == models::ModelType::kGpt2 && model.max_tokens > 0 &&
      config.data.seq > model.max_tokens)
    throw Error(
        formatted("data.seq = {} is more than the {} positions of this gpt2 (model.max_tokens).",
                  config.data.seq, model.max_tokens),
        "lower data.seq, or set model.max_tokens to 0, which means data.seq.");
}

void check_lora(const Config& config) {
  const nn::LoRAConfig& lora = config.lora;
  if (lora.rank == 0) {
    for (auto [given, key] :
         {std::pair(lora.alpha != nn::LoRAConfig().alpha, "alpha"),
          std::pair(lora.dropout > 0, "dropout"), std::pair(!lora.targets.empty(), "targets"),
          std::pair(lora.rslora, "rslora"), std::pair(lora.base != nn::Quant::kNone, "base"),
          std::pair(!lora.init_from.empty(), "init_from")})
      if (given)
        throw Error(formatted("lora.{} has no effect: there are no adapters.", key),
                    "set lora.rank; 8 to 64 are usual.");
    return;
  }
  if (config.model.type == models::ModelType::kMlp)
    throw Error("an mlp can't have adapters.", "set lora.rank to 0 to train all parameters.");
  if (lora.base != nn::Quant::kNone && config.model.type == models::ModelType::kGpt2)
    throw Error(formatted("lora.base = {}: a gpt2 has no linears that can be quantised.",
                          enum_name(lora.base)),
                "leave lora.base at plain.");
  if (lora.base != nn::Quant::kNone && config.shard.precision == shard::Precision::kFp8)
    throw Error(formatted("lora.base = {} stores weights in few bits, and shard.precision = fp8 "
                          "multiplies in fp8; there are no such products.",
                          enum_name(lora.base)),
                "set shard.precision to bf16, or lora.base to plain.");
}

void check_fp8(const Config& config) {
  const nn::Fp8Config& fp8 = config.fp8;
  const nn::Fp8Config usual;
  const std::string given = enum_name(config.shard.precision);
  if (config.shard.precision == shard::Precision::kFp8) {
    if (config.model.type == models::ModelType::kGpt2)
      throw Error("a gpt2 has no linears that can compute in fp8.",
                  "set shard.precision to bf16, or choose another model.type.");
    return;
  }
  for (auto [changed, key] :
       {std::pair(fp8.recipe != usual.recipe, "recipe"), std::pair(!fp8.skip.empty(), "skip"),
        std::pair(fp8.least != usual.least, "least")})
    if (changed)
      throw Error(formatted("fp8.{} has no effect: shard.precision is {}.", key, given),
                  "set shard.precision to fp8.");
}

void check_data(const Config& config) {
  const data::DataConfig& data = config.data;
  check(data);
  if (config.model.type == models::ModelType::kMlp && !data.is_random())
    throw Error("an mlp can't be trained on text.",
                "use random vectors, data.train = [\"random\"], or choose another model.type.");
  if (data.has_token_files() && config.model.vocab == 0 && data.tokenizer == "bytes")
    throw Error(formatted("data.format = {}: token files don't contain the vocabulary size.",
                          enum_name(data.format)),
                "set model.vocab, or data.tokenizer to the tokenizer.json that made them.");
}

void check_objective(const Config& config) {
  if (config.train.objective != Objective::kDpo) return;
  if (config.lora.rank == 0)
    throw Error("train.objective = dpo compares adapters with the base, but there are none.",
                "set lora.rank (--lora.rank 16) and --init-from DIR.");
  if (!config.data.packing || !config.data.loss_mask)
    throw Error("train.objective = dpo needs whole answers, and to know what they are.",
                "leave data.packing and data.loss_mask at true.");
}

void check_length(const Config& config) {
  const TrainConfig& train = config.train;
  int ends = (train.steps > 0) + (train.tokens > 0) + (train.epochs > 0);
  if (ends == 0)
    throw Error("the length of the run isn't set.",
                "set one of train.steps, train.tokens and train.epochs (--steps 1000).");
  if (ends > 1)
    throw Error("more than one of train.steps, train.tokens and train.epochs is set.",
                "set only one of them.");
  if (train.epochs > 0 && config.data.is_random())
    throw Error("random data has no epochs.", "set train.steps or train.tokens instead.");
  if (train.tokens > 0 && config.model.type == models::ModelType::kMlp)
    throw Error("an mlp has no tokens to count.", "set train.steps instead of train.tokens.");
  if (train.tokens > 0 && train.tokens < train.batch * config.data.seq)
    throw Error(formatted("train.tokens = {} is less than one step of {} x {} tokens.",
                          train.tokens, train.batch, config.data.seq),
                "raise train.tokens, or lower train.batch.");
}

// `parts`: ranks, or groups of ranks that share sequences.
void check_batch(const TrainConfig& train, int64_t parts, const std::string& ranks) {
  int64_t unit = parts * std::max<int64_t>(train.micro_batch, 1);
  if (train.batch % unit == 0) return;
  int64_t below = train.batch / unit * unit, above = below + unit;
  std::string near = below > 0 ? formatted("{} or {}", below, above) : formatted("{}", above);
  if (train.batch % parts != 0)
    throw Error(
        formatted("train.batch = {} can't be divided among {} {}.", train.batch, parts, ranks),
        formatted("the nearest that works: --batch {}.", near));
  throw Error(formatted("the {} samples per rank (train.batch = {}, {} {}) aren't a multiple of "
                        "train.micro_batch = {}.",
                        train.batch / parts, train.batch, parts, ranks, train.micro_batch),
              formatted("use --batch {}, or --train.micro_batch 0 for all at once.", near));
}

void check_activations(const Config& config) {
  if (config.activations.mode == memory::ActivationsMode::kFeedForward &&
      config.model.type == models::ModelType::kMlp)
    throw Error("activations.mode = feed_forward, but an mlp has no feed-forward layers in blocks.",
                "set it to full, offload or none.");
  if (config.activations.tile > 0 && config.model.type == models::ModelType::kMlp)
    throw Error("activations.tile is set, but an mlp has no feed-forward layers in blocks.",
                "set it to 0.");
  const auto& mixtures = models::kMixtures;
  const bool experts =
      std::find(mixtures.begin(), mixtures.end(), config.model.type) != mixtures.end();
  if (config.activations.tile > 0 && experts && config.model.dense_layers == 0)
    throw Error("activations.tile is set, but experts get all tokens at once.",
                "set it to 0: all blocks of this model have experts.");
  check(config.activations, config.model.layers);
}

bool scales_gradients(const Config& config) {
  return config.shard.precision == shard::Precision::kFp16 && config.optim.grad_scaler;
}

void check_offload(const Config& config) {
  check(config.offload);
  if (config.offload.parameters && config.shard.strategy == ShardingStrategy::NO_SHARD)
    throw Error("offload.parameters saves nothing with no_shard: every unit stays on the device.",
                "set shard.strategy to full_shard, which also works with one rank.");
  if (!config.offload.step_in_backward) return;
  auto refuse = [](const std::string& why, const std::string& hint) {
    throw Error(formatted("offload.step_in_backward is set, but {}.", why), hint);
  };
  if (config.optim.type == optim::OptimizerType::kMuon)
    refuse("muon needs whole matrices, which no backward has",
           "leave out offload.step_in_backward, or set optim.type to adamw.");
  if (config.train.clip > 0)
    refuse("gradients are clipped by a norm that is known only after backward (train.clip)",
           "add --train.clip 0, or leave out offload.step_in_backward.");
  if (scales_gradients(config))
    refuse("fp16 gradients are scaled and checked only after backward",
           "use --shard.precision bf16, or leave out offload.step_in_backward.");
}

void check_graph(const Config& config) {
  if (config.train.graph != GraphMode::kOn) return;
  auto refuse = [](const std::string& why, const std::string& key) {
    throw Error(formatted("train.graph = on, but the step can't be a CUDA graph: {}.", why),
                formatted("leave it at auto, or set {}.", key));
  };
  if (scales_gradients(config))
    refuse("the gradient scaler decides on the host", "shard.precision to bf16");
  if (reads_documents_on_host(config))
    refuse(
        "attention within documents is computed on the device only in half precision, without "
        "dropout and without a ring",
        "shard.precision to bf16, model.dropout to 0 and context.kind to ulysses");
  if (config.offload.optimizer) refuse("the CPU updates parameters", "offload.optimizer to false");
  if (offloads(config.activations.mode))
    refuse("activations move to host memory", "activations.mode to full");
  if (config.offload.any())
    refuse("parts of the model are offloaded", "offload.parameters and offload.gradients to false");
}

// What a ring can't compute.
void check_ring(const Config& config) {
  const auto refuse = [](const std::string& what, const std::string& hint) {
    throw Error(formatted("context.kind = ring, but {}.", what), hint);
  };
  if (config.model.dropout > 0)
    refuse("a ring has no dropout", "set model.dropout to 0, or context.kind to ulysses.");
  if (config.model.window > 0 && config.model.window < config.data.seq)
    refuse("a ring has no sliding windows (model.window)",
           "set context.kind to ulysses, with a context.size that divides the heads.");
}

void check_context(const Config& config, int world) {
  const int64_t size = config.context.size;
  if (size == 1) {
    if (config.context.kind != nn::ContextChoice::kAuto)
      throw Error("context.kind has no effect: each rank has whole sequences.",
                  "set context.size, or leave context.kind at auto.");
    return;
  }
  const std::string given = formatted("context.size = {}", size);
  if (config.model.type == models::ModelType::kMlp)
    throw Error(given + ", but an mlp has no sequences to share.", "set context.size to 1.");
  if (config.train.objective == Objective::kDpo)
    throw Error(given + ", but train.objective = dpo adds up whole answers on each rank.",
                "set context.size to 1.");
  if (world % size != 0)
    throw Error(formatted("{} ranks can't be divided into groups of {}.", world, given),
                "choose a divisor of the number of ranks.");
  const bool ring = context_kind(config) == ContextKind::RING;
  const int64_t chunks = ring ? 2 * size : size;
  if (config.data.seq % chunks != 0)
    throw Error(
        formatted("sequences of data.seq = {} can't be divided into {} chunks ({}, context.kind = "
                  "{}).",
                  config.data.seq, chunks, given, ring ? "ring" : "ulysses"),
        formatted("the next that can: --data.seq {}.", (config.data.seq / chunks + 1) * chunks));
  if (ring) return check_ring(config);
  if (!heads_can_be_exchanged(config))
    throw Error(
        formatted("{} ranks can't exchange {} heads with {} of keys (context.size).", size,
                  config.model.heads,
                  config.model.kv_heads > 0 ? config.model.kv_heads : config.model.heads),
        "leave context.kind at auto, or choose a context.size that divides model.heads, and "
        "divides model.kv_heads or is a multiple of them.");
}

// What a plan needs, too.
void check_rest(const Config& config, int world) {
  check_lora(config);
  check_fp8(config);
  check(config.optim, known_steps(config));
  check(config.shard, world);
  check_context(config, world);
  check_activations(config);
  check_offload(config);
  check_graph(config);
}

}  // namespace

void refuse_without_dir(bool automatic) {
  const std::string flag = automatic ? "--resume=auto" : "--resume";
  throw Error(flag + " needs the run's directory.",
              formatted("fsdp train --dir runs/NAME {}.", flag));
}

void check(const Config& config, int world) {
  if (config.resume != Resume::kNo && config.dir.empty())
    refuse_without_dir(config.resume == Resume::kAuto);
  check_effects(config);
  check_model(config);
  if (config.lora.rank > 0 && config.init_from.empty())
    throw Error("lora.rank is set, but there are no weights to adapt.",
                "pass --init-from DIR: a Hugging Face model, a run or a checkpoint.");
  if (!config.optim_from.empty() && config.init_from.empty())
    throw Error("optim_from has no effect: the weights are random.",
                "pass --init-from as well; usually it is the same checkpoint.");
  check_data(config);
  check_objective(config);
  check_length(config);
  check_rest(config, world);
  check_batch(config.train, parts_of_batch(config, world),
              config.context.size > 1 ? "groups of ranks that share sequences" : "ranks");
  if (config.data.train.empty() && !config.init_from.empty() && !config.resumes)
    throw Error("data.train is empty: there is nothing to train these weights on.",
                "pass --data.train FILE: conversations (chats.jsonl) or text.");
}

void check_choices(const Config& config, int world) {
  check_effects(config);
  check_model(config);
  check_rest(config, world);
}

bool reads_documents_on_host(const Config& config) {
  const bool documents = config.data.packing || config.data.document_mask;
  const bool ring = config.context.size > 1 && context_kind(config) == ContextKind::RING;
  return documents &&
         (config.shard.precision == shard::Precision::kFp32 || config.model.dropout > 0 || ring);
}

std::optional<int64_t> known_steps(const Config& config) {
  const TrainConfig& train = config.train;
  if (train.steps > 0) return train.steps;
  if (train.tokens <= 0 || train.batch <= 0 || config.data.seq <= 0) return {};
  int64_t step = train.batch * config.data.seq;
  return train.tokens / step + (train.tokens % step != 0);
}

}  // namespace fsdp::train
