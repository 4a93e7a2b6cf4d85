// fsdp ckpt inspect: what a checkpoint holds, without reading any tensor's values.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <memory>
#include <regex>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "base/table.h"
#include "base/terminal.h"
#include "checkpoint/dtype.h"
#include "checkpoint/overlap.h"
#include "checkpoint/summary.h"
#include "cli/ckpt.h"
#include "cli/ckpt_show.h"
#include "fsdp/error.h"
#include "observe/throughput.h"
#include "train/config_toml.h"

namespace fsdp::cli {
namespace {

using checkpoint::Summary;
using checkpoint::TensorEntry;
using Json = nlohmann::ordered_json;

struct InspectFlags {
  std::string dir, filter;
  bool tensors = false, json = false;
};

constexpr const char* kInspectNotes =
    "Examples:\n"
    "  fsdp ckpt inspect runs/mine\n"
    "  fsdp ckpt inspect runs/mine/checkpoints/step-100 --filter layers.0. --tensors\n"
    "  fsdp ckpt inspect runs/mine --json | jq .bytes\n"
    "\n"
    "Similar layers share a line: model.layers.{0..15}.mlp.up_proj.weight. Shards are the pieces "
    "that\n"
    "a tensor is stored in. Tied weights are stored and counted once.";

// --- selection ---

class Filter {
 public:
  explicit Filter(const std::string& text) : text_(text) {
    try {
      if (!text.empty()) pattern_ = std::regex(text, std::regex::ECMAScript | std::regex::optimize);
    } catch (const std::regex_error&) {
      throw CodedError(kExitUsage,
                       formatted("--filter \"{}\" isn't a valid regular expression.", text),
                       "plain text works, too; escape characters such as ( and [ with \\.");
    }
  }
  bool wants(const std::string& name) const {
    constexpr size_t kLongest = 2000;  // std::regex recurses once per character
    if (text_.empty() || name.find(text_) != std::string::npos) return true;
    return name.size() <= kLongest && std::regex_search(name, pattern_);
  }

