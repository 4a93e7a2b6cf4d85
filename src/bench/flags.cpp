#include "bench/harness.h"

#include <algorithm>

#include "fsdp/error.h"

namespace fsdp::bench {
namespace {

constexpr const char *kNamedRows = "Named rows", *kModel = "The model";

// A flag of that group that was given; null if none was.
const CLI::Option* any_given(const Options& options, const std::string& group) {
  for (const CLI::Option* option : options.command->get_options())
    if (option->get_group() == group && option->count() > 0) return option;
  return nullptr;
}

}  // namespace

Flags::Flags(CLI::App& bench, const char* name, const char* help, bool& json,
             const std::string& examples)
    : cli::Flags(bench, name, help, ("Examples:\n" + examples).c_str()) {
  flag("--json", json, "One JSON object per line");
}

void Flags::place(Machine& on) {
  choice("--device", on.device, {"cpu", "cuda"}, "cpu or cuda");
  any("--backend", on.backend, "shm, mpi or nccl; default: shm on the CPU, nccl on a GPU");
  number("--ranks", on.ranks, "Ranks on this host");
}

void add_row_flags(Flags& flags, Options& options) {
  Row& row = options.row;
  options.command = &flags.command;
  flags.place(row.on);
  flags.number("--threads", row.on.threads, "Threads per rank");
  flags.number("--steps", row.steps, "Timed steps");
  flags.number("--warmup", row.warmup, "Warm-up steps");
  flags.group(kModel);
  flags.choice("--model", row.model, {"llama", "mlp"},
               "llama, or mlp: 8 linears with ReLU between them");
  flags.number("--layers", row.layers, "llama: blocks");
  flags.number("--dim", row.dim, "llama: width of the residual stream");
  flags.number("--heads", row.heads, "llama: query heads");
  flags.number("--kv-heads", row.kv_heads, "llama: key and value heads; 0: the same as --heads", 0);
  flags.number("--ffn", row.ffn, "llama: width of the feed-forward; 0: 8/3 of --dim", 0);
  flags.number("--vocab", row.vocab, "llama: vocabulary size");
  flags.number("--seq", row.seq, "llama: tokens per sequence");
  flags.number("--width", row.width, "mlp: width of each linear");
  flags.number("--batch", row.batch, "Sequences (llama) or rows (mlp) per micro-batch and rank");
  flags.number("--accumulate", row.accumulate, "Micro-batches per step");
  flags.flag("--tied", row.tied, "llama: share the weights of head and embedding");
  flags.flag("--qkv-bias", row.qkv_bias, "llama: add biases to queries, keys and values");
  flags.choice("--dtype", row.dtype, {"fp32", "bf16"},
               "Dtype of parameters in forward and backward: fp32 or bf16");
  flags.group("Options");
}

void add_named_flags(Flags& flags, Options& options, const char* peer) {
  flags.number("--clip", options.row.clip, "Clip gradients to this norm; 0: don't clip", 0, 1e30,
               "FLOAT");
  flags
      .choice("--init", options.row.init, {"cpu", "device"},
              "Where to draw the initial weights: cpu, or device, which is faster; default: cpu, "
              "or the row's own")
      ->default_str("");
  flags.group(kNamedRows);
  flags.flag("--peer", options.peer, peer);
  flags
      .any("--write", options.page,
           "Write a page with commands, versions and raw lines; default: in bench/results",
           "[FILE]")
      ->expected(0, 1);
  flags.any("--keep", options.keep,
            "Append raw lines to this file, and don't repeat what it already has", "FILE");
  flags.number("--limit", options.limit, "Time limit of one measurement, in seconds");
}

bool given(const Options& options, const std::string& flag) {
  const CLI::Option* option = options.command->get_option_no_throw(flag);
  return option && option->count() > 0 && option->get_group() != kModel;
}

bool model_given(const Options& options) {
  return any_given(options, kModel);
}

void require_rows(const Options& options) {
  const CLI::Option* option = any_given(options, kNamedRows);
  if (option && options.rows.empty())
    throw Error(formatted("{} is only for named rows.", option->get_name()),
                "add --rows; --help lists them.");
}

Row with_flags(const Row& row, const Options& options) {
  nlohmann::json settings = row;
  const nlohmann::json flags = options.row;
  for (const auto& [key, value] : flags.items()) {
    std::string flag = "--" + key;
    std::ranges::replace(flag, '_', '-');
    if (given(options, flag)) settings[key] = value;
  }
  if (given(options, "--activations")) settings["keep_last"] = options.row.keep_last;
  Row changed = settings.get<Row>();
  changed.on = options.row.on;
  if (options.rows.empty()) return changed;
  if (!given(options, "--ranks")) changed.on.ranks = row.on.ranks;
  // Gradients stay as the matrix products give them if nothing is reduced or accumulated.
  const bool alone = changed.on.ranks == 1 && row.accumulate == 1 && changed.on.device != "cpu";
  if (changed.grad_dtype.empty())
    changed.grad_dtype = alone && row.dtype == "bf16" ? "bf16" : "fp32";
  changed.plan = true;
  return changed;
}

}  // namespace fsdp::bench
