#include "train/task.h"

#include <ATen/ops/mse_loss.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/format.h"
#include "fsdp/deferred_init.h"
#include "fsdp/nn/fp8.h"
#include "fsdp/nn/quantised.h"
#include "models/parameter_shapes.h"
#include "observe/throughput.h"
#include "train/model_shape.h"
#include "train/preference.h"

namespace fsdp::train {
namespace {

TrainTask language_model(std::shared_ptr<models::CausalLMImpl> model, WrapPolicy blocks,
                         WrapPolicy feed_forwards, const data::DataConfig& data,
                         const Context& context) {
  const int64_t seq = data.seq;
  TrainTask task;
  task.module = model;
  task.text = model;
  task.blocks = std::move(blocks);
  task.feed_forwards = std::move(feed_forwards);
  task.initial = [model](const std::string& name, at::IntArrayRef sizes) {
    return model->initial(name, sizes);
  };
  task.loss_sum = [model, context, anew = data.packing](const Samples& samples) {
    return model->loss_sum({.ids = samples.inputs,
                            .documents = samples.lengths,
                            .restart_positions = anew,
                            .context = context},
                           samples.targets);
  };
  task.flops_per_sample = model->flops_per_token(seq) * static_cast<double>(seq);
  task.tokens_per_sample = seq;
  return task;
}

TrainTask mlp(const models::ModelConfig& model) {
  models::MLP module(models::MLPConfig{.width = model.width, .layers = model.layers});
  TrainTask task;
  task.module = module.ptr();
  task.blocks = wrap::modules<torch::nn::Linear>();
  task.initial = [module](const std::string& name, at::IntArrayRef sizes) {
    return module->initial(name, sizes);
  };
  task.loss_sum = [module](const Samples& samples) mutable {
    at::Tensor out = module->predict(samples.inputs).to(at::kFloat);
    return at::mse_loss(out, samples.targets, at::Reduction::Sum);
  };
  task.flops_per_sample = module->flops_per_row();
  task.tokens_per_sample = 1;
  return task;
}

// What backward needn't compute: the gradients of frozen matrices, 2 operations per weight and
// token. The embedding isn't a product unless it is the head as well.
double flops_saved(const TrainTask& task, bool tied, int64_t seq) {
  double frozen = 0, trained = 0;
  const auto is_table = [&](const std::string& name) {  // nothing is multiplied by it
    const bool embedding = name.ends_with("embed_tokens.weight") || name.ends_with("wte.weight");
    return (embedding && !tied) || name.ends_with("wpe.weight");
  };
  for (const auto& item : task.module->named_parameters()) {
    if (item.value().dim() < 2 || is_table(item.key())) continue;
    if (tied && item.key() == models::kHeadName) continue;
    (item.value().requires_grad() ? trained : frozen) += static_cast<double>(item.value().numel());
  }
  return (2 * frozen - 6 * trained) * static_cast<double>(seq);
}

nn::Fp8 recipe_of(nn::Fp8Recipe recipe) {
  switch (recipe) {
    case nn::Fp8Recipe::kRowwise:
      return nn::Fp8::kRowwise;
    case nn::Fp8Recipe::kRowwiseBf16Grad:
      return nn::Fp8::kRowwiseBf16Grad;
    default:
      return nn::Fp8::kTensorwise;
  }
}

// The loss becomes DPO's. The base is computed as well, without backward.
void prefer(TrainTask& task, double beta, double forward_flops) {
  task.tally = std::make_shared<at::Tensor>();
  task.prefers = true;
  task.mixtures = {};
  task.loss_sum = [model = task.text, beta, tally = task.tally](const Samples& samples) {
    const bool trains = model->is_training();
    return preference_loss(*model, samples, beta, trains ? *tally : at::Tensor());
  };
  task.flops_per_sample += forward_flops;
}

// Freezes the model and adds adapters.
void adapt(TrainTask& task, const Config& config) {
  nn::add_lora(*task.module, lora_options(config.lora));
  task.flops_per_sample -= flops_saved(task, config.model.tied, task.tokens_per_sample);
  task.initial = [base = task.initial](const std::string& name, at::IntArrayRef sizes) {
    return nn::is_adapter(name) ? nn::adapter_start(name, sizes) : base(name, sizes);
  };
}

// Converts linears and says which: "fp8 (tensorwise): 14 linears; in bf16: …".
std::string computed_in_fp8(torch::nn::Module& module, const nn::Fp8Config& config) {
  nn::Fp8Policy policy{.recipe = recipe_of(config.recipe), .least = config.least};
  if (!config.skip.empty())
    policy.where = [skipped = nn::named_linears(config.skip)](const std::string& name) {
      return !skipped(name);
    };
  int64_t converted = 0;
  std::map<std::string, std::vector<std::string>> others;  // names by reason
  for (const nn::Fp8Linear& linear : nn::convert_to_fp8(module, policy)) {
    converted += linear.why_not.empty() ? 1 : 0;
    if (!linear.why_not.empty()) others[linear.why_not].push_back(linear.name);
  }
  std::string text = formatted("fp8 ({}): {} linears; in bf16: all that isn't a linear of a block",
                               enum_name(config.recipe), converted);
  for (const auto& [why, names] : others)
    text += formatted(", {}{} ({})", names.front(),
                      names.size() > 1 ? formatted(" and {} more", names.size() - 1) : "", why);
  return text + ".";
}

}  // namespace

nn::LoRAOptions lora_options(const nn::LoRAConfig& lora) {
  nn::LoRAOptions options{
      .rank = lora.rank, .alpha = lora.alpha, .dropout = lora.dropout, .rslora = lora.rslora};
  if (!lora.targets.empty()) options.where = nn::named_linears(lora.targets);
  return options;
}

Samples part_of(const Samples& samples, int64_t first, int64_t count) {
  auto part = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.narrow(0, first, count) : tensor;
  };
  return {.inputs = part(samples.inputs),
          .targets = part(samples.targets),
          .documents = part(samples.documents),
          .room = samples.room,
          .count = count};
}

