#include "train/config_check.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <vector>

#include "fsdp/error.h"
#include "train/config_values.h"

namespace fsdp::train {
namespace {

using Words = std::vector<std::string>;

std::string digits(int64_t number) {
  return std::to_string(number);
}

bool is_one_of(const std::string& word, const Words& words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// A key that has an effect only if another key has one of some values.
struct OnlyWith {
  std::string key;
  std::string other;
  Words values;
};

const std::vector<OnlyWith>& conditions() {
  static const Words rotary = {"llama", "qwen2"}, text_models = {"llama", "qwen2", "gpt2"};
  static const std::vector<OnlyWith> all = {
      {"model.vocab", "model.type", text_models},
      {"model.heads", "model.type", text_models},
      {"model.kv_heads", "model.type", rotary},
      {"model.head_dim", "model.type", rotary},
      {"model.ffn", "model.type", text_models},
      {"model.max_tokens", "model.type", {"gpt2"}},
      {"model.tied", "model.type", text_models},
      {"model.dropout", "model.type", {"gpt2"}},
      {"model.rope_base", "model.type", rotary},
      {"model.rope_scaling", "model.type", rotary},
      {"model.width", "model.type", {"mlp"}},
      {"model.rope_factor", "model.rope_scaling", {"llama3"}},
      {"model.rope_low_freq", "model.rope_scaling", {"llama3"}},
      {"model.rope_high_freq", "model.rope_scaling", {"llama3"}},
      {"model.rope_original_tokens", "model.rope_scaling", {"llama3"}},
      {"data.document_mask", "model.type", text_models},
      {"train.sample_every", "model.type", text_models},
      {"optim.beta1", "optim.type", {"adamw"}},
      {"optim.beta2", "optim.type", {"adamw"}},
      {"optim.eps", "optim.type", {"adamw"}},
      {"optim.momentum", "optim.type", {"sgd"}},
      {"optim.decay_steps", "optim.schedule", {"wsd"}},
      {"optim.final_ratio", "optim.schedule", {"linear", "cosine", "wsd"}},
      {"activations.every", "activations.mode", {"selective", "feed_forward", "full", "offload"}},
      {"activations.keep_last",
       "activations.mode",
       {"selective", "feed_forward", "full", "offload"}},
      {"shard.wrap_min_params", "shard.wrap", {"size"}},
      {"shard.shard_ranks", "shard.strategy", {"hybrid_shard"}},
  };
  return all;
}

// A key without effect is an error: whoever set it expects one. Default values pass, because
// written configs contain every key.
void check_conditions(const Config& config) {
  Config copy = config, defaults;
  auto chosen = options(copy), usual = options(defaults);
  for (const OnlyWith& one : conditions()) {
    const Option& key = *find(chosen, one.key);
    const std::string& other = *std::get<std::string*>(find(chosen, one.other)->target);
    if (is_one_of(other, one.values)) continue;
    std::string standard = value_text(*find(usual, one.key));
    if (value_text(key) == standard) continue;
    std::string values;
    for (const auto& value : one.values) values += (values.empty() ? "" : " or ") + value;
    throw Error(
        one.key + " = " + value_text(key) + " has no effect: " + one.other + " is " + other + ".",
        "leave it at " + standard + ", or set " + one.other + " to " + values + ".");
  }
}

void check_model(const Config& config) {
  const ModelConfig& model = config.model;
  if (model.type == "mlp") return;
  if (model.head_dim == 0 && model.dim % model.heads != 0) {
    throw Error("model.dim = " + digits(model.dim) +
                    " isn't a multiple of model.heads = " + digits(model.heads) + ".",
                "each head gets an equal part of dim: try dim = " +
                    digits((model.dim / model.heads + 1) * model.heads) + ".");
  }
  const int64_t head = model.head_dim > 0 ? model.head_dim : model.dim / model.heads;
  if (model.type != "gpt2" && head % 2 != 0) {
    throw Error((model.head_dim > 0 ? "model.head_dim = " : "model.dim / model.heads = ") +
                    digits(head) + " is odd.",
                "rotary position embeddings rotate pairs of elements: choose an even head size.");
  }
  if (model.kv_heads > 0 && model.heads % model.kv_heads != 0) {
    throw Error("model.heads = " + digits(model.heads) +
                    " isn't a multiple of model.kv_heads = " + digits(model.kv_heads) + ".",
                "each key-value head serves the same number of heads.");
  }
  if (model.type == "gpt2" && model.max_tokens > 0 && config.data.seq > model.max_tokens) {
    throw Error("data.seq = " + digits(config.data.seq) + " is more than the " +
                    digits(model.max_tokens) + " positions of this gpt2 (model.max_tokens).",
                "lower data.seq, or set model.max_tokens to 0, which means data.seq.");
  }
  if (model.rope_scaling == "llama3" && model.rope_low_freq >= model.rope_high_freq) {
    throw Error("model.rope_low_freq isn't below model.rope_high_freq.", "Llama 3 has 1 and 4.");
  }
}

bool is_random(const DataConfig& data) {
  return is_one_of("random", data.train);
}

void check_data(const Config& config) {
  const DataConfig& data = config.data;
  bool has_token_files = is_one_of(data.format, {"nanogpt", "llmc", "megatron"});
  if (is_random(data) && (data.train.size() > 1 || !data.valid.empty())) {
    throw Error("data.train combines \"random\" with other data.",
                "use random tokens alone: data.train = [\"random\"], data.valid = [].");
  }
  if (is_random(data) && (data.format != "auto" || data.loss_mask || data.document_mask)) {
    throw Error("data.train = [\"random\"] reads no files, so a format or mask has no effect.",
                "leave out data.format, data.loss_mask and data.document_mask.");
  }
  if (config.model.type == "mlp" && !is_random(data)) {
    throw Error("an mlp can't be trained on text.",
                "use random vectors, data.train = [\"random\"], or choose another model.type.");
  }
  if (data.loss_mask && data.format == "text") {
    throw Error("data.loss_mask is for token files, but data.format is text.",
                "fsdp tokenize writes token files with a mask.");
  }
  if (has_token_files && data.train.empty()) {
    throw Error("data.format = " + data.format + ", but data.train names no file.",
                "pass a token file (fsdp tokenize makes them), or leave out data.format.");
  }
  if (has_token_files && config.model.vocab == 0 && data.tokenizer == "bytes") {
    throw Error("data.format = " + data.format + ": token files don't contain the vocabulary size.",
                "set model.vocab, or data.tokenizer to the tokenizer.json that made them.");
  }
}

void check_length(const Config& config) {
  const TrainConfig& train = config.train;
  int ends = (train.steps > 0) + (train.tokens > 0) + (train.epochs > 0);
  if (ends == 0) {
    throw Error("the length of the run isn't set.",
                "set one of train.steps, train.tokens and train.epochs (--steps 1000).");
  }
  if (ends > 1) {
    throw Error("more than one of train.steps, train.tokens and train.epochs is set.",
                "set only one of them.");
  }
  if (train.epochs > 0 && is_random(config.data)) {
    throw Error("random data has no epochs.", "set train.steps or train.tokens instead.");
  }
  if (train.tokens > 0 && config.model.type == "mlp") {
    throw Error("an mlp has no tokens to count.", "set train.steps instead of train.tokens.");
  }
  if (train.tokens > 0 && train.tokens < train.batch * config.data.seq) {
    throw Error("train.tokens = " + digits(train.tokens) + " is less than one step of " +
                    digits(train.batch) + " x " + digits(config.data.seq) + " tokens.",
                "raise train.tokens, or lower train.batch.");
  }
}

void check_batch(const TrainConfig& train, int world) {
  int64_t unit = world * std::max<int64_t>(train.micro_batch, 1);
  if (train.batch % unit == 0) return;
  int64_t below = train.batch / unit * unit, above = below + unit;
  std::string near = (below > 0 ? digits(below) + " or " : "") + digits(above);
  if (train.batch % world != 0) {
    throw Error("train.batch = " + digits(train.batch) + " can't be divided among " +
                    digits(world) + " ranks.",
                "the nearest that works: --batch " + near + ".");
  }
  throw Error("the " + digits(train.batch / world) + " samples per rank (train.batch = " +
                  digits(train.batch) + ", " + digits(world) + " ranks) aren't a multiple of " +
                  "train.micro_batch = " + digits(train.micro_batch) + ".",
              "use --batch " + near + ", or --train.micro_batch 0 for all at once.");
}

void check_optim(const Config& config) {
  const OptimConfig& optim = config.optim;
  if (optim.schedule == "wsd" && optim.decay_steps == 0) {
    throw Error("optim.schedule = wsd needs the length of its decay.",
                "set optim.decay_steps; a tenth to a fifth of all steps is typical.");
  }
  auto steps = known_steps(config);
  if (steps && optim.warmup_steps > *steps) {
    throw Error("optim.warmup_steps = " + digits(optim.warmup_steps) + " is more than the run's " +
                    digits(*steps) + " steps.",
                "lower it: --optim.warmup_steps " + digits(*steps / 10) + ".");
  }
  if (steps && optim.schedule == "wsd" && optim.warmup_steps > *steps - optim.decay_steps) {
    throw Error("optim.warmup_steps plus optim.decay_steps is more than the run's " +
                    digits(*steps) + " steps.",
                "lower one of them.");
  }
}

void check_shard(const ShardConfig& shard, int world) {
  if (shard.shard_ranks > 0 && world % shard.shard_ranks != 0) {
    throw Error(digits(world) + " ranks can't be divided into groups of shard.shard_ranks = " +
                    digits(shard.shard_ranks) + ".",
                "choose a divisor of the number of ranks.");
  }
  const std::string& reshard = shard.reshard_after_forward;
  if (shard.strategy == "no_shard" && reshard != "auto") {
    throw Error("shard.reshard_after_forward = " + reshard +
                    " has no effect: no_shard never reshards parameters.",
                "leave it at \"auto\", or choose another shard.strategy.");
  }
  if (shard.strategy == "shard_grad_op" && reshard != "auto" && reshard != "false") {
    throw Error("shard.reshard_after_forward = " + reshard +
                    " contradicts shard_grad_op, which keeps parameters until backward.",
                "leave it at \"auto\", or set shard.strategy to full_shard.");
  }
  int64_t parts = 0;
  std::from_chars(reshard.data(), reshard.data() + reshard.size(), parts);
  int64_t ranks = shard.shard_ranks > 0 ? shard.shard_ranks : world;
  if (parts > 0 && ranks % parts != 0) {
    throw Error("shard.reshard_after_forward = " + reshard + " doesn't divide the " +
                    digits(ranks) + " ranks that share the model.",
                "choose a divisor, true or false.");
  }
  check_precision(shard);
}

}  // namespace

void check_precision(const ShardConfig& shard) {
  if (shard.precision == "fp32" && shard.reduce != "fp32") {
    throw Error("shard.reduce = " + shard.reduce +
                    " would round gradients, which are computed in fp32 (shard.precision).",
                "set shard.precision to " + shard.reduce + ", or shard.reduce to fp32.");
  }
  if (shard.gradients == "bf16" && (shard.precision == "fp32" || shard.precision == "fp16")) {
    throw Error("shard.gradients = bf16 would round gradients, which are computed in " +
                    shard.precision + " (shard.precision).",
                "set shard.precision to bf16, or shard.gradients to fp32.");
  }
}

namespace {

void check_offload(const Config& config) {
  const OffloadConfig& offload = config.offload;
  if (offload.fraction != 1 && !offloads(config))
    throw Error("offload.fraction is set, but nothing is offloaded.",
                "add --offload.optimizer, --offload.parameters or --offload.gradients.");
  for (auto [on, key] : {std::pair(!offload.directory.empty(), "offload.directory"),
                         std::pair(offload.step_in_backward, "offload.step_in_backward")})
    if (on && !offload.optimizer)
      throw Error(std::string(key) + " is set, but offload.optimizer is not.",
                  "add --offload.optimizer: this option is for updates on the CPU.");
  if (offload.parameters && config.shard.strategy == "no_shard")
    throw Error("offload.parameters saves nothing with no_shard: every unit stays on the device.",
                "set shard.strategy to full_shard, which also works with one rank.");
  if (!offload.step_in_backward) return;
  auto refuse = [](const std::string& why, const std::string& hint) {
    throw Error("offload.step_in_backward is set, but " + why + ".", hint);
  };
  if (config.train.clip > 0)
    refuse("gradients are clipped by a norm that is known only after backward (train.clip)",
           "add --train.clip 0, or leave out offload.step_in_backward.");
  if (config.shard.precision == "fp16" && config.optim.grad_scaler)
    refuse("fp16 gradients are scaled and checked only after backward",
           "use --shard.precision bf16, or leave out offload.step_in_backward.");
}

void check_activations(const Config& config) {
  if (config.activations.mode == "feed_forward" && config.model.type == "mlp")
    throw Error("activations.mode = feed_forward, but an mlp has no feed-forward layers in blocks.",
                "set it to full, offload or none.");
  int64_t layers = config.model.layers;
  if (layers > 0 && config.activations.every > layers)
    throw Error("activations.every is " + digits(config.activations.every) +
                    ", but there are only " + digits(layers) + " layers (model.layers).",
                "set it to at most " + digits(layers) + ".");
  if (layers > 0 && config.activations.mode != "none" && config.activations.keep_last >= layers)
    throw Error("activations.keep_last is " + digits(config.activations.keep_last) +
                    ", but there are only " + digits(layers) + " layers (model.layers).",
                "set it to less than that, or activations.mode to none.");
}

void check_graph(const Config& config) {
  if (config.train.graph != "on") return;
  auto refuse = [](const std::string& why, const std::string& key) {
    throw Error("train.graph = on, but the step can't be a CUDA graph: " + why + ".",
                "leave it at auto, or set " + key + ".");
  };
  if (config.shard.precision == "fp16" && config.optim.grad_scaler)
    refuse("the gradient scaler decides on the host", "shard.precision to bf16");
  if (config.data.document_mask)
    refuse("with document masks, batches differ in shape", "data.document_mask to false");
  if (config.data.loss_mask)
    refuse("the number of targets that count is known only on the host", "data.loss_mask to false");
  if (config.offload.optimizer) refuse("the CPU updates parameters", "offload.optimizer to false");
  if (config.activations.mode == "offload")
    refuse("activations move to host memory", "activations.mode to full");
  if (offloads(config))
    refuse("parts of the model are offloaded", "offload.parameters and offload.gradients to false");
}

}  // namespace

void check(const Config& config, int world) {
  if (config.resume && config.dir.empty()) {
    throw Error("--resume needs the run's directory.", "add --dir runs/NAME.");
  }
  check_conditions(config);
  check_model(config);
  check_data(config);
  check_length(config);
  check_batch(config.train, world);
  check_optim(config);
  check_shard(config.shard, world);
  check_activations(config);
  check_offload(config);
  check_graph(config);
}

void check_choices(const Config& config, int world) {
  check_conditions(config);
  check_model(config);
  check_optim(config);
  check_shard(config.shard, world);
  check_activations(config);
  check_offload(config);
  check_graph(config);
}

bool offloads(const Config& config) {
  const OffloadConfig& offload = config.offload;
  return offload.optimizer || offload.parameters || offload.gradients;
}

std::optional<int64_t> known_steps(const Config& config) {
  const TrainConfig& train = config.train;
  if (train.steps > 0) return train.steps;
  if (train.tokens <= 0 || train.batch <= 0 || config.data.seq <= 0) return {};
  int64_t step = train.batch * config.data.seq;
  return train.tokens / step + (train.tokens % step != 0);
}

}  // namespace fsdp::train
