#include "cli/adapters.h"

#include <algorithm>
#include <map>
#include <memory>

#include "base/format.h"
#include "checkpoint/hugging_face.h"
#include "fsdp/error.h"
#include "fsdp/nn/lora.h"
#include "kernels/quantised.h"
#include "models/parameter_shapes.h"
#include "train/hub_cache.h"
#include "train/model_shape.h"
#include "train/task.h"

namespace fsdp::cli {
namespace {

constexpr std::string_view kDown = ".lora_A.weight", kUp = ".lora_B.weight", kBase = ".weight";

// "layers.0.q_proj" of "layers.0.q_proj.lora_A.weight"; empty for other names.
std::string linear_of(const std::string& name, std::string_view end) {
  return name.ends_with(end) ? name.substr(0, name.size() - end.size()) : std::string();
}

// The ends of names of the linears that have adapters: "q_proj".
std::vector<std::string> targets_in(const checkpoint::Source& source) {
  std::vector<std::string> ends;
  for (const std::string& name : model_names(source)) {
    const std::string linear = linear_of(name, kDown);
    const std::string end = linear.substr(linear.rfind('.') + 1);
    if (!end.empty() && std::find(ends.begin(), ends.end(), end) == ends.end()) ends.push_back(end);
  }
  return ends;
}

// Whether the weights of its linears are [in, out].
bool has_transposed(const models::AnyConfig& model) {
  return std::holds_alternative<models::GPT2Config>(model);
}

// Whether it is the weight of a linear that nn::quantise_linears() quantises.
bool is_quantised(const checkpoint::Source& base, const checkpoint::Copied& tensor) {
  const std::vector<int64_t>& sizes = base.tensor(tensor.from)->sizes;
  return sizes.size() == 2 && sizes[1] % kernels::quantised::kBlock == 0 &&
         tensor.to.ends_with("_proj.weight");
}

}  // namespace

std::optional<models::PeftConfig> adapters_of(const CheckpointSource& from) {
  if (from.peft) return models::read_peft_config(from.dir / checkpoint::kPeftConfig);
  if (from.hugging_face) return std::nullopt;
  const checkpoint::Extra extra = checkpoint::read_extras(*from.source, 0, nullptr).run;
  if (!extra.contains("config")) return std::nullopt;  // the caller says so
  const train::Config config = train::config_of(extra, from.dir);
  if (config.lora.rank == 0) return std::nullopt;
  const std::string name = train::hub_name(config.init_from);
  models::PeftConfig found{.lora = config.lora,
                           .base = name.empty() ? config.init_from : name,
                           .transposed = config.model.type == models::ModelType::kGpt2};
  if (found.lora.targets.empty()) found.lora.targets = targets_in(*from.source);
  return found;
}

void check_adapters(const CheckpointSource& adapters, const models::PeftConfig& config,
                    const models::AnyConfig& model) {
  std::map<std::string, std::vector<int64_t>> shapes;
  for (auto& [name, sizes] : models::parameter_shapes(model)) shapes.emplace(name, sizes);
  const int64_t rank = config.lora.rank;
  for (const std::string& name : model_names(*adapters.source)) {
    const std::string down = linear_of(name, kDown), up = linear_of(name, kUp);
    const std::string linear = down + up;  // one of them is empty
    const auto of = shapes.find(linear + std::string(kBase));
    if (linear.empty() || of == shapes.end() || of->second.size() != 2)
      throw Error(formatted("{}: \"{}\" isn't an adapter of this model.", adapters.dir, name),
                  "the adapters belong to another model.");
    const auto [in, out] = has_transposed(model) ? std::pair(of->second[0], of->second[1])
                                                 : std::pair(of->second[1], of->second[0]);
    const std::vector<int64_t> wanted = up.empty() ? std::vector{rank, in} : std::vector{out, rank};
    const auto& sizes = adapters.source->tensor("model." + name)->sizes;
    const std::string other = "model." + linear + std::string(up.empty() ? kUp : kDown);
    if (sizes != wanted)
      throw Error(formatted("{}: \"{}\" has shape {}, but the model needs {}.", adapters.dir, name,
                            checkpoint::shape_text(sizes), checkpoint::shape_text(wanted)),
                  "the adapters belong to another model.");
    if (!adapters.source->tensor(other))
      throw Error(formatted("{}: \"{}\" has no counterpart.", adapters.dir, name),
                  "an adapter has two matrices, lora_A and lora_B.");
  }
}

std::vector<checkpoint::Copied> peft_tensors(const CheckpointSource& adapters,
                                             at::ScalarType dtype) {
  std::vector<checkpoint::Copied> tensors;
  for (const std::string& name : model_names(*adapters.source))
    tensors.push_back({"model." + name, checkpoint::kPeftPrefix + name, dtype});
  return tensors;
}

void merge_adapters(std::vector<checkpoint::Copied>& tensors, const CheckpointSource& base,
                    const models::AnyConfig& model, const CheckpointSource& adapters,
                    const models::PeftConfig& config) {
  const bool transposed = has_transposed(model);
  const double scale = nn::scale_of(train::lora_options(config.lora));
  checkpoint::Source* source = adapters.source.get();
  for (checkpoint::Copied& tensor : tensors) {
    const std::string linear = linear_of(tensor.from, kBase);
    const std::string down = linear + std::string(kDown), up = linear + std::string(kUp);
    const bool adapted = !linear.empty() && source->tensor(down);
    const nn::Quant quant =
        is_quantised(*base.source, tensor) ? config.lora.base : nn::Quant::kNone;
    if (!adapted && quant == nn::Quant::kNone) continue;
    tensor.change = [=](const checkpoint::Part& piece) {
      const auto& [first, count] = piece.rectangle;  // whole rows
      at::Tensor memory = piece.memory;
      if (quant != nn::Quant::kNone)
        memory.copy_(kernels::dequantise(kernels::quantise(memory, quant), quant, at::kFloat));
      if (!adapted) return;
      const size_t in = transposed ? 0 : 1, out = 1 - in;
      const at::Tensor a = source->read_whole(down).to(at::kFloat).narrow(1, first[in], count[in]);
      const at::Tensor b = source->read_whole(up).to(at::kFloat).narrow(0, first[out], count[out]);
      (transposed ? memory.t() : memory).addmm_(b, a, 1, scale);
    };
  }
}

}  // namespace fsdp::cli
