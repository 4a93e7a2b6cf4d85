#include "checkpoint/folder.h"

#include <algorithm>
#include <cctype>
#include <random>
#include <string_view>

#include "base/file_error.h"
#include "base/format.h"
#include "base/log.h"
#include "checkpoint/draft_lock.h"
#include "checkpoint/files.h"
#include "checkpoint/intact.h"
#include "checkpoint/metadata.h"
#include "fsdp/checkpoint.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

using Path = std::filesystem::path;

constexpr const char* kLatest = "latest";
constexpr const char* kPartial = ".partial";
constexpr const char* kDamaged = ".damaged";

Path with_suffix(const Path& path, const std::string& suffix) {
  return path.parent_path() / (path.filename().string() + suffix);
}

// Whether a name ends in a suffix of ours, or in one and a part of its own: "a.partial.7-c0ffee".
bool has_suffix(const std::string& name, const std::string& suffix) {
  return name.ends_with(suffix) || name.find(suffix + ".") != std::string::npos;
}

bool is_complete(const Path& dir) {
  std::error_code problem;
  return std::filesystem::is_regular_file(dir / kMetadataName, problem);
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
  std::error_code problem;
  for (const auto& entry : std::filesystem::directory_iterator(path, problem)) {
    const std::string name = entry.path().filename().string();
    const auto type = entry.symlink_status(problem).type();
    if (type == std::filesystem::file_type::not_found) continue;  // another process removed it
    if (is_ours(name) && type == std::filesystem::file_type::regular)
      found.ours.push_back(entry.path());
    else
      found.foreign = name;
  }
  if (problem && problem != std::errc::no_such_file_or_directory)
    throw Error(formatted("{}: can't be read: {}.", path, problem.message()),
                file_hint(problem.value()));
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
  for (const char* taken : {kPartial, ".replaced", ".deleted", kDamaged})
    if (has_suffix(last, taken) || last == kLatest)
      throw Error(formatted("\"{}\": this name is reserved.", dir),
                  "\"latest\" and names that end in \".partial\", \".replaced\", \".deleted\" or "
                  "\".damaged\" are reserved; choose another one, such as \"step-100\".");
  return name;
}

Path Partial::path() const {
  return with_suffix(dir, formatted("{}.{}", kPartial, writer));
}

std::string new_writer() {
  std::random_device random;
  return formatted("{:08x}{:08x}", random(), random());
}

namespace {

// The new link, before it replaces the old one.
Path fresh_link(const Partial& partial) {
  return partial.dir.parent_path() / formatted("{}{}.{}", kLatest, kPartial, partial.writer);
}

// Ends what was begun as NAME.partial, by any writer but this one; `name` "": any name.
void end_partials(const Path& folder, const std::string& name, const std::string& writer) {
  std::error_code problem;
  std::vector<Path> found;
  for (const auto& entry : std::filesystem::directory_iterator(folder, problem)) {
    const std::string file = entry.path().filename().string();
    const size_t at = file.find(kPartial);
    if (at == std::string::npos || !has_suffix(file, kPartial) || file.ends_with(".deleted") ||
        file.ends_with(formatted("{}.{}", kPartial, writer)) || is_draft(entry.path()))
      continue;
    if (name.empty() || file.substr(0, at) == name || file.substr(0, at) == kLatest)
      found.push_back(entry.path());
  }
  for (const Path& path : found) {
    if (std::filesystem::is_symlink(path, problem)) {
      files::remove_file(path);
      continue;
    }
    require_ours(path);
    const Path away = with_suffix(path, ".deleted");
    remove_checkpoint(away);
    if (files::rename_if_there(path, away)) remove_checkpoint(away);
  }
}

void check_owner(const std::function<void()>& check) {
  if (check) check();
}

}  // namespace

void fence(const Path& folder, const std::string& writer) {
  end_partials(folder, "", writer);
}

