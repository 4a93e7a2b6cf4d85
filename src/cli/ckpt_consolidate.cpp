// fsdp ckpt consolidate: writes a checkpoint as one file, for torch.load or as safetensors.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <map>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/log.h"
#include "base/table.h"
#include "checkpoint/draft.h"
#include "checkpoint/safetensors_write.h"
#include "checkpoint/torch_file.h"
#include "cli/ckpt.h"
#include "cli/ckpt_source.h"
#include "cli/transfer.h"
#include "fsdp/error.h"

namespace fsdp::cli {
namespace {

constexpr const char* kConsolidateExamples = R"(Examples:
  The weights of a run's newest checkpoint:
    fsdp ckpt consolidate runs/demo demo.safetensors
  Everything, for torch.load(…, weights_only=True), as {"model": …, "optim": …, "extra": …}:
    fsdp ckpt consolidate runs/demo/checkpoints/step-200 demo.pt
  The model's state_dict in bfloat16, for model.load_state_dict(torch.load("model.pt")):
    fsdp ckpt consolidate runs/demo model.pt --model-only --dtype bf16

DIR is a run's directory, its checkpoints folder, one checkpoint, or a Hugging Face directory. The
file appears once it is complete. Tensors are streamed: memory use doesn't grow with the model.)";

struct ConsolidateFlags {
  std::string where, out, dtype = "keep";
  bool model_only = false, force = false;
};

// Of several names for one parameter, the one that transformers keep: not the head's.
std::string kept_name(const std::vector<std::string>& names) {
  const auto found = std::find_if(names.begin(), names.end(), [](const std::string& name) {
    return !name.starts_with("model.lm_head.");
  });
  return found == names.end() ? names.front() : *found;
}

// A file counts as written only if it has every tensor of the model, or says whose bytes it shares.
void check_complete(const std::filesystem::path& file, checkpoint::Source& source,
                    const std::vector<std::string>& names) {
  const auto header = checkpoint::read_header(checkpoint::files::Input(file));
  std::map<std::string, std::vector<int64_t>> written;
  for (const auto& tensor : header.tensors) written.emplace(tensor.name, tensor.sizes);
  for (const auto& name : names) {
    const auto same = header.metadata.find(name);
    const auto found = written.find(same == header.metadata.end() ? name : same->second);
    if (found == written.end() || found->second != source.tensor("model." + name)->sizes)
      throw Error(formatted("{}: \"{}\" wasn't written as it is in {}.", file, name, source.dir()),
                  "nothing was kept; please report this.");
  }
}

// Tensors beside the model's, the optimizer's and the run's.
void tell_left_out(const checkpoint::Source& source) {
  std::string others;
  size_t count = 0;
  for (const auto& [name, entry] : source.metadata().tensors) {
    const bool ours =
        name.starts_with("model.") || name.starts_with("optim.") || name.starts_with("extra.");
    if (ours) continue;
    ++count;
    if (others.size() < 100) others += formatted("{}\"{}\"", others.empty() ? "" : ", ", name);
  }
  if (count > 0)
    log::warn(
        formatted("left out {} tensors that aren't the model's: {}. A .pt file has everything.",
                  count, others));
}

int64_t write_safetensors_file(const ConsolidateFlags& flags, checkpoint::Source& source) {
  constexpr size_t kPrefix = 6;  // "model."
  std::vector<checkpoint::Copied> tensors;
  checkpoint::SafeMetadata metadata{{"format", "pt"}};
  const auto bare = model_names(source);
  std::vector<std::string> names;
  for (const auto& name : bare) names.push_back("model." + name);
  tell_left_out(source);
  const auto dtype = parse_dtype(flags.dtype);
  for (const auto& group : checkpoint::by_bytes(source, names)) {
    const std::string kept = kept_name(group);
    tensors.push_back(
        {kept, kept.substr(kPrefix), checkpoint::converted(source.tensor(kept)->dtype, dtype)});
    for (const auto& name : group)  // as safetensors.torch.save_model records them
      if (name != kept && name != "model.format")
        metadata[name.substr(kPrefix)] = kept.substr(kPrefix);
  }
  checkpoint::DraftFile draft(flags.out, flags.force);
  const int64_t bytes = checkpoint::bytes_of(source, tensors);
  {
    Transfer transfer("writing " + flags.out, bytes);
    checkpoint::write_safetensors(source, draft.path(), tensors, metadata, transfer.advancing());
  }
  check_complete(draft.path(), source, bare);
  draft.publish();
  return bytes;
}

int64_t write_torch(const ConsolidateFlags& flags, checkpoint::Source& source) {
  const checkpoint::TorchFile file(
      source, {.model_only = flags.model_only, .dtype = parse_dtype(flags.dtype)});
  for (const auto& name : file.left_out())
    log::warn(formatted("left out \"{}\": its Python type isn't supported.", name));
  checkpoint::DraftFile draft(flags.out, flags.force);
  {
    Transfer transfer("writing " + flags.out, file.bytes());
    file.write(draft.path(), transfer.advancing());
  }
  draft.publish();
  return file.bytes();
}

int run_consolidate(const ConsolidateFlags& flags) {
  const std::string ending = std::filesystem::path(flags.out).extension().string();
  const bool safetensors = ending == ".safetensors";
  if (!safetensors && ending != ".pt" && ending != ".pth" && ending != ".bin")
    throw CodedError(kExitUsage,
                     formatted("the extension of \"{}\" doesn't name a file format.", flags.out),
                     "use .safetensors, or .pt for torch.load.");
  CheckpointSource from = open_source(flags.where);
  const int64_t bytes =
      safetensors ? write_safetensors_file(flags, *from.source) : write_torch(flags, *from.source);
  std::cout << flags.out << ": " << human_bytes(static_cast<double>(bytes)) << " from "
            << from.dir.string() << "\n";
  return 0;
}

}  // namespace

void add_ckpt_consolidate(CLI::App& ckpt, Action& action) {
  auto flags = std::make_shared<ConsolidateFlags>();
  CLI::App* command = ckpt.add_subcommand("consolidate", "Write a checkpoint as one file");
  command->footer(kConsolidateExamples);
  command->add_option("checkpoint", flags->where, "Checkpoint to read")
      ->type_name("DIR")
      ->required();
  command
      ->add_option("out", flags->out,
                   "File to write: *.safetensors (the model) or *.pt (everything)")
      ->type_name("FILE")
      ->required();
  command
      ->add_option("--dtype", flags->dtype,
                   "Dtype of the model's floating-point tensors: keep, fp32, bf16 or fp16")
      ->check(CLI::IsMember({"keep", "fp32", "bf16", "fp16"}))
      ->capture_default_str();
  command->add_flag("--model-only", flags->model_only, "For *.pt: only the model's state_dict");
  command->add_flag("--force", flags->force, "Replace an existing file");
  command->callback([flags, &action] { action = [flags] { return run_consolidate(*flags); }; });
}

}  // namespace fsdp::cli
