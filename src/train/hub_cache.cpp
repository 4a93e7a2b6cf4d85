#include "train/hub_cache.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <vector>

#include "base/environment.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "fsdp/error.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kModels = "models--";
constexpr size_t kLongestName = 96;  // of each part, as the hub has it
constexpr int64_t kLargestRef = 4096;

bool is_part(std::string_view text) {
  const auto fits = [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
  };
  return !text.empty() && text.size() <= kLongestName && text.front() != '.' &&
         text.front() != '-' && text.find("--") == std::string_view::npos &&
         text.find("..") == std::string_view::npos && std::all_of(text.begin(), text.end(), fits);
}

fs::path home_cache() {
  if (const auto own = environment::text("HF_HOME")) return *own;
  if (const auto caches = environment::text("XDG_CACHE_HOME"))
    return fs::path(*caches) / "huggingface";
  return fs::path(environment::text("HOME").value_or("")) / ".cache" / "huggingface";
}

// As huggingface_hub finds it.
fs::path hub_folder() {
  for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"})
    if (const auto own = environment::text(name)) return *own;
  return home_cache() / "hub";
}

// What "main" was when the model was downloaded; without it the only snapshot.
std::optional<fs::path> snapshot_in(const fs::path& folder) {
  std::error_code problem;
  if (fs::is_regular_file(folder / "refs" / "main", problem)) {
    std::string commit = read_file(folder / "refs" / "main", kLargestRef);
    commit.erase(std::find_if(commit.begin(), commit.end(), [](char c) { return c <= ' '; }),
                 commit.end());
    const fs::path snapshot = folder / "snapshots" / commit;
    if (is_part(commit) && fs::is_directory(snapshot, problem)) return snapshot;
  }
  std::vector<fs::path> all;
  for (fs::directory_iterator entry(folder / "snapshots", problem), end; !problem && entry != end;
       entry.increment(problem))
    if (entry->is_directory(problem)) all.push_back(entry->path());
  if (all.size() != 1) return std::nullopt;
  return all.front();
}

}  // namespace

fs::path local_model(const std::string& where) {
  std::error_code problem;
  if (where.empty() || fs::exists(where, problem)) return where;
  const size_t slash = where.find('/');
  const bool whole = slash == std::string::npos;
  const std::string organisation = whole ? "" : where.substr(0, slash);
  const std::string name = whole ? where : where.substr(slash + 1);
  if (!is_part(name) || (!whole && !is_part(organisation))) return where;
  const fs::path hub = hub_folder();
  const std::string folder = whole ? name : organisation + "--" + name;
  const fs::path model = hub / (std::string(kModels) + folder);
  const std::string download = formatted("download it: hf download {}", where);
  if (fs::is_directory(model, problem)) {
    const auto snapshot = snapshot_in(model);
    if (snapshot && fs::exists(*snapshot / "config.json", problem)) return *snapshot;
    throw Error(formatted("{} has no complete snapshot of {}.", model, where), download + ".");
  }
  if (whole || fs::is_directory(organisation, problem)) return where;  // a path that is misspelled
  throw Error(formatted("there is no directory {}, and no model of that name in Hugging Face's "
                        "cache, {}.",
                        where, hub),
              download + " (pip install huggingface_hub), or pass a directory.");
}

std::string hub_name(const fs::path& dir) {
  const fs::path snapshots = fs::path(dir / "").lexically_normal().parent_path().parent_path();
  std::string folder = snapshots.parent_path().filename().string();
  if (snapshots.filename() != "snapshots" || !folder.starts_with(kModels)) return "";
  folder.erase(0, kModels.size());
  const size_t cut = folder.find("--");
  return cut == std::string::npos ? folder : folder.replace(cut, 2, "/");
}

}  // namespace fsdp::train
