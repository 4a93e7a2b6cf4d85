#include "train/recipe.h"

#include <algorithm>
#include <bit>
#include <filesystem>
#include <map>
#include <vector>

#include "base/format.h"
#include "base/regular_file.h"
#include "base/table.h"
#include "data/files.h"
#include "fsdp/error.h"
#include "train/config_ready.h"
#include "train/config_resolve.h"
#include "train/config_values.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;

constexpr double kTuningRate = 2e-5, kAdapterRate = 2e-4;
constexpr int64_t kLongestText = 2048, kLongestLine = 4096;  // tokens
constexpr int64_t kShortest = 128, kShortestOfSmall = 32;    // likewise
constexpr int64_t kSamples = 4;                 // that the data should have, at least
constexpr int64_t kLooked = int64_t{16} << 20;  // bytes of a file whose lines are looked at

const std::set<std::string> kEnds = {"train.steps", "train.tokens", "train.epochs"};
// What else says what an option of the recipe is about.
const std::map<std::string, std::set<std::string>> kSaidBy = {
    {"train.epochs", kEnds},
    {"optim.warmup_share", {"optim.warmup_steps"}},
    {"train.sample_tokens", {"train.sample_prompt", "train.sample_every"}}};

bool is_said(const std::string& name, const std::set<std::string>& said) {
  const auto others = kSaidBy.find(name);
  return said.contains(name) ||
         (others != kSaidBy.end() &&
          std::any_of(others->second.begin(), others->second.end(),
                      [&](const std::string& other) { return said.contains(other); }));
}

// Copies the options that nobody set; returns their names.
std::set<std::string> copy_unsaid(const std::vector<std::string>& names, Config& from, Config& into,
                                  const std::set<std::string>& said) {
  std::set<std::string> copied;
  const auto source = options(from), target = options(into);
  for (size_t i = 0; i < source.size(); ++i) {
    const std::string name = source[i].name();
    if (std::find(names.begin(), names.end(), name) == names.end() || is_said(name, said)) continue;
    copy_value(source[i], target[i]);
    copied.insert(name);
  }
  return copied;
}

// The bytes of the data, and of the longest of its lines if they are documents.
struct DataBytes {
  int64_t all = 0, longest_line = 0;
  bool tokens = false;  // token files
};

void look_at_lines(const std::string& path, DataBytes& data) {
  const RegularFile file(path);
  LineReader lines(file.or_throw());
  std::string line;
  for (int64_t seen = 0; seen < kLooked && lines.next(line);
       seen += static_cast<int64_t>(line.size()) + 1)
    data.longest_line = std::max(data.longest_line, static_cast<int64_t>(line.size()));
}

DataBytes look_at(const data::DataConfig& config) {
  DataBytes found;
  std::error_code problem;
  for (const std::string& path : config.train) {
    try {
      const auto files = fs::is_directory(path, problem)
                             ? data::files_below(path)
                             : std::vector<data::FoundFile>{data::describe_file(path)};
      for (const data::FoundFile& file : files) {
        found.all += file.bytes;
        found.tokens = found.tokens || fs::path(file.path).extension() == ".bin";
        if (data::is_json_lines(file.path)) look_at_lines(file.path, found);
      }
    } catch (const Error&) {  // whoever reads the data says what is wrong with it
    }
  }
  return found;
}

int64_t power_of_two(int64_t least) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(least)));
}

std::string with_limit(const std::string& why, int64_t limit) {
  const std::string takes =
      limit > 0 ? formatted("the model takes {}", with_separators(limit)) : "";
  return why + (why.empty() || takes.empty() ? "" : ", ") + takes;
}

void add(std::string& list, const std::string& text) {
  list += (list.empty() ? "" : ", ") + text;
}

}  // namespace

Fitting fitting_seq(const data::DataConfig& config, int64_t limit) {
  const DataBytes data = config.is_random() ? DataBytes() : look_at(config);
  const bool bytes = config.tokenizer == "bytes" && !data.tokens;
  // A token of text has two bytes or more in nearly every text, and about five in English.
  const int64_t most = limit > 0 ? limit : kLongestLine;
  int64_t seq = kLongestText;
  std::string why;
  if (data.longest_line > 0) {
    seq = std::clamp(power_of_two(bytes ? data.longest_line : data.longest_line / 2), kShortest,
                     kLongestLine);
    why = formatted("the longest line has {} bytes", with_separators(data.longest_line));
  }
  seq = std::min(seq, most);
  const int64_t tokens = bytes ? data.all : data.tokens ? data.all / 2 : data.all / 5;
  const int64_t wanted = seq;
  while (tokens > 0 && seq * kSamples > tokens && seq > kShortestOfSmall) seq /= 2;
  if (seq < wanted) why = formatted("the data has {} bytes", with_separators(data.all));
  return {seq, with_limit(why, limit)};
}

void keep_recipe(Config& config, const std::set<std::string>& said, const Config& kept) {
  Config fixed;
  auto names = apply_toml(fixed, ready_config(kRecipe)->text, kRecipe);
  names.insert(names.end(), {"optim.lr", "data.seq", "train.steps", "train.tokens"});
  std::set<std::string> known = said;
  if (std::any_of(kEnds.begin(), kEnds.end(), [&](auto& end) { return said.contains(end); }))
    known.insert(kEnds.begin(), kEnds.end());
  Config from = kept;
  copy_unsaid(names, from, config, known);
}

std::string take_recipe(Config& config, const std::set<std::string>& said, int64_t limit) {
  Config fixed;
  const auto names = apply_toml(fixed, ready_config(kRecipe)->text, kRecipe);
  const std::set<std::string> taken = copy_unsaid(names, fixed, config, said);
  std::string first, second;
  if (!said.contains("optim.lr")) {
    const bool lora = config.lora.rank > 0;
    config.optim.lr = lora ? kAdapterRate : kTuningRate;
    add(first,
        lora ? "learning rate 2e-4 (for adapters)" : "learning rate 2e-5 (for all parameters)");
  }
  if (taken.contains("optim.warmup_share"))
    add(first, formatted("warm-up over {:g} % of the steps", 100 * config.optim.warmup_share));
  if (taken.contains("train.epochs")) add(first, formatted("{:g} epochs", config.train.epochs));
  if (taken.contains("train.batch"))
    add(second, count_of(config.train.batch, "sample") + " per step");
  if (!said.contains("data.seq")) {
    const Fitting fitting = fitting_seq(config.data, limit);
    config.data.seq = fitting.seq;
    add(second, formatted("{} per sample{}", count_of(fitting.seq, "token"),
                          fitting.why.empty() ? "" : formatted(" ({})", fitting.why)));
  }
  if (first.empty() && second.empty()) return "";
  const std::string space(11, ' ');
  std::string text = "recipe     " + first;
  if (!second.empty()) text += (first.empty() ? "" : "\n" + space) + second;
  return text + "\n" + space +
         "--optim.lr, --epochs, --batch, --data.seq or a config of yours change it";
}

}  // namespace fsdp::train