 private:
  std::string text_;
  std::regex pattern_;
};

const checkpoint::Value* plain(const Summary& summary, const std::string& name) {
  const auto found = summary.values.find(name);
  return found == summary.values.end() || !found->second ? nullptr : &*found->second;
}

// The model's type ("llama"); empty if unknown.
std::string model_type(const Summary& summary) {
  if (summary.hugging_face) {
    const auto config = Json::parse(read_if_there(summary.dir / "config.json"), nullptr,
                                    /*allow_exceptions=*/false);
    if (config.is_object() && config.contains("model_type") && config["model_type"].is_string())
      return config["model_type"].get<std::string>();
    return "";
  }
  const auto* config = plain(summary, "extra.config");
  if (!config || !std::holds_alternative<std::string>(*config)) return "";
  try {
    for (const auto& entry : train::parse_toml(std::get<std::string>(*config), "config").entries)
      if (entry.name == "model.type" && std::holds_alternative<std::string>(entry.value))
        return std::get<std::string>(entry.value);
  } catch (const Error&) {  // not one of ours
  }
  return "";
}

int64_t bytes_of(const TensorEntry& entry) {
  return checkpoint::element_count(entry.sizes) *
         static_cast<int64_t>(c10::elementSize(entry.dtype));
}

// --- JSON ---

Json value_json(const std::optional<checkpoint::Value>& value) {
  if (!value) return nullptr;
  if (const auto* integer = std::get_if<int64_t>(&*value)) return *integer;
  if (const auto* real = std::get_if<double>(&*value)) return *real;
  if (const auto* flag = std::get_if<bool>(&*value)) return *flag;
  return checkpoint::value_text(*value);
}

void print_inspect_json(const Summary& summary, const Filter& filter) {
  const auto top = [&](const char* name) -> Json {
    const auto found = summary.values.find(name);
    return found == summary.values.end() ? Json() : value_json(found->second);
  };
  const auto model = summary.kinds.find("model");
  Json all = {{"checkpoint", summary.dir.string()},
              {"format", summary.hugging_face ? "huggingface" : "dcp"},
              {"step", top("extra.step")},
              {"tokens", top("extra.tokens")},
              {"saved", summary.saved},
              {"ranks", summary.ranks},
              {"model", model_type(summary)},
              {"parameters", model == summary.kinds.end() ? 0 : model->second.elements},
              {"manifest", summary.manifest}};
  all["bytes"] = Json::object();
  all["dtypes"] = Json::object();
  for (const auto& [name, kind] : summary.kinds) {
    all["bytes"][name] = kind.bytes;
    all["dtypes"][name] = kind.dtypes;
  }
  all["files"] = Json::array();
  all["values"] = Json::object();
  all["tensors"] = Json::array();
  all["notes"] = Json::array();
  for (const auto& file : summary.files)
    all["files"].push_back({{"name", file.name},
                            {"bytes", file.size < 0 ? Json() : Json(file.size)},
                            {"items", file.items}});
  for (const auto& [name, value] : summary.values)
    if (filter.wants(name)) all["values"][name] = value_json(value);
  for (const auto& [name, entry] : summary.metadata.tensors) {
    if (!filter.wants(name)) continue;
    Json shards = Json::array();
    for (const auto& chunk : entry.chunks)
      shards.push_back({{"offsets", chunk.rectangle.offsets},
                        {"sizes", chunk.rectangle.sizes},
                        {"file", chunk.place.file},
                        {"at", chunk.place.offset},
                        {"length", chunk.place.length}});
    all["tensors"].push_back({{"name", name},
                              {"shape", entry.sizes},
                              {"dtype", checkpoint::dtype_name(entry.dtype)},
                              {"bytes", bytes_of(entry)},
                              {"shards", std::move(shards)}});
  }
  for (const auto& note : summary.notes) all["notes"].push_back(note);
  std::cout << all.dump(-1, ' ', true, Json::error_handler_t::replace) << "\n";
}

// --- text ---

std::string human(int64_t bytes) {
  return human_bytes(static_cast<double>(bytes));
}

void print_head(const Summary& summary) {
  Table table({{"what", "what", Table::kLeft}, {"is", "is", Table::kLeft}});
  const auto line = [&](const std::string& what, const std::string& is) {
    table.add({text(what), text(is)});
  };
  line("checkpoint", visible(summary.dir.string()));
  line("format",
       summary.hugging_face ? "Hugging Face (safetensors)" : "torch.distributed.checkpoint");
  if (const auto model = summary.kinds.find("model"); model != summary.kinds.end()) {
    const auto count =
        observe::human_count(static_cast<double>(model->second.elements)) + " parameters";
    const auto type = model_type(summary);
    line("model", type.empty() ? count : formatted("{}, {}", visible(type), count));
  }
  for (const char* key : {"step", "tokens"})
    if (const auto* value = plain(summary, std::string("extra.") + key)) {
      const auto* integer = std::get_if<int64_t>(value);
      line(key, integer ? with_separators(*integer) : visible(checkpoint::value_text(*value)));
    }
  std::string saved = summary.saved;
  if (summary.ranks > 0)
    saved += formatted(", by {} {}", summary.ranks, summary.ranks == 1 ? "rank" : "ranks");
  line("saved", saved);
  if (!summary.hugging_face)
    line("checksums", summary.manifest ? "manifest: each block is checked when it is read"
                                       : "no manifest: only the CRC-32 of each record");
  std::vector<std::string> order = {"model", "optim", "extra"};
  for (const auto& [name, kind] : summary.kinds)
    if (std::find(order.begin(), order.end(), name) == order.end()) order.push_back(name);
  for (const auto& name : order) {
    const auto kind = summary.kinds.find(name);
    if (kind == summary.kinds.end()) continue;
    std::string dtypes;
    for (const auto& [dtype, bytes] : kind->second.dtypes)
      dtypes += formatted("{}{}{}", dtypes.empty() ? "" : ", ", dtype,
                          kind->second.dtypes.size() > 1 ? " " + human(bytes) : "");
    line(visible(name) + ".*", formatted("{} in {} tensors ({})", human(kind->second.bytes),
                                         with_separators(kind->second.tensors), dtypes));
  }
  table.print_rows(std::cout);
}

void print_files(const Summary& summary) {
  Table table({{"file", "file", Table::kLeft}, {"size", "size"}, {"items", "items"}});
  for (const auto& file : summary.files)
    table.add({text(visible(file.name)),
               file.size < 0 ? Cell{nullptr, "missing", "31"} : text(human(file.size)),
               text(with_separators(file.items))});
  std::cout << "\n";
  table.print(std::cout, false);
}

void print_tensors(const Summary& summary, const Filter& filter, bool every) {
  std::vector<Foldable> names;
  std::vector<const TensorEntry*> entries;
  for (const auto& [name, entry] : summary.metadata.tensors) {
    if (!filter.wants(name)) continue;
    const auto alike =
        every ? std::to_string(names.size())
              : checkpoint::shape_text(entry.sizes) + checkpoint::dtype_name(entry.dtype);
    names.push_back({name, alike});
    entries.push_back(&entry);
  }
  Table table({{"tensor", "tensor", Table::kLeft},
               {"shape", "shape", Table::kLeft},
               {"dtype", "dtype", Table::kLeft},
               {"shards", "shards"},
               {"bytes", "bytes"}});
  for (const auto& folded : fold(names)) {
    const TensorEntry& first = *entries[folded.members[0]];
    size_t fewest = SIZE_MAX, most = 0;
    int64_t bytes = 0;
    for (const size_t i : folded.members) {
      fewest = std::min(fewest, entries[i]->chunks.size());
      most = std::max(most, entries[i]->chunks.size());
      bytes = checkpoint::capped_sum(bytes, bytes_of(*entries[i]));
    }
    const auto shards = fewest == most ? formatted("{}", most) : formatted("{}–{}", fewest, most);
    table.add({text(visible(folded.name)), text(checkpoint::shape_text(first.sizes)),
               text(checkpoint::dtype_name(first.dtype)), text(shards), text(human(bytes))});
  }
  std::cout << "\n";
  table.print(std::cout, false);
}

void print_values(const Summary& summary, const Filter& filter, bool every) {
  Table table({{"value", "value", Table::kLeft}, {"is", "is", Table::kLeft}});
  bool any = false;
  for (const auto& [name, value] : summary.values) {
    if (!filter.wants(name) || (!every && !name.starts_with("extra."))) continue;
    any = true;
    table.add({text(visible(name)), text(value ? shortened(checkpoint::value_text(*value), 60)
                                               : "(unsupported Python type)")});
  }
  if (!any) return;
  std::cout << "\n";
  table.print(std::cout, false);
}

int run_inspect(const InspectFlags& flags) {
  const Filter filter(flags.filter);
  const Summary summary = checkpoint::summarize(checkpoint_at(flags.dir));
  if (flags.json) {
    print_inspect_json(summary, filter);
    return 0;
  }
  print_head(summary);
  print_files(summary);
  print_tensors(summary, filter, flags.tensors);
  print_values(summary, filter, flags.tensors || !flags.filter.empty());
  for (const auto& note : summary.notes)
    std::cout << "\n" << paint(STDOUT, "33", "note") << ": " << visible(note) << "\n";
  if (!summary.notes.empty()) std::cout << "fsdp ckpt verify lists all damage.\n";
  return 0;
}

}  // namespace

void add_ckpt_inspect(CLI::App& ckpt, Action& action) {
  auto flags = std::make_shared<InspectFlags>();
  CLI::App* command =
      ckpt.add_subcommand("inspect", "Show what a checkpoint holds: step, tensors, shards, sizes");
  command->footer(kInspectNotes);
  command
      ->add_option("dir", flags->dir,
                   "A run's directory, one of its checkpoints, or a Hugging Face directory")
      ->type_name("DIR")
      ->required();
  command->add_flag("--tensors", flags->tensors, "One line per tensor; don't fold similar layers");
  command
      ->add_option("--filter", flags->filter,
                   "Only names that contain this text or match it as a regular expression")
      ->type_name("TEXT");
  command->add_flag("--json", flags->json, "One JSON object with everything");
  command->callback([flags, &action] { action = [flags] { return run_inspect(*flags); }; });
}

}  // namespace fsdp::cli