void begin_partial(const Partial& partial) {
  const Path folder = partial.dir.parent_path();
  check_owner(partial.check);
  require_ours(partial.dir);
  if (partial.newest) require_link(folder / kLatest);
  end_partials(folder, partial.dir.filename().string(), partial.writer);
  if (!partial.check) files::make_directories(folder);
  files::make_directory(partial.path());
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

// Whoever takes the folder over removes the fresh link. So it is made before the last check: if
// that happens after the check, the rename fails.
void move_link(const Partial& partial) {
  const Path folder = partial.dir.parent_path(), fresh = fresh_link(partial);
  files::remove_file(fresh);
  files::make_link(partial.dir.filename(), fresh);
  check_owner(partial.check);
  files::rename(fresh, folder / kLatest);
  files::sync_directory(folder);
}

// The directory that was written is gone.
[[noreturn]] void refuse_lost(const Partial& partial) {
  throw Error(formatted("{}: the save can't be finished: {} is gone.", partial.dir,
                        partial.path().filename()),
              "another process saves a checkpoint of this name, or the folder was deleted: give "
              "every run a directory of its own.");
}

}  // namespace

void publish_partial(const Partial& written) {
  const Path &dir = written.dir, partial = written.path();
  const Path replaced = with_suffix(dir, ".replaced"), folder = dir.parent_path();
  std::error_code missing;
  if (!std::filesystem::exists(partial, missing)) refuse_lost(written);
  files::sync_directory(partial);
  require_ours(dir);
  check_owner(written.check);
  const Came came = give_name(dir, partial, replaced);
  try {
    files::sync_directory(folder);
    if (written.newest) move_link(written);
  } catch (...) {
    take_name_back(came, dir, partial, replaced);
    throw;
  }
  try {  // the new checkpoint is in place: leftovers of the old one aren't an error
    if (came == Came::kByExchange) remove_checkpoint(partial);
    remove_checkpoint(replaced);
  } catch (const std::exception& problem) {
    log::warn(formatted("a replaced checkpoint could not be removed: {}", log::plain(problem)));
  }
}

void drop_partial(const Partial& partial) noexcept {
  try {
    remove_checkpoint(partial.path());
  } catch (const std::exception&) {  // the next save of this name retries
  }
}

// --- listing ---

std::vector<Path> list(const Path& folder) {
  std::error_code problem;
  std::vector<Path> found;
  for (const auto& entry : std::filesystem::directory_iterator(folder, problem)) {
    const std::string name = entry.path().filename().string();
    if (name == kLatest || has_suffix(name, kPartial) || name.ends_with(".deleted") ||
        has_suffix(name, kDamaged))
      continue;
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
    const std::string missing = problem_in(*dir);
    if (missing.empty()) {
      if (passed_over) log::warn(formatted("{} Using {} instead.", *passed_over, *dir));
      return *dir;
    }
    if (!passed_over) passed_over = formatted("{} is damaged: {}.", *dir, missing);
  }
  if (candidates.empty()) return std::nullopt;
  return candidates.back();  // loading it reports what is wrong
}

void keep_last(const Path& folder, int64_t count) {
  keep_last(folder, count, {});
}

void keep_last(const Path& folder, int64_t count, const std::function<void()>& check) {
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
    if (problem_in(dir).empty()) ++whole;
    if (kept || (named && named->filename() == dir.filename())) continue;
    if (!contents_of(dir).foreign.empty()) continue;
    const Path away = with_suffix(dir, ".deleted");
    check_owner(check);
    remove_checkpoint(away);
    files::rename(dir, away);
    condemned.push_back(away);
  }
  for (const auto& path : condemned) remove_checkpoint(path);
}

Path set_aside(const Path& dir) {
  std::error_code problem;
  Path aside = with_suffix(dir, kDamaged);
  for (int number = 2; std::filesystem::exists(aside, problem); ++number)
    aside = with_suffix(dir, formatted("{}.{}", kDamaged, number));
  files::rename(dir, aside);
  files::sync_directory(dir.parent_path());
  return aside;
}

}  // namespace fsdp::checkpoint
