#include "train/config_resolve.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>

#include "base/format.h"
#include "base/nearest.h"
#include "base/regular_file.h"
#include "data/source.h"
#include "fsdp/error.h"
#include "train/config_check.h"
#include "train/config_ready.h"
#include "train/config_toml.h"
#include "train/config_values.h"
#include "train/hub_cache.h"
#include "train/init_from.h"
#include "train/kept_config.h"
#include "train/recipe.h"
#include "train/run_directory.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;

constexpr const char* kEnds[] = {"train.steps", "train.tokens", "train.epochs"};

struct Source {
  std::string file;  // for errors
  std::string name;
  std::string text;
  std::vector<std::string> notes = {};
  bool by_recipe = false;  // take_recipe() applies it, where flags say nothing else
};

Source named_source(const std::string& name) {
  std::error_code problem;
  if (fs::exists(name, problem) && !fs::is_directory(name, problem))
    return {name, fs::path(name).stem().string(), read_config_file(name)};
  if (const ReadyConfig* ready = ready_config(name)) {
    return {formatted("{} (built in)", ready->name), fs::path(name).filename().string(),
            std::string(ready->text)};
  }
  // Without a checkout, "configs/llama-1b.toml" most likely means llama-1b.
  fs::path path(name);
  std::string bare = path.filename().string();
  if (path.extension() == ".toml") bare = path.stem().string();
  std::vector<std::string> known;
  for (const auto& ready : ready_configs()) known.emplace_back(ready.name);
  std::string near = nearest_word(known, bare);
  throw Error(formatted("there is no config \"{}\": neither a file nor a ready config.", name),
              formatted("{}fsdp train --list-configs lists the ready configs.",
                        near.empty() ? "" : formatted("did you mean {}? ", near)));
}

// Throws an Error that names the right section or the nearest key: lr belongs to [optim].
[[noreturn]] void refuse_key(const std::vector<Option>& all, const TomlEntry& entry,
                             const std::string& where) {
  size_t dot = entry.name.rfind('.');
  std::string section = dot == std::string::npos ? "" : entry.name.substr(0, dot);
  std::string key = entry.name.substr(dot == std::string::npos ? 0 : dot + 1);
  std::string place = section.empty() ? "outside all sections" : formatted("in [{}]", section);
  const Option* near = nearest(all, entry.name);
  std::string hint;
  if (!near) {
    hint = "docs/config.md lists every key.";
  } else if (near->section == section) {
    hint = formatted("did you mean {}?", near->key);
  } else if (near->section.empty()) {
    hint = near->key + " must come before the first [section].";
  } else {
    hint = formatted("{} belongs to [{}].", near->key, near->section);
  }
  throw Error(formatted("{}: there is no key \"{}\" {}.", where, key, place), hint);
}

void refuse_unknown_sections(const std::vector<Option>& all, const TomlDocument& document,
                             const std::string& file) {
  std::vector<std::string> known;
  for (const Option& option : all)
    if (!option.section.empty() && (known.empty() || known.back() != option.section))
      known.push_back(option.section);
  for (const auto& [line, name] : document.tables) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    std::string near = nearest_word(known, name), names;
    for (const auto& one : known) names += (names.empty() ? "" : ", ") + one;
    throw Error(formatted("{}:{}: there is no section [{}].", file, line, name),
                near.empty() ? formatted("sections are {}.", names)
                             : formatted("did you mean [{}]?", near));
  }
}

bool is_end(const std::string& name) {
  return std::find(std::begin(kEnds), std::end(kEnds), name) != std::end(kEnds);
}

// Applies the flags to `config`, after the file.
void apply_flags(Config& config, const CommandLine& line, std::set<std::string>& given) {
  auto all = options(config);
  std::map<std::string, std::vector<std::string>> words;
  for (const auto& [name, word] : line.flags) words[name].push_back(word);
  bool ends = std::any_of(words.begin(), words.end(), [](auto& one) { return is_end(one.first); });
  if (ends) config.train.steps = config.train.tokens = 0, config.train.epochs = 0;
  for (const auto& [name, given_words] : words) {
    const Option* option = find(all, name);
    if (!option)
      throw Error(formatted("there is no option {}.", name), "fsdp train --help lists all.");
    set(*option, given_words);
    given.insert(name);
  }
}

