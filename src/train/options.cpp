#include "train/options.h"

#include <algorithm>

#include "base/nearest.h"

namespace fsdp::train {
namespace {

// Generous bounds that keep counts of parameters, tokens and steps within 64 bits.
constexpr double kWidest = 1e6, kLongest = 1e8, kMostSamples = 1e9, kMostSteps = 1e15;

// Collects options, section by section.
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
  list.add("type", model.type, "Model architecture",
           {.choices = {"llama", "qwen2", "gpt2", "mlp"}});
  list.add("vocab", model.vocab, "Vocabulary size; 0: the tokenizer's", {.least = 0, .most = 1e8});
  list.add("dim", model.dim, "Width of the model", {.least = 1, .most = kWidest});
  list.add("layers", model.layers, "Number of blocks; mlp: number of linear layers",
           {.least = 1, .most = 1e5});
  list.add("heads", model.heads, "Attention heads; must divide dim unless head_dim is set",
           {.least = 1, .most = kWidest});
  list.add("kv_heads", model.kv_heads, "Key-value heads; must divide heads; 0: same as heads",
           {.least = 0, .most = kWidest});
  list.add("head_dim", model.head_dim, "Width of an attention head; 0: dim / heads",
           {.least = 0, .most = kWidest});
  list.add(
      "ffn", model.ffn,
      "Width of the feed-forward layers; 0: 8/3 of dim, rounded up to a multiple of 256 (gpt2: 4 "
      "times dim)",
      {.least = 0, .most = 1e7});
  list.add("max_tokens", model.max_tokens, "gpt2: number of positions; 0: data.seq",
           {.least = 0, .most = kLongest});
  list.add("tied", model.tied,
           "Use the embedding matrix as the output layer; always true for gpt2");
  list.add("norm_eps", model.norm_eps, "Epsilon of the norm layers", {.least = 0, .above = true});
  list.add("init_std", model.init_std, "Standard deviation of initial weight matrices",
           {.least = 0});
  list.add("dropout", model.dropout, "gpt2: dropout probability", {.least = 0, .most = 0.99});
  list.add("rope_base", model.rope_base, "Base of the rotary position embedding (RoPE)",
           {.least = 1, .above = true});
  list.add("rope_scaling", model.rope_scaling, "RoPE scaling for long contexts",
           {.choices = {"none", "llama3"}});
  list.add("rope_factor", model.rope_factor, "llama3 scaling: factor for long wavelengths",
           {.least = 1});
  list.add(
      "rope_low_freq", model.rope_low_freq,
      "llama3 scaling: wavelengths that fit fewer times than this into the original length are "
      "scaled fully",
      {.least = 0, .above = true});
  list.add("rope_high_freq", model.rope_high_freq,
           "llama3 scaling: wavelengths that fit more times than this into the original length "
           "aren't scaled",
           {.least = 0, .above = true});
  list.add("rope_original_tokens", model.rope_original_tokens,
           "llama3 scaling: the original context length, in tokens",
           {.least = 1, .most = kLongest});
  list.add("width", model.width, "mlp: width of the linear layers", {.least = 1, .most = kWidest});
}

void add_data(List& list, DataConfig& data) {
  list.section("data");
  list.add("train", data.train,
           "Files or folders to train on, relative to the working directory; []: LibTorch's C++ "
           "headers; [\"random\"]: random tokens");
  list.add("valid", data.valid, "Files or folders to evaluate on; []: valid_share of train");
  list.add("valid_share", data.valid_share,
           "Share of train that is held out for evaluation if valid is [], spread over the data",
           {.least = 0, .most = 0.5});
  list.add("format", data.format, "Format of the files",
           {.choices = {"auto", "text", "nanogpt", "llmc", "megatron"}});
  list.add("tokenizer", data.tokenizer,
           "\"bytes\" or a tokenizer.json; encodes text data and decodes samples");
  list.add("seq", data.seq, "Tokens per sample", {.least = 1, .most = kLongest});
  list.add("shuffle", data.shuffle, "Shuffle samples; the order depends on the seed and the epoch");
  list.add("document_mask", data.document_mask, "Restrict attention to the same document");
  list.add("loss_mask", data.loss_mask,
           "Compute the loss only on tokens that FILE.mask next to each token file selects; unless it "
           "is set, it is true if there is such a file");
  list.add("prefetch", data.prefetch, "Batches to load ahead; 0: load each when it is needed",
           {.least = 0, .most = 1024});
}

void add_train(List& list, TrainConfig& train) {
  list.section("train");
  list.add("steps", train.steps, "Number of steps; set exactly one of steps, tokens and epochs",
           {.least = 0, .most = kMostSteps, .alias = "--steps"});
  list.add("tokens", train.tokens, "Number of tokens to train on",
           {.least = 0, .most = 1e18, .alias = "--tokens"});
  list.add("epochs", train.epochs, "Number of passes over the training data",
           {.least = 0, .most = 1e9, .alias = "--epochs"});
  list.add("batch", train.batch, "Samples per step, over all ranks",
           {.least = 1, .most = kMostSamples, .alias = "--batch"});
  list.add(
      "micro_batch", train.micro_batch,
      "Samples per forward and backward pass on each rank; less saves memory; 0: the rank's whole "
      "part of the batch",
      {.least = 0, .most = kMostSamples});
  list.add("seed", train.seed, "Random seed of initial weights, sample order and dropout",
           {.least = 0, .alias = "--seed"});
  list.add("clip", train.clip, "Maximum gradient norm; 0: no clipping", {.least = 0});
  list.add("on_nan", train.on_nan, "What to do with a step whose loss or gradient isn't finite",
           {.choices = {"skip", "stop"}});
  list.add("max_skips", train.max_skips, "Consecutive skipped steps before the run stops",
           {.least = 1});
  list.add("eval_every", train.eval_every, "Steps between evaluations; 0: only at the end",
           {.least = 0});
  list.add("eval_batches", train.eval_batches, "Batches per evaluation; 0: all", {.least = 0});
  list.add("sample_every", train.sample_every,
           "Steps between generated samples; 0: only at the end", {.least = 0});
  list.add("sample_tokens", train.sample_tokens, "Tokens per generated sample; 0: no samples",
           {.least = 0});
  list.add("sample_prompt", train.sample_prompt, "Prompt of generated samples");
  list.add("sample_temperature", train.sample_temperature,
           "Sampling temperature; 0: always the most likely token", {.least = 0});
  list.add("deterministic", train.deterministic,
           "Use deterministic GPU operators: the same bits every time, at some cost",
           {.alias = "--deterministic"});
  list.add("graph", train.graph,
           "Replay the whole step as one CUDA graph, recorded after the first steps; auto: if "
           "possible and the run is long enough",
           {.choices = {"auto", "on", "off"}});
  list.add("profile", train.profile,
           "Number of steps to profile, after the first three: prints a table per unit and writes "
           "trace-rankN.json to dir",
           {.least = 0, .most = 1e6, .alias = "--profile"});
  list.add("grace", train.grace,
           "Seconds to finish the step and save after SIGTERM or SIGINT, before all ranks are "
           "killed; 0: the larger of 30 and three recent steps",
           {.least = 0, .most = 1e6, .alias = "--grace"});
}

void add_optim(List& list, OptimConfig& optim) {
  list.section("optim");
  list.add("type", optim.type, "Optimizer", {.choices = {"adamw", "sgd"}});
  list.add("lr", optim.lr, "Learning rate after warm-up", {.least = 0});
  list.add("beta1", optim.beta1, "adamw: decay rate of the first moment",
           {.least = 0, .most = 0.999999});
  list.add("beta2", optim.beta2, "adamw: decay rate of the second moment",
           {.least = 0, .most = 0.999999999});
  list.add("eps", optim.eps, "adamw: epsilon in the denominator", {.least = 0});
  list.add("weight_decay", optim.weight_decay,
           "Weight decay of matrices; none for norms and biases", {.least = 0});
  list.add("momentum", optim.momentum, "sgd: momentum", {.least = 0, .most = 0.999999});
  list.add(
      "schedule", optim.schedule,
      "Learning rate schedule after warm-up; wsd: constant, then decays over the last decay_steps",
      {.choices = {"constant", "linear", "cosine", "wsd"}});
  list.add("warmup_steps", optim.warmup_steps, "Steps of linear warm-up",
           {.least = 0, .most = kMostSteps});
  list.add("decay_steps", optim.decay_steps, "wsd: steps of decay at the end",
           {.least = 0, .most = kMostSteps});
  list.add("final_ratio", optim.final_ratio, "Final learning rate as a share of lr",
           {.least = 0, .most = 1});
  list.add("grad_scaler", optim.grad_scaler,
           "fp16: scale the loss so that small gradients don't become zero");
}

void add_shard(List& list, ShardConfig& shard) {
  list.section("shard");
  list.add("strategy", shard.strategy, "Sharding strategy",
           {.choices = {"full_shard", "shard_grad_op", "no_shard", "hybrid_shard"}});
  list.add(
      "wrap", shard.wrap,
      "What a unit is: one block, modules of at least wrap_min_params, or the whole model (root)",
      {.choices = {"block", "size", "root"}});
  list.add("wrap_min_params", shard.wrap_min_params,
           "wrap = size: minimum number of parameters per unit", {.least = 1});
  list.add("shard_ranks", shard.shard_ranks,
           "hybrid_shard: ranks that share one copy of the model; 0: the ranks of one host",
           {.least = 0});
  list.add("precision", shard.precision,
           "Data type of parameters and activations in operators; auto: bf16 on a GPU, else fp32",
           {.choices = {"auto", "fp32", "bf16", "fp16"}});
  list.add("reduce", shard.reduce, "Data type of gradients in reductions",
           {.choices = {"fp32", "bf16", "fp16"}});
  list.add("gradients", shard.gradients,
           "Data type of gradients between backward and the optimizer; bf16 halves their memory",
           {.choices = {"fp32", "bf16"}});
  list.add("reshard_after_forward", shard.reshard_after_forward,
           "Reshard parameters after forward (true), keep them for backward (false), or reshard to "
           "this many ranks; auto: decided by the strategy",
           {.choices = {"auto", "true", "false"}, .or_number = true});
  list.add("forward_prefetch", shard.forward_prefetch, "Units to gather ahead in forward",
           {.least = 0, .most = 64});
  list.add("backward_prefetch", shard.backward_prefetch, "Units to gather ahead in backward",
           {.least = 0, .most = 64});
  list.add("limit_all_gathers", shard.limit_all_gathers,
           "Delay gathers until the memory of earlier ones is free");
  list.add("share_host_memory", shard.share_host_memory,
           "Keep gathered parameters once per host, in shared memory (shm only)");
}

void add_activations(List& list, ActivationsConfig& activations) {
  list.section("activations");
  list.add(
      "mode", activations.mode,
      "none: keep everything for backward; selective: recompute norms and activations, which "
      "the layers of these models always do; feed_forward: also recompute the wide products of "
      "feed-forward layers; full: recompute whole blocks; offload: move to host memory",
      {.choices = {"none", "selective", "feed_forward", "full", "offload"}});
  list.add("every", activations.every, "Apply to every n-th block", {.least = 1});
  list.add("keep_last", activations.keep_last,
           "The last n blocks aren't recomputed: backward reaches them while memory is still free",
           {.least = 0});
}

void add_offload(List& list, OffloadConfig& offload) {
  list.section("offload");
  list.add("optimizer", offload.optimizer,
           "Keep masters, optimizer states and gradients in host memory and update on the CPU");
  list.add("parameters", offload.parameters,
           "Keep parameter shards in host memory; they move to the device when they are gathered");
  list.add("gradients", offload.gradients,
           "Move gradients to host memory during backward; implied by optimizer");
  list.add("fraction", offload.fraction,
           "Share of the model to offload, in whole units, the last ones first",
           {.least = 0, .most = 1});
  list.add("directory", offload.directory,
           "Keep masters and optimizer states in a file in this directory; empty: in host memory");
  list.add("step_in_backward", offload.step_in_backward,
           "Update each unit as soon as its gradients arrive; a non-finite step then ends the run");
}

void add_rest(List& list, Config& config) {
  list.section("checkpoint");
  auto& checkpoint = config.checkpoint;
  list.add("every", checkpoint.every, "Steps between checkpoints; 0: only at the end",
           {.least = 0});
  list.add("keep_last", checkpoint.keep_last,
           "Checkpoints to keep; older ones are deleted; 0: keep all", {.least = 0});
  list.add("at_end", checkpoint.at_end, "Save a checkpoint at the end, also after a signal");
  list.add("async", checkpoint.async,
           "Write checkpoints in the background; training waits only while the rank's shards are "
           "copied to host memory; false: it waits until the checkpoint is on disk");
  list.section("comm");
  list.add("backend", config.comm.backend,
           "Communication backend; auto: chosen by device and number of hosts",
           {.choices = {"auto", "shm", "mpi", "nccl"}});
  list.add("timeout", config.comm.timeout,
           "Seconds before an unfinished collective is an error; 0: FSDP_TIMEOUT, else 300",
           {.least = 0, .most = 1e6});
  list.section("log");
  list.add("every", config.log.every,
           "Steps between lines if output isn't a terminal; a line is printed at least every 15 s",
           {.least = 1});
  list.add("tensorboard", config.log.tensorboard, "Also write metrics as TensorBoard events");
  list.add("peak_tflops", config.log.peak_tflops,
           "Peak TFLOP/s of one device, for MFU; 0: built-in value if the GPU is known",
           {.least = 0});
  list.add("silence", config.log.silence, "Names of warnings to turn off");
}

}  // namespace