std::vector<Samples> micro_batches_of(const Samples& samples, int64_t micro_batch) {
  const int64_t size = micro_batch > 0 ? std::min(micro_batch, samples.count) : samples.count;
  std::vector<Samples> parts;
  for (int64_t first = 0; first < samples.count; first += size) {
    Samples& part =
        parts.emplace_back(part_of(samples, first, std::min(size, samples.count - first)));
    if (part.documents.defined())
      part.lengths = models::cumulative_lengths(part.documents, part.room);
  }
  return parts;
}

Samples on_device(const Samples& samples, at::Device device) {
  auto moved = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(device, /*non_blocking=*/true) : tensor;
  };
  return {.inputs = moved(samples.inputs),
          .targets = moved(samples.targets),
          .documents = samples.documents,
          .room = samples.room,
          .lengths = moved(samples.lengths),
          .count = samples.count,
          .counted = samples.counted};
}

TrainTask make_task(const Config& config, int64_t vocab, const Context& context) {
  const models::ModelConfig& model = config.model;
  TrainTask task;
  if (model.type == models::ModelType::kMlp) {
    task = mlp(model);
  } else {
    models::AnyConfig shape = model_shape(config, vocab);
    if (const auto* gpt2 = std::get_if<models::GPT2Config>(&shape))
      task = language_model(models::GPT2(*gpt2).ptr(), wrap::modules<models::GPT2Block>(),
                            wrap::modules<models::GPT2MLP>(), config.data, context);
    else
      task = language_model(models::Decoder(std::get<models::DecoderConfig>(shape)).ptr(),
                            wrap::modules<models::DecoderBlock>(),
                            wrap::modules<models::GatedFeedForward, nn::MoE>(), config.data,
                            context);
  }
  task.mixtures = mixtures_of(*task.module);
  if (!task.mixtures.all.empty()) task.tally = std::make_shared<at::Tensor>();
  if (task.text) task.text->tile_feed_forward(memory::tile_of(config.activations));
  const bool lora = config.lora.rank > 0;
  const double forward_flops = task.flops_per_sample / 3;
  if (lora) adapt(task, config);
  if (config.shard.precision == shard::Precision::kFp8)
    task.fp8 = computed_in_fp8(*task.module, config.fp8);
  if (config.train.objective == Objective::kDpo) prefer(task, config.train.dpo_beta, forward_flops);
  std::set<const void*> seen;  // tied parameters have two names
  for (const at::Tensor& parameter : task.module->parameters())
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) {
      task.parameters += parameter.numel();
      if (parameter.requires_grad()) task.trained += parameter.numel();
    }
  constexpr const char* kTitles[] = {
      "Llama",   "Qwen2",     "Qwen3", "Mistral", "SmolLM3", "OLMo 2", "Phi-3", "Gemma 3",
      "Mixtral", "Qwen3-MoE", "OLMoE", "dots1",   "GPT-2",   "MLP"};  // of each models::ModelType
  task.title = formatted("{}, {} parameters", kTitles[static_cast<int>(model.type)],
                         observe::human_count(static_cast<double>(task.parameters)));
  if (!mixtures_of(*task.module).all.empty()) {
    const auto shape = std::get<models::DecoderConfig>(model_shape(config, vocab));
    const auto active = static_cast<double>(models::active_parameter_count(shape));
    task.title += formatted(", {} of them per token", observe::human_count(active));
  }
  if (lora)
    task.title += formatted(", {} of them in adapters",
                            observe::human_count(static_cast<double>(task.trained)));
  if (config.lora.base != nn::Quant::kNone) {  // last: bytes aren't counted as parameters
    nn::quantise_linears(*task.module, {.quant = config.lora.base});
    task.title += formatted(", linears in {}", enum_name(config.lora.base));
  }
  return task;
}

void place_tally(TrainTask& task, at::Device device) {
  if (!task.tally) return;
  const int64_t numbers = task.prefers ? int64_t{kPreferenceTallies} : task.mixtures.numbers();
  *task.tally = at::zeros({numbers}, at::TensorOptions(at::kDouble).device(device));
  task.mixtures.count_into(*task.tally);
}

TrainTask make_unfilled_task(const Config& config, int64_t vocab, const Context& context) {
  return deferred_init([&] { return make_task(config, vocab, context); }, {.random = false});
}

}  // namespace fsdp::train
