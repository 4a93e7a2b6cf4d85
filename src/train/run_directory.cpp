#include "train/run_directory.h"

#include <unistd.h>

#include <cerrno>

#include "base/file_error.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "fsdp/checkpoint.h"
#include "fsdp/error.h"

namespace fsdp::train {

namespace fs = std::filesystem;

namespace {

bool holds_run(const fs::path& folder) {
  std::error_code problem;
  return fs::exists(folder / "config.toml", problem) ||
         fs::exists(folder / "metrics.jsonl", problem) ||
         (fs::exists(folder / "checkpoints", problem) &&
          !fs::is_empty(folder / "checkpoints", problem));
}

void make_folder(const fs::path& folder) {
  std::error_code problem;
  fs::create_directories(folder, problem);
  if (!problem && access(folder.c_str(), W_OK | X_OK) != 0)
    problem = {errno, std::generic_category()};
  if (problem)
    throw Error(formatted("can't write to the run's directory {}: {}.", folder, problem.message()),
                problem == std::errc::permission_denied ? "choose another with --dir."
                                                        : file_hint(problem.value()));
}

}  // namespace

fs::path free_directory(const std::string& name) {
  fs::path first = fs::path("runs") / name, folder = first;
  for (int number = 2; holds_run(folder); ++number) folder = formatted("{}-{}", first, number);
  return folder;
}

bool has_checkpoint(const fs::path& run) {
  return checkpoint::latest(RunDirectory{run}.checkpoints()).has_value();
}

void put_flight_aside(const RunDirectory& run) {
  std::error_code none;
  if (!fs::exists(run.flight(), none)) return;
  fs::remove_all(run.earlier_flight(), none);
  fs::rename(run.flight(), run.earlier_flight(), none);
}

std::optional<fs::path> prepare(const RunDirectory& run, Resume resume,
                                const std::function<void()>& take) {
  const auto own = [&] {
    if (take) take();
    put_flight_aside(run);
  };
  if (resume == Resume::kAuto) {
    make_folder(run.checkpoints());
    own();
    return checkpoint::latest(run.checkpoints());
  }
  const auto refuse_run = [&] {
    if (holds_run(run.root))
      throw Error(run.root.string() + " already holds a run.",
                  "add --resume to continue it, or choose another --dir.");
  };
  if (resume == Resume::kNo) {
    refuse_run();
    make_folder(run.checkpoints());
    own();
    refuse_run();  // another process may have done a whole run before this one took the directory
    return std::nullopt;
  }
  if (!holds_run(run.root))
    throw Error(formatted("there is no run in {} to resume.", run.root),
                "leave out --resume to start a new run, or pass the --dir of an existing one.");
  make_folder(run.checkpoints());
  own();  // before the newest checkpoint is chosen: the last owner may still write one
  auto found = checkpoint::latest(run.checkpoints());
  if (!found)
    throw Error(run.checkpoints().string() + " has no complete checkpoint.",
                "the run ended before its first one: start again in another --dir, with a "
                "--checkpoint.every.");
  return found;
}

FoundCheckpoint find_checkpoint(const fs::path& where) {
  std::error_code problem;
  fs::path path = fs::weakly_canonical(where, problem);
  if (!fs::is_directory(path, problem))
    throw Error(formatted("there is no directory {}.", where),
                "pass a run's directory (runs/NAME) or one of its checkpoints.");
  auto run_above = [](const fs::path& checkpoints) {
    return checkpoints.filename() == "checkpoints" ? checkpoints.parent_path() : fs::path();
  };
  if (fs::exists(path / ".metadata", problem)) return {path, run_above(path.parent_path())};
  if (auto found = checkpoint::latest(path / "checkpoints")) return {*found, path};
  if (auto found = checkpoint::latest(path)) return {*found, run_above(path)};
  throw Error(where.string() + " has no complete checkpoint.",
              "pass a run's directory (runs/NAME) or one of its checkpoints.");
}

}  // namespace fsdp::train
