#include "train/resume.h"

#include "base/format.h"
#include "base/log.h"
#include "checkpoint/damaged.h"
#include "checkpoint/folder.h"
#include "checkpoint/together.h"
#include "fsdp/checkpoint.h"
#include "fsdp/error.h"
#include "train/owner.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;

// The checkpoint to try next; "": there is none. For rank 0.
std::string one_before(const Training& training, const fs::path& damaged,
                       const checkpoint::Damaged& why) {
  if (training.owner) training.owner->check();
  const fs::path folder = training.directory.checkpoints();
  const fs::path aside = checkpoint::set_aside(damaged);
  const auto next = checkpoint::latest(folder);
  if (!next) {  // nothing to go on with: leave it where people look for it
    fs::rename(aside, damaged);
    return "";
  }
  log::warn(formatted("{} is damaged, so the run resumes from {}: {} It is now {}.", damaged,
                      next->filename(), why.message(), aside.filename()));
  return next->string();
}

// restore() from `checkpoint`. If it turns out to be damaged as it is read, it is renamed
// (checkpoint::set_aside), a line says so, and the one before is tried. Throws the last failure if
// none is whole. Collective.
RunState restore_newest(Training& training, fs::path checkpoint) {
  for (;;) {
    try {
      return restore(training, checkpoint);
    } catch (const checkpoint::Damaged& damage) {
      const std::string next = checkpoint::told_by_first(
          training.world, "the checkpoint before " + checkpoint.filename().string(), [&] {
            return training.world.rank() == 0 ? one_before(training, checkpoint, damage)
                                              : std::string();
          });
      if (next.empty()) throw;
      checkpoint = next;
    }
  }
}

// Goes on from the first of these that can be loaded.
RunState restore_one(Training& training, const std::vector<StartingPoint>& points) {
  for (size_t i = 0;; ++i) {
    try {
      prepare_to_load(points[i], training);
      const bool last = i + 1 == points.size() && !points[i].in_memory;
      const RunState state = last ? restore_newest(training, points[i].path)
                                  : restore(training, points[i].path);
      forget_others(training.world, points[i]);
      return state;
    } catch (const std::exception& problem) {
      if (i + 1 == points.size() || !training.world.trouble().empty()) throw;
      if (training.world.rank() == 0)
        log::warn(formatted("{} Using {} instead.", problem.what(), points[i + 1].path));
    }
  }
}

}  // namespace

RunState first_state(Training& training, const Begun& begun) {
  if (begun.points.empty()) return {};
  RunState state = begun.restarted ? restore_one(training, begun.points)
                                   : restore_newest(training, begun.points.front().path);
  if (state.step >= training.steps && !begun.restarted)
    throw Error(formatted("the run in {} is complete: it has done {} of {} steps.",
                          begun.directory.root, state.step, training.steps),
                "pass a larger --steps to train on.");
  return state;
}

}  // namespace fsdp::train
