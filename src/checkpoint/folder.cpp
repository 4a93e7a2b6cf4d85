#include "checkpoint/folder.h"

#include <algorithm>
#include <cctype>
#include <string_view>

#include "base/format.h"
#include "base/log.h"
#include "checkpoint/files.h"
#include "checkpoint/manifest.h"
#include "checkpoint/metadata.h"
#include "fsdp/checkpoint.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

using Path = std::filesystem::path;

constexpr const char* kLatest = "latest";
constexpr const char* kFreshLink = "latest.partial";  // the new link, before it replaces the old

Path with_suffix(const Path& path, const char* suffix) {
  return path.parent_path() / (path.filename().string() + suffix);
}

bool is_complete(const Path& dir) {
  std::error_code problem;
  return std::filesystem::is_regular_file(dir / kMetadataName, problem);
}

// What is missing from a complete checkpoint, judged by file sizes: files may have been deleted,
// truncated or copied incompletely since. "" if nothing is, or if there is no manifest.
std::string missing_in(const Path& dir) {
  try {
    const auto manifest = read_manifest(dir);
    if (!manifest) return "";
    for (const auto& [name, file] : manifest->files) {
      std::error_code problem;
      const auto size = std::filesystem::file_size(dir / name, problem);
      if (problem) return name + " is missing";
      if (static_cast<int64_t>(size) != file.size)
        return formatted("{} has {} of {} bytes", name, size, file.size);
    }
    return "";
  } catch (const std::exception& problem) {
    return problem.what();
  }
}

bool all_digits(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(),
                                      [](unsigned char c) { return std::isdigit(c) != 0; });
}

// Whether a checkpoint has files of this name: ".metadata", "__0_0.distcp", the manifest.
bool is_ours(const std::string& name) {
  constexpr std::string_view kEnd = ".distcp";
  if (name == kMetadataName || name == kManifestName) return true;
  if (!name.starts_with("__") || !name.ends_with(kEnd)) return false;
  const std::string_view middle(name.data() + 2, name.size() - 2 - kEnd.size());
  const size_t cut = middle.find('_');
  return cut != std::string_view::npos && all_digits(middle.substr(0, cut)) &&
         all_digits(middle.substr(cut + 1));
}

struct Contents {
  std::vector<Path> ours;
  std::string foreign;  // the name of an entry that isn't ours; "" if there is none
};

// The contents of a directory; empty if nothing is at this path. A link or a file is itself
// foreign.
Contents contents_of(const Path& path) {
  Contents found;
  const auto kind = std::filesystem::symlink_status(path).type();
  if (kind == std::filesystem::file_type::not_found) return found;
  if (kind != std::filesystem::file_type::directory) {
    found.foreign = path.filename().string();
    return found;
  }
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    const std::string name = entry.path().filename().string();
    if (is_ours(name) && entry.symlink_status().type() == std::filesystem::file_type::regular)
      found.ours.push_back(entry.path());
    else
      found.foreign = name;
  }
  return found;
}

void require_ours(const Path& path) {
  const auto contents = contents_of(path);
  if (contents.foreign.empty()) return;
  throw Error(
      formatted("{}: holds \"{}\", which isn't part of a checkpoint, so it is not replaced.", path,
                contents.foreign),
      "give the checkpoint a directory of its own, such as \"run/checkpoints/step-100\".");
}

void require_link(const Path& path) {
  using std::filesystem::file_type;
  const auto kind = std::filesystem::symlink_status(path).type();
  if (kind == file_type::not_found || kind == file_type::symlink) return;
  throw Error(formatted("{}: is in the way of the link to the newest checkpoint.", path),
              "give the checkpoints a folder of their own, such as \"run/checkpoints\".");
}

// Removes a checkpoint, complete or not.
void remove_checkpoint(const Path& path) {
  std::error_code problem;
  if (!std::filesystem::exists(std::filesystem::symlink_status(path, problem))) return;
  require_ours(path);
  for (const auto& file : contents_of(path).ours) files::remove_file(file);
  files::remove_directory(path);
}

// The number at the end of a name; -1 if there is none.
int64_t number_of(const std::string& name) {
  size_t begin = name.size();
  while (begin > 0 && std::isdigit(static_cast<unsigned char>(name[begin - 1]))) --begin;
  if (begin == name.size() || name.size() - begin > 18) return -1;
  return std::stoll(name.substr(begin));
}

std::optional<Path> linked(const Path& folder) {
  std::error_code problem;
  const Path target = std::filesystem::read_symlink(folder / kLatest, problem);
  if (problem || target.empty()) return std::nullopt;
  const Path dir = folder / target;  // an absolute target is used as is
  if (is_complete(dir)) return dir;
  if (is_complete(with_suffix(dir, ".replaced"))) return with_suffix(dir, ".replaced");
  return std::nullopt;
}

}  // namespace

Path checked_name(const Path& dir) {
  // Checks the last component as written: ".." would lead to a directory that wasn't named.
  const Path name = dir.has_filename() ? dir : dir.parent_path();
  const std::string last = name.filename().string();
  if (last.empty() || last == "." || last == "..")
    throw Error(formatted("\"{}\" isn't a valid name for a checkpoint.", dir),
                "give it a directory of its own, such as \"run/checkpoints/step-100\".");
  for (const char* taken : {".partial", ".replaced", ".deleted"})
    if (last.ends_with(taken) || last == kLatest)
      throw Error(formatted("\"{}\": this name is reserved.", dir),
                  "\"latest\" and names that end in \".partial\", \".replaced\" or \".deleted\" "
                  "are reserved; choose another one, such as \"step-100\".");
  return name;
}