// `--steps 10` with a config that warms up for 1000 steps: the file's warm-up shrinks with the run,
// so that trying a config out isn't an error. Flags aren't changed.
void shorten(Resolved& resolved, const CommandLine& line) {
  auto steps = known_steps(resolved.config);
  if (!steps) return;
  auto by_flag = [&](const char* name) {
    return std::any_of(line.flags.begin(), line.flags.end(),
                       [&](auto& flag) { return flag.first == name; });
  };
  bool ends = std::any_of(std::begin(kEnds), std::end(kEnds), by_flag);
  optim::OptimConfig& optim = resolved.config.optim;
  if (!ends || optim.warmup_steps + optim.decay_steps <= *steps) return;
  auto shrink = [&](const char* name, int64_t& value) {
    int64_t less = std::min(value, *steps / 10);
    if (by_flag(name) || less == value) return;
    resolved.notes.push_back(formatted("{} is {} instead of {}: the run has {} step{}.", name, less,
                                       value, *steps, *steps == 1 ? "" : "s"));
    value = less;
  };
  shrink("optim.warmup_steps", optim.warmup_steps);
  shrink("optim.decay_steps", optim.decay_steps);
}

const std::string* last_flag(const CommandLine& line, const char* name) {
  const std::string* word = nullptr;
  for (const auto& [flag, value] : line.flags)
    if (flag == name) word = &value;
  return word;
}

// The last part of a path: "a" for "runs/a" and "runs/a/".
std::string name_of_directory(const std::string& dir) {
  return (fs::absolute(dir) / "").lexically_normal().parent_path().filename().string();
}

Source source_of(const CommandLine& line) {
  if (line.configs.size() > 1)
    throw Error(formatted("there are two configs: {} and {}.", line.configs[0], line.configs[1]),
                "pass one, and change single values with flags.");
  if (!line.configs.empty()) return named_source(line.configs[0]);
  const std::string* resume = last_flag(line, "resume");
  const std::string* dir = last_flag(line, "dir");
  const std::string* origin = last_flag(line, "init_from");
  const auto fresh = [&] {
    const bool tunes = origin && !origin->empty();
    Source source = named_source(tunes ? kRecipe : "demo");
    source.by_recipe = tunes;
    return source;
  };
  const bool automatic = resume && *resume == "auto";
  if (!resume || (!automatic && flag_word(*resume) != true)) return fresh();
  if (!dir || dir->empty()) refuse_without_dir(automatic);
  if (automatic && !has_checkpoint(*dir)) return fresh();
  auto kept = read_kept_config({*dir});
  if (!kept)
    throw Error(formatted("there is no run to resume in {}: it has no config.toml.", *dir),
                "check --dir; ls runs lists the runs.");
  return {kept->file, name_of_directory(*dir), kept->text, kept->notes};
}

// A run keeps a copy of its tokenizer, so that it can be resumed without the original.
void find_kept_tokenizer(Config& config) {
  if (config.data.tokenizer == "bytes") return;
  std::error_code problem;
  fs::path kept = RunDirectory{config.dir}.tokenizer();
  if (!fs::exists(config.data.tokenizer, problem) && fs::exists(kept, problem))
    config.data.tokenizer = kept.string();
}

}  // namespace

std::string read_config_file(const fs::path& file) {
  constexpr int64_t kLargestConfig = int64_t{4} << 20;
  return read_file(file, kLargestConfig);
}

std::vector<std::string> apply_toml(Config& config, std::string_view text,
                                    const std::string& file) {
  TomlDocument document = parse_toml(text, file);
  auto all = options(config);
  refuse_unknown_sections(all, document, file);
  std::vector<std::string> names;
  for (const auto& entry : document.entries) {
    std::string where = formatted("{}:{}", file, entry.line);
    const Option* option = find(all, entry.name);
    if (!option) refuse_key(all, entry, where);
    set(*option, entry, where);
    names.push_back(entry.name);
  }
  return names;
}

// The config that a run to be resumed was started with.
std::optional<Config> kept_config(const Config& config) {
  if (config.dir.empty()) return std::nullopt;
  const auto kept = read_kept_config({config.dir});
  if (!kept) return std::nullopt;
  Config started;
  apply_toml(started, kept->text, kept->file);
  return started;
}

