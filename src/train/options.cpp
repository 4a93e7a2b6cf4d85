#include "train/options.h"

#include <algorithm>

namespace fsdp::train {
namespace {

// Bounds that nobody will miss; within them, counts of parameters, tokens and steps fit 64 bits.
constexpr double kWidest = 1e6, kLongest = 1e8, kMostSamples = 1e9, kMostSteps = 1e15;

// Adds options of one section after the other.
class List {
 public:
  std::vector<Option> options;

  void section(std::string name) { section_ = std::move(name); }

  template <typename T>
  void add(std::string key, T& target, std::string help, OptionCheck check = {}) {
    options.push_back(
        {section_, std::move(key), Target(&target), std::move(help), std::move(check)});
  }

 private:
  std::string section_;
};

void add_model(List& list, ModelConfig& model) {
  list.section("model");
  list.add("type", model.type, "What is trained", {.choices = {"llama", "qwen2", "gpt2", "mlp"}});
  list.add("vocab", model.vocab, "Tokens the model knows; 0: as many as the tokenizer has",
           {.least = 0, .most = 1e8});
  list.add("dim", model.dim, "Width of the model: elements of a token's vector",
           {.least = 1, .most = kWidest});
  list.add("layers", model.layers, "Blocks, one after the other; of an mlp, its linear layers",
           {.least = 1, .most = 1e5});
  list.add("heads", model.heads, "Attention heads; dim must be a multiple where head_dim is 0",
           {.least = 1, .most = kWidest});
  list.add("kv_heads", model.kv_heads,
           "Heads of keys and values, a divisor of heads; 0: as many as heads",
           {.least = 0, .most = kWidest});
  list.add("head_dim", model.head_dim, "Width of a head; 0: dim / heads",
           {.least = 0, .most = kWidest});
  list.add(
      "ffn", model.ffn,
      "Width of the feed-forward part; 0: 8/3 of dim rounded up to a multiple of 256, for gpt2 "
      "4 times dim",
      {.least = 0, .most = 1e7});
  list.add("max_tokens", model.max_tokens, "Positions that a gpt2 has; 0: data.seq",
           {.least = 0, .most = kLongest});
  list.add("tied", model.tied, "The head that predicts tokens is the embedding; of a gpt2 always");
  list.add("norm_eps", model.norm_eps, "Added inside norms", {.least = 0, .above = true});
  list.add("init_std", model.init_std, "Standard deviation of matrices at the start", {.least = 0});
  list.add("dropout", model.dropout, "Share of a gpt2's activations that are dropped",
           {.least = 0, .most = 0.99});
  list.add("rope_base", model.rope_base, "Base of the rotary positions",
           {.least = 1, .above = true});
  list.add("rope_scaling", model.rope_scaling, "How rotary positions are stretched for long texts",
           {.choices = {"none", "llama3"}});
  list.add("rope_factor", model.rope_factor, "By how much llama3 stretches long waves",
           {.least = 1});
  list.add("rope_low_freq", model.rope_low_freq,
           "llama3: waves fewer times than this in the original length are stretched in full",
           {.least = 0, .above = true});
  list.add("rope_high_freq", model.rope_high_freq,
           "llama3: waves more times than this in the original length stay as they are",
           {.least = 0, .above = true});
  list.add("rope_original_tokens", model.rope_original_tokens,
           "llama3: the length before stretching, in tokens", {.least = 1, .most = kLongest});
  list.add("width", model.width, "Width of an mlp's linear layers", {.least = 1, .most = kWidest});
}

void add_data(List& list, DataConfig& data) {
  list.section("data");
  list.add("train", data.train,
           "Files or folders to train on, seen from the working directory; [] takes LibTorch's own "
           "C++ headers, [\"random\"] tokens that are made up");
  list.add("valid", data.valid, "Likewise to evaluate on; []: the end of the training data");
  list.add("valid_share", data.valid_share,
           "Share of the training data that is kept back for evaluation where valid is []",
           {.least = 0, .most = 0.5});
  list.add("format", data.format, "What the files are",
           {.choices = {"auto", "text", "nanogpt", "llmc", "megatron"}});
  list.add("tokenizer", data.tokenizer,
           "\"bytes\" or a tokenizer.json: makes tokens of text, and text of samples");
  list.add("seq", data.seq, "Tokens in a sample", {.least = 1, .most = kLongest});
  list.add("shuffle", data.shuffle, "Samples come in an order that seed and epoch decide");
  list.add("document_mask", data.document_mask, "Attention stays within a document");
  list.add("loss_mask", data.loss_mask,
           "FILE.mask beside each token file says which tokens are to be learned");
  list.add("prefetch", data.prefetch, "Batches loaded ahead; 0: loaded when they are needed",
           {.least = 0, .most = 1024});
}

void add_train(List& list, TrainConfig& train) {
  list.section("train");
  list.add("steps", train.steps, "Steps of the run; one of steps, tokens and epochs is set",
           {.least = 0, .most = kMostSteps, .alias = "--steps"});
  list.add("tokens", train.tokens, "Tokens of the run",
           {.least = 0, .most = 1e18, .alias = "--tokens"});
  list.add("epochs", train.epochs, "Passes over the training data",
           {.least = 0, .most = 1e9, .alias = "--epochs"});
  list.add("batch", train.batch, "Samples in a step, over all ranks",
           {.least = 1, .most = kMostSamples, .alias = "--batch"});
  list.add("micro_batch", train.micro_batch,
           "Samples a rank computes at once, to save memory; 0: all its part of the batch",
           {.least = 0, .most = kMostSamples});
  list.add("seed", train.seed, "Decides weights at the start, order of samples and dropout",
           {.least = 0, .alias = "--seed"});
  list.add("clip", train.clip, "Largest norm of a gradient; 0: no clipping", {.least = 0});
  list.add("on_nan", train.on_nan, "What happens to a step whose loss or gradient is not finite",
           {.choices = {"skip", "stop"}});
  list.add("max_skips", train.max_skips, "Skipped steps in a row after which the run stops",
           {.least = 1});
  list.add("eval_every", train.eval_every, "Steps between evaluations; 0: only at the end",
           {.least = 0});
  list.add("eval_batches", train.eval_batches, "Batches of an evaluation; 0: all there are",
           {.least = 0});
  list.add("sample_every", train.sample_every,
           "Steps between texts that the model writes; 0: only at the end", {.least = 0});
  list.add("sample_tokens", train.sample_tokens, "Tokens of such a text; 0: none are written",
           {.least = 0});
  list.add("sample_prompt", train.sample_prompt, "What such a text begins with");
  list.add("sample_temperature", train.sample_temperature,
           "How freely it chooses; 0: always the likeliest token", {.least = 0});
  list.add("deterministic", train.deterministic,
           "A GPU's operators give the same bits every time, at some cost",
           {.alias = "--deterministic"});
  list.add("graph", train.graph,
           "A GPU replays a whole step as one CUDA graph, which is recorded after the first steps; "
           "auto: where it can and the run is long enough",
           {.choices = {"auto", "on", "off"}});
  list.add("profile", train.profile,
           "Steps, after the first three, whose time is taken apart unit by unit: a table, and "
           "trace-rankN.json in dir",
           {.least = 0, .most = 1e6, .alias = "--profile"});
  list.add("grace", train.grace,
           "Seconds to finish the step and save after SIGTERM or SIGINT, before all ranks are "
           "killed; 0: the larger of 30 and three recent steps",
           {.least = 0, .most = 1e6, .alias = "--grace"});
}

void add_optim(List& list, OptimConfig& optim) {
  list.section("optim");
  list.add("type", optim.type, "The optimizer", {.choices = {"adamw", "sgd"}});
  list.add("lr", optim.lr, "Learning rate after the warm-up", {.least = 0});
  list.add("beta1", optim.beta1, "adamw: memory of the gradient", {.least = 0, .most = 0.999999});
  list.add("beta2", optim.beta2, "adamw: memory of its square", {.least = 0, .most = 0.999999999});
  list.add("eps", optim.eps, "adamw: added to the root of the square", {.least = 0});
  list.add("weight_decay", optim.weight_decay,
           "Pull of matrices towards zero; norms and biases have none", {.least = 0});
  list.add("momentum", optim.momentum, "sgd: memory of the gradient",
           {.least = 0, .most = 0.999999});
  list.add("schedule", optim.schedule,
           "How the learning rate falls after the warm-up; wsd: only in the last decay_steps",
           {.choices = {"constant", "linear", "cosine", "wsd"}});
  list.add("warmup_steps", optim.warmup_steps, "Steps in which the learning rate rises",
           {.least = 0, .most = kMostSteps});
  list.add("decay_steps", optim.decay_steps, "wsd: steps at the end in which it falls",
           {.least = 0, .most = kMostSteps});
  list.add("final_ratio", optim.final_ratio, "Share of the learning rate that is left at the end",
           {.least = 0, .most = 1});
  list.add("grad_scaler", optim.grad_scaler,
           "With fp16, losses are scaled so that small gradients do not vanish");
}

void add_shard(List& list, ShardConfig& shard) {
  list.section("shard");
  list.add("strategy", shard.strategy, "What is divided among the ranks",
           {.choices = {"full_shard", "shard_grad_op", "no_shard", "hybrid_shard"}});
  list.add("wrap", shard.wrap,
           "What is gathered at once: a block, modules of wrap_min_params, or everything (root)",
           {.choices = {"block", "size", "root"}});
  list.add("wrap_min_params", shard.wrap_min_params, "wrap = size: parameters of a unit at least",
           {.least = 1});
  list.add("shard_ranks", shard.shard_ranks,
           "hybrid_shard: ranks that share one copy of the model; 0: those of a host",
           {.least = 0});
  list.add("precision", shard.precision,
           "Parameters and activations in operators; auto: bf16 on a GPU, else fp32",
           {.choices = {"auto", "fp32", "bf16", "fp16"}});
  list.add("reduce", shard.reduce, "Gradients while they are summed over ranks",
           {.choices = {"fp32", "bf16", "fp16"}});
  list.add("gradients", shard.gradients,
           "Gradients from backward to the optimizer; bf16 saves memory: half of theirs",
           {.choices = {"fp32", "bf16"}});
  list.add("reshard_after_forward", shard.reshard_after_forward,
           "Parameters leave after forward (true), stay for backward (false), or are kept in that "
           "many parts; auto: as the strategy says",
           {.choices = {"auto", "true", "false"}, .or_number = true});
  list.add("forward_prefetch", shard.forward_prefetch, "Units gathered ahead in forward",
           {.least = 0, .most = 64});
  list.add("backward_prefetch", shard.backward_prefetch, "Units gathered ahead in backward",
           {.least = 0, .most = 64});
  list.add("limit_all_gathers", shard.limit_all_gathers,
           "Gathers wait until memory of earlier ones is free");
  list.add("share_host_memory", shard.share_host_memory,
           "Ranks of one host keep gathered parameters once, in shared memory (shm only)");
}

void add_activations(List& list, ActivationsConfig& activations) {
  list.section("activations");
  list.add("mode", activations.mode,
           "none: all that backward reads is kept; selective: norms and activations are computed "
           "again, which the layers of these models do in any case; feed_forward: the wide "
           "products of feed-forwards, too; full: whole blocks; offload: it waits in host memory",
           {.choices = {"none", "selective", "feed_forward", "full", "offload"}});
  list.add("every", activations.every, "In every how many-th block", {.least = 1});
  list.add("keep_last", activations.keep_last,
           "So many blocks at the end are left alone: backward needs them before gradients have "
           "taken memory",
           {.least = 0});
}

void add_offload(List& list, OffloadConfig& offload) {
  list.section("offload");
  list.add("optimizer", offload.optimizer,
           "Masters, states and gradients lie in host memory, and the CPU updates them");
  list.add("parameters", offload.parameters,
           "Parameters lie there, and come to the device when they are gathered");
  list.add("gradients", offload.gradients,
           "Gradients leave during backward; with optimizer they do in any case");
  list.add("fraction", offload.fraction,
           "Share of the model that leaves, in whole units, the last ones first",
           {.least = 0, .most = 1});
  list.add("directory", offload.directory,
           "Masters and states lie in a file in this directory instead; empty: in memory");
  list.add("step_in_backward", offload.step_in_backward,
           "Units are updated as their gradients come; a step that is not finite ends the run");
}

void add_rest(List& list, Config& config) {
  list.section("checkpoint");
  auto& checkpoint = config.checkpoint;
  list.add("every", checkpoint.every, "Steps between checkpoints; 0: only at the end",
           {.least = 0});
  list.add("keep_last", checkpoint.keep_last, "Older ones are deleted; 0: all are kept",
           {.least = 0});
  list.add("at_end", checkpoint.at_end, "A checkpoint at the end, also when a signal ends the run");
  list.add("async", checkpoint.async,
           "Write behind the training, which is held only while its state is copied to host memory "
           "(as much as a rank's shards have); false: until everything is on the disk");
  list.section("comm");
  list.add("backend", config.comm.backend, "How ranks talk; auto: what fits device and hosts",
           {.choices = {"auto", "shm", "mpi", "nccl"}});
  list.add("timeout", config.comm.timeout,
           "Seconds until an operation that does not end is an error; 0: FSDP_TIMEOUT, else 300",
           {.least = 0, .most = 1e6});
  list.section("log");
  list.add("every", config.log.every, "Steps between lines where there is no terminal",
           {.least = 1});
  list.add("tensorboard", config.log.tensorboard, "Figures also as TensorBoard events");
  list.add("peak_tflops", config.log.peak_tflops,
           "What one device can do, for MFU; 0: known GPUs only", {.least = 0});
  list.add("silence", config.log.silence, "Warnings that are not given, by name");
}

// Edits (a letter more, fewer, other, or two swapped) from one word to the other.
size_t edits(const std::string& from, const std::string& to) {
  std::vector<std::vector<size_t>> cost(from.size() + 1, std::vector<size_t>(to.size() + 1));
  for (size_t i = 0; i <= from.size(); ++i) {
    for (size_t j = 0; j <= to.size(); ++j) {
      if (i == 0 || j == 0) {
        cost[i][j] = i + j;
        continue;
      }
      bool same = from[i - 1] == to[j - 1];
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, cost[i - 1][j - 1] + !same});
      if (i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1]) {
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
      }
    }
  }
  return cost[from.size()][to.size()];
}