std::vector<Option> options(Config& config) {
  List list;
  list.section("");
  list.add("dir", config.dir, "Directory of the run; empty: runs/NAME, after the config's name");
  list.add("resume", config.resume, "Resume from the latest checkpoint in dir");
  list.add(
      "init_from", config.init_from,
      "Start from the model and weights in this directory: a Hugging Face model (config.json and "
      "safetensors), a run or a checkpoint; empty: random weights",
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
      {"model", "The model"},
      {"data", "Training and validation data"},
      {"train", "Length, batches, evaluation and samples"},
      {"optim", "Optimizer and learning rate"},
      {"shard", "Sharding and precision"},
      {"activations", "Activation recomputation and offload"},
      {"offload", "What is kept in host memory instead of device memory"},
      {"checkpoint", "Checkpoints"},
      {"comm", "Communication"},
      {"log", "Output and metrics"},
  };
  return all;
}

const Option* find(const std::vector<Option>& options, const std::string& name) {
  for (const Option& option : options)
    if (option.name() == name) return &option;
  return nullptr;
}

std::string nearest(const std::vector<Option>& options, const std::string& name) {
  std::string key = name.substr(name.rfind('.') + 1);
  std::string best;
  size_t least = likely_typo(name) + 1;
  auto consider = [&](size_t cost, const Option& option) {
    if (cost < least) least = cost, best = option.name();
  };
  for (const Option& option : options) {
    consider(edits(name, option.name()), option);
    // The right key in the wrong section, or without one, is closer than any other word.
    if (option.key == key) consider(0, option);
    if (edits(key, option.key) <= likely_typo(key)) consider(1 + edits(key, option.key), option);
  }
  return best;
}

}  // namespace fsdp::train