// Uses the loss masks that lie next to token files, and those of conversations, unless the user has
// decided.
void find_masks(Config& config, const std::set<std::string>& given,
                std::vector<std::string>& notes) {
  if (given.contains("data.loss_mask") || config.data.format == data::Format::kText) return;
  if (config.resumes) {
    if (const auto kept = kept_config(config)) config.data.loss_mask = kept->data.loss_mask;
    return;
  }
  const std::string reason = data::reason_for_mask(config.data.train, config.data.lines());
  if (reason.empty()) return;
  config.data.loss_mask = true;
  notes.push_back(
      formatted("data.loss_mask is true: {}; --data.loss_mask false ignores it.", reason));
}

// Pairs of answers are for DPO, unless the user has decided.
void find_objective(Config& config, const std::set<std::string>& given,
                    std::vector<std::string>& notes) {
  if (given.contains("train.objective") || config.data.format != data::Format::kAuto) return;
  if (config.resumes) {
    if (const auto kept = kept_config(config)) config.train.objective = kept->train.objective;
    return;
  }
  if (!data::has_pairs(config.data.train, config.data.lines())) return;
  config.train.objective = Objective::kDpo;
  notes.push_back(
      formatted("train.objective is dpo: the data has chosen and rejected answers; "
                "rewards are {:g} times what adapters change (train.dpo_beta).",
                config.train.dpo_beta));
}

// Packs conversations and such, unless the user has decided.
void find_packing(Config& config, const std::set<std::string>& given,
                  std::vector<std::string>& notes) {
  if (given.contains("data.packing") || config.data.document_mask ||
      config.data.format != data::Format::kAuto)
    return;
  if (config.resumes) {
    if (const auto kept = kept_config(config)) config.data.packing = kept->data.packing;
    return;
  }
  const std::string reason = data::reason_for_packing(config.data.train, config.data.lines());
  if (reason.empty()) return;
  config.data.packing = true;
  notes.push_back(
      formatted("data.packing is true: {}; --data.packing false cuts samples anywhere.", reason));
}

// The model, weights and tokenizer in config.init_from, and how to train from them.
void begin_with_weights(Resolved& resolved, const CommandLine& line,
                        const std::set<std::string>& flags) {
  Config& config = resolved.config;
  const bool chosen = !line.configs.empty() || config.resumes;  // not the recipe by default
  std::set<std::string> said = flags;
  if (chosen) said.insert(resolved.given.begin(), resolved.given.end());
  if (!chosen) resolved.name = name_of_directory(config.init_from);
  const bool needed = !config.resumes || config.lora.rank > 0;  // adapters need their base again
  if (needed) config.init_from = local_model(config.init_from).string();
  const int64_t limit = take_origin(config, said, flags, chosen, resolved.notes);
  if (!config.resumes) {
    if (std::string text = take_recipe(config, said, limit); !text.empty())
      resolved.notes.push_back(std::move(text));
  } else if (const auto kept = kept_config(config)) {
    keep_recipe(config, said, *kept);
  }
}

Resolved resolve(const CommandLine& line) {
  Resolved resolved;
  Source source = source_of(line);
  resolved.name = source.name;
  resolved.notes = source.notes;
  if (!source.by_recipe)
    for (auto& name : apply_toml(resolved.config, source.text, source.file))
      resolved.given.insert(name);
  std::set<std::string> flags;
  apply_flags(resolved.config, line, flags);
  Config& config = resolved.config;
  config.resumes = config.resume == Resume::kYes ||
                   (config.resume == Resume::kAuto && has_checkpoint(config.dir));
  if (!config.lora.init_from.empty()) {
    std::set<std::string> said = flags;
    said.insert(resolved.given.begin(), resolved.given.end());
    if (!config.resumes)
      take_adapters(config, said);
    else if (const auto kept = kept_config(config))
      config.lora = kept->lora;
  }
  if (!config.init_from.empty())
    begin_with_weights(resolved, line, flags);
  else if (resolved.name == kRecipe && !line.configs.empty() && ready_config(line.configs[0]))
    throw Error(formatted("{} trains a model that exists, but init_from isn't set.", kRecipe),
                "pass --init-from DIR: a Hugging Face model, a run or a checkpoint.");
  if (config.resumes) find_kept_tokenizer(config);
  resolved.given.merge(flags);
  find_objective(config, resolved.given, resolved.notes);
  find_masks(config, resolved.given, resolved.notes);
  find_packing(config, resolved.given, resolved.notes);
  shorten(resolved, line);
  return resolved;
}

}  // namespace fsdp::train