// More edits than this and it is another word.
size_t far(const std::string& word) {
  return 1 + word.size() / 3;
}

}  // namespace

std::vector<Option> options(Config& config) {
  List list;
  list.section("");
  list.add("dir", config.dir, "Directory of the run; empty: runs/NAME, NAME of the config");
  list.add("resume", config.resume, "Go on from the latest checkpoint in dir");
  list.add(
      "init_from", config.init_from,
      "Begin with the model and the weights in this directory: Hugging Face's (config.json and "
      "safetensors), a run's, or a checkpoint; empty: with random weights",
      {.alias = "--init-from"});
  add_model(list, config.model);
  add_data(list, config.data);
  add_train(list, config.train);
  add_optim(list, config.optim);
  add_shard(list, config.shard);
  add_activations(list, config.activations);
  add_offload(list, config.offload);
  add_rest(list, config);
  return std::move(list.options);
}

const std::vector<Section>& sections() {
  static const std::vector<Section> all = {
      {"", "The run"},
      {"model", "What is trained"},
      {"data", "What it is trained on"},
      {"train", "How long, in what portions, and what is looked at on the way"},
      {"optim", "How it learns"},
      {"shard", "How it is divided among ranks"},
      {"activations", "What backward needs of forward: kept, computed again or moved"},
      {"offload", "What lies in host memory instead of the device's"},
      {"checkpoint", "What is kept"},
      {"comm", "How ranks talk"},
      {"log", "What is shown and written"},
  };
  return all;
}

const Option* find(const std::vector<Option>& options, const std::string& name) {
  for (const Option& option : options)
    if (option.name() == name) return &option;
  return nullptr;
}

std::string nearest_word(const std::vector<std::string>& known, const std::string& word) {
  std::string best;
  size_t least = far(word) + 1;
  for (const std::string& candidate : known) {
    size_t cost = edits(word, candidate);
    if (cost < least) least = cost, best = candidate;
  }
  return best;
}

std::string nearest(const std::vector<Option>& options, const std::string& name) {
  std::string key = name.substr(name.rfind('.') + 1);
  std::string best;
  size_t least = far(name) + 1;
  auto consider = [&](size_t cost, const Option& option) {
    if (cost < least) least = cost, best = option.name();
  };
  for (const Option& option : options) {
    consider(edits(name, option.name()), option);
    // The right key in the wrong section, or without one, is nearer than any other word.
    if (option.key == key) consider(0, option);
    if (edits(key, option.key) <= far(key)) consider(1 + edits(key, option.key), option);
  }
  return best;
}

}  // namespace fsdp::train
