#include "train/kept_config.h"

#include <algorithm>
#include <set>

#include "base/exit_code.h"
#include "base/format.h"
#include "checkpoint/files.h"
#include "checkpoint/sums.h"
#include "fsdp/checkpoint.h"
#include "fsdp/error.h"
#include "train/config_resolve.h"
#include "train/config_values.h"
#include "train/config_write.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kLargestConfig = 16 << 20;  // bytes
constexpr std::string_view kSumLine = "# sum ";
constexpr const char* kAboutSum =
    "\n# The sum of the lines above. Values may be edited: --resume says which ones were.\n";
constexpr size_t kSumDigits = 16;
constexpr size_t kShownNames = 8;
// Say how a process starts, not what the run is.
const std::set<std::string> kOfTheStart = {"dir", "resume", "take_over", "train.profile"};

std::string sum_of(std::string_view text) {
  return formatted("{:016x}", checkpoint::block_sum(text.data(), text.size()));
}

enum class SumState { kRight, kWrong, kMissing };

SumState check_sum(std::string_view text) {
  const size_t begin = text.rfind("\n# sum ");
  if (begin == std::string_view::npos) return SumState::kMissing;
  const std::string_view line = text.substr(begin + 1);
  const std::string_view digits = line.substr(kSumLine.size());
  // A line that was cut is as good as none.
  if (digits.size() < kSumDigits + 1) return SumState::kMissing;
  return digits.substr(0, kSumDigits) == sum_of(text.substr(0, begin + 1)) ? SumState::kRight
                                                                           : SumState::kWrong;
}

// A checkpoint's copy of the config.
struct ConfigCopy {
  fs::path checkpoint;
  std::string text;
  std::set<std::string> names;  // of the options in it
  Config config;
};

// The newest one that can be read.
std::optional<ConfigCopy> newest_copy(const RunDirectory& run) {
  auto all = checkpoint::list(run.checkpoints());
  std::reverse(all.begin(), all.end());
  for (const fs::path& path : all) {
    try {
      const auto extra = checkpoint::read_extra(path);
      const auto found = extra.find("config");
      if (found == extra.end() || !std::holds_alternative<std::string>(found->second)) continue;
      ConfigCopy copy{.checkpoint = path, .text = std::get<std::string>(found->second)};
      for (auto& name : apply_toml(copy.config, copy.text, path.string() + ": its config"))
        copy.names.insert(std::move(name));
      return copy;
    } catch (const Error&) {  // damaged, too; the one before may not be
    }
  }
  return std::nullopt;
}

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShownNames); ++i)
    text += (i ? ", " : "") + names[i];
  if (names.size() > kShownNames) text += formatted(" and {} more", names.size() - kShownNames);
  return text;
}

// "optim.lr is 0.1 instead of 0.3" for each option that differs.
std::vector<std::string> differences(Config config, Config copy) {
  std::vector<std::string> found;
  const auto now = options(config), before = options(copy);
  for (size_t i = 0; i < now.size(); ++i) {
    if (kOfTheStart.contains(now[i].name())) continue;
    const std::string value = value_text(now[i]), old = value_text(before[i]);
    if (value != old) found.push_back(formatted("{} is {} instead of {}", now[i].name(), value, old));
  }
  return found;
}

[[noreturn]] void refuse_damaged(const RunDirectory& run, const std::string& why,
                                 const std::optional<ConfigCopy>& copy) {
  throw CodedError(
      kExitDamaged, formatted("{} is damaged: {}.", run.config(), why),
      copy ? formatted("delete it, and the run goes on with the copy of it in {}; or pass a config: "
                       "fsdp train FILE --dir {} --resume.",
                       copy->checkpoint, run.root)
           : formatted("pass the config that the run was started with: fsdp train FILE --dir {} "
                       "--resume.",
                       run.root));
}

// The file isn't as it was written.
void examine(const RunDirectory& run, KeptConfig& kept, SumState sum) {
  const auto copy = newest_copy(run);
  Config config;
  std::set<std::string> names;
  try {
    for (auto& name : apply_toml(config, kept.text, kept.file)) names.insert(std::move(name));
  } catch (const Error& problem) {
    if (sum == SumState::kWrong) throw;  // somebody made a mistake while editing
    refuse_damaged(run, problem.message().substr(0, problem.message().rfind('.')), copy);
  }
  if (!copy) return;
  std::vector<std::string> missing;
  for (const std::string& name : copy->names)
    if (!names.contains(name)) missing.push_back(name);
  if (sum == SumState::kMissing && !missing.empty())
    refuse_damaged(run, formatted("it lacks {}", listed(missing)), copy);
  const auto edited = differences(config, copy->config);
  if (!edited.empty())
    kept.notes.push_back(formatted("{} was edited; compared with {}: {}.", run.config(),
                                   copy->checkpoint.filename(), listed(edited)));
}

}  // namespace

std::string kept_toml(Config config) {
  config.train.profile = 0;  // a resumed run isn't profiled again
  config.take_over = false;
  return to_toml(config);
}

void keep_config(const RunDirectory& run, const Config& config) {
  const fs::path draft = run.config().string() + ".partial";
  const std::string text = kept_toml(config) + kAboutSum;
  checkpoint::files::write_whole(draft, formatted("{}{}{}\n", text, kSumLine, sum_of(text)));
  checkpoint::files::rename(draft, run.config());
  checkpoint::files::sync_directory(run.root);
}

std::optional<KeptConfig> read_kept_config(const RunDirectory& run) {
  KeptConfig kept{.file = run.config().string()};
  std::error_code problem;
  if (fs::exists(run.config(), problem)) {
    kept.text = checkpoint::files::read_whole(run.config(), kLargestConfig);
    const SumState sum = check_sum(kept.text);
    if (sum != SumState::kRight) examine(run, kept, sum);
    return kept;
  }
  const auto copy = newest_copy(run);
  if (!copy) return std::nullopt;
  kept.file = copy->checkpoint.string() + ": its config";
  kept.text = copy->text;
  kept.notes.push_back(formatted("{} is missing: the run goes on with the copy of it in {}.",
                                 run.config(), copy->checkpoint.filename()));
  return kept;
}

}  // namespace fsdp::train