Path partial_of(const Path& dir) {
  return with_suffix(dir, ".partial");
}

void begin_partial(const Path& dir, bool newest) {
  const Path partial = partial_of(dir);
  require_ours(dir);
  if (newest)
    for (const char* link : {kLatest, kFreshLink}) require_link(dir.parent_path() / link);
  remove_checkpoint(partial);
  files::make_directories(dir.parent_path());
  files::make_directory(partial);
}

namespace {

// How the new checkpoint got its name, so that it can be undone.
enum class Came { kAlone, kByExchange, kAfterTheOther };

Came give_name(const Path& dir, const Path& partial, const Path& replaced) {
  std::error_code problem;
  if (!std::filesystem::exists(dir, problem)) {
    files::rename(partial, dir);
    return Came::kAlone;
  }
  if (files::exchange(partial, dir)) return Came::kByExchange;
  remove_checkpoint(replaced);
  files::rename(dir, replaced);
  try {
    files::rename(partial, dir);
  } catch (...) {
    files::rename(replaced, dir);
    throw;
  }
  return Came::kAfterTheOther;
}

void take_name_back(Came came, const Path& dir, const Path& partial, const Path& replaced) {
  if (came == Came::kByExchange) {
    files::exchange(partial, dir);
    return;
  }
  files::rename(dir, partial);
  if (came == Came::kAfterTheOther) files::rename(replaced, dir);
}

void move_link(const Path& folder, const Path& name) {
  const Path fresh = folder / kFreshLink;
  files::remove_file(fresh);
  files::make_link(name, fresh);
  files::rename(fresh, folder / kLatest);
  files::sync_directory(folder);
}

}  // namespace

void publish_partial(const Path& dir, bool newest) {
  const Path partial = partial_of(dir), replaced = with_suffix(dir, ".replaced");
  const Path folder = dir.parent_path();
  files::sync_directory(partial);
  require_ours(dir);
  const Came came = give_name(dir, partial, replaced);
  try {
    files::sync_directory(folder);
    if (newest) move_link(folder, dir.filename());
  } catch (...) {
    take_name_back(came, dir, partial, replaced);
    throw;
  }
  try {  // the new checkpoint is in place: leftovers of the old one aren't an error
    if (came == Came::kByExchange) remove_checkpoint(partial);
    remove_checkpoint(replaced);
  } catch (const std::exception& problem) {
    log::warn(formatted("a replaced checkpoint could not be removed: {}", problem.what()));
  }
}

void drop_partial(const Path& dir) noexcept {
  try {
    remove_checkpoint(partial_of(dir));
  } catch (const std::exception&) {  // the next save of this name retries
  }
}

// --- listing ---

std::vector<Path> list(const Path& folder) {
  std::error_code problem;
  std::vector<Path> found;
  for (const auto& entry : std::filesystem::directory_iterator(folder, problem)) {
    const std::string name = entry.path().filename().string();
    if (name == kLatest || name.ends_with(".partial") || name.ends_with(".deleted")) continue;
    if (!entry.is_directory(problem) || !is_complete(entry.path())) continue;
    // A checkpoint that is being replaced counts only until its successor is complete.
    if (name.ends_with(".replaced") && is_complete(folder / name.substr(0, name.size() - 9)))
      continue;
    found.push_back(entry.path());
  }
  const auto key = [](const Path& path) {
    std::string name = path.filename().string();
    if (name.ends_with(".replaced")) name.resize(name.size() - 9);
    return std::pair(number_of(name), name);
  };
  std::sort(found.begin(), found.end(),
            [&](const auto& a, const auto& b) { return key(a) < key(b); });
  return found;
}

std::optional<Path> latest(const Path& folder) {
  auto candidates = list(folder);
  if (auto named = linked(folder)) candidates.push_back(*named);
  std::optional<std::string> passed_over;
  for (auto dir = candidates.rbegin(); dir != candidates.rend(); ++dir) {
    const std::string missing = missing_in(*dir);
    if (missing.empty()) {
      if (passed_over) log::warn(formatted("{} Using {} instead.", *passed_over, *dir));
      return *dir;
    }
    if (!passed_over) passed_over = formatted("{} is damaged ({}).", *dir, missing);
  }
  if (candidates.empty()) return std::nullopt;
  return candidates.back();  // loading it reports what is wrong
}

void keep_last(const Path& folder, int64_t count) {
  if (count < 1)
    throw Error(formatted("keep_last({}): at least one checkpoint must stay.", count),
                "pass 1 to keep only the newest checkpoint.");
  std::error_code problem;
  std::vector<Path> condemned;
  for (const auto& entry : std::filesystem::directory_iterator(folder, problem))
    if (entry.path().filename().string().ends_with(".deleted") &&
        contents_of(entry.path()).foreign.empty())
      condemned.push_back(entry.path());
  const auto named = linked(folder);
  auto all = list(folder);
  std::reverse(all.begin(), all.end());
  int64_t whole = 0;  // damaged checkpoints don't count, so that `count` loadable ones stay
  for (const auto& dir : all) {
    const bool kept = whole < count;
    if (missing_in(dir).empty()) ++whole;
    if (kept || (named && named->filename() == dir.filename())) continue;
    if (!contents_of(dir).foreign.empty()) continue;
    const Path away = with_suffix(dir, ".deleted");
    remove_checkpoint(away);
    files::rename(dir, away);
    condemned.push_back(away);
  }
  for (const auto& path : condemned) remove_checkpoint(path);
}

}  // namespace fsdp::checkpoint
