#include "train/begun.h"

#include <algorithm>
#include <iostream>
#include <string>

#include "base/environment.h"
#include "base/format.h"
#include "checkpoint/damaged.h"
#include "comm/core/flight_recorder.h"
#include "fsdp/checkpoint.h"
#include "fsdp/error.h"
#include "train/from_rank_0.h"

namespace fsdp::train {

bool Begun::is_on_disk(int64_t step) const {
  return std::any_of(points.begin(), points.end(), [&](const StartingPoint& point) {
    return point.path == directory.checkpoint(step);
  });
}

Begun begin(const World& world, const RunRequest& request) {
  const std::string before = run_before_restart(world, request.config);
  std::string root = from_rank_0(world, "fsdp/train/dir", [&] {
    if (!request.config.dir.empty()) return request.config.dir;
    return before.empty() ? free_directory(request.name).string() : before;
  });
  Begun begun{.directory = {root}, .points = {}, .restarted = !before.empty(), .owner = nullptr};
  const std::string disk = from_rank_0(world, "fsdp/train/from", [&] {
    // By force only once: ranks that are restarted must not take the directory back from a run that
    // has taken it from them.
    const bool restart = environment::integer("TORCHELASTIC_RESTART_COUNT").value_or(0) > 0;
    const auto take = [&] {
      begun.owner =
          std::make_shared<Owner>(begun.directory, request.config.take_over && !restart);
    };
    if (begun.restarted) {
      take();
      put_flight_aside(begun.directory);
    }
    const auto found = begun.restarted ? checkpoint::latest(begun.directory.checkpoints())
                                       : prepare(begun.directory, request.config.resume, take);
    return found ? found->string() : std::string();
  });
  if (begun.restarted) {
    begun.points = starting_points(world, disk);
  } else {
    // This rank resolved its config by what it saw there.
    if (request.config.resumes == disk.empty())
      throw Error(formatted("rank {} and rank 0 don't agree on whether {} has a checkpoint.",
                            world.rank(), root),
                  "all ranks must see the same file system; if it only was late, start again.");
    if (!disk.empty()) begun.points = {{disk}};
    note_run(world, begun.directory);
  }
  comm::flight::set_directory(begun.directory.flight().string());
  return begun;
}

bool is_complete(const Training& training, const Begun& begun) {
  if (training.config.resume != Resume::kAuto || begun.points.empty() || begun.restarted)
    return false;
  const std::string steps = from_rank_0(training.world, "fsdp/train/done", [&]() -> std::string {
    try {
      return std::to_string(steps_done(begun.points.front().path));
    } catch (const checkpoint::Damaged&) {
      return "0";  // first_state() deals with it
    }
  });
  const int64_t done = std::stoll(steps);
  if (done < training.steps) return false;
  if (training.world.rank() == 0)
    std::cout << formatted("the run in {} is complete: it has done {} of {} steps\n",
                           begun.directory.root, done, training.steps);
  return true;
}

}  // namespace fsdp::train
