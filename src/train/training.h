// Training: the parts of one run, assembled from its config: corpus, model, optimizer, schedule.
#pragma once

#include <memory>
#include <optional>

#include "fsdp/checkpoint.h"
#include "fsdp/fully_shard.h"
#include "fsdp/grad_scaler.h"
#include "fsdp/lr_schedule.h"
#include "fsdp/optim.h"
#include "fsdp/recompute.h"
#include "fsdp/world.h"
#include "train/config.h"
#include "train/corpus.h"
#include "train/run_directory.h"
#include "train/share.h"
#include "train/task.h"

namespace fsdp::train {

class Owner;

struct Training {
  World world;
  Config config;  // with the precision and the vocabulary size resolved
  RunDirectory directory;
  std::unique_ptr<Corpus> corpus;
  Context context;  // the ranks that share this rank's sequences
  Sharded sharded;  // outlives the module: otherwise it is kept until another model is sharded
  TrainTask task;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<LRScheduler> scheduler;
  std::unique_ptr<GradScaler> scaler;  // fp16 only
  int64_t steps = 0;                   // of the whole run
  checkpoint::AsyncSave saving;        // the latest save, which may still be in progress
  std::shared_ptr<const Owner> owner;  // of the directory; null on other ranks than 0

  Share share() const { return {world, context}; }
};

ShardingStrategy parse_strategy(const std::string& name);  // FULL_SHARD, …, in upper or lower case
at::ScalarType dtype_of(shard::Precision precision);
void resolve_precision(shard::ShardConfig& shard, bool gpu);  // replaces kAuto

// From a config, for runs and plans.
ShardOptions shard_options(const World& world, const Config& config, const TrainTask& task);
// nullopt: activations.mode is none.
std::optional<RecomputePolicy> activation_policy(const memory::ActivationsConfig& activations,
                                                 const TrainTask& task);
// Shards the task's model, and recomputes what activations.mode says. Collective. `initialize` =
// false: values are loaded or drawn later.
Sharded shard_task(const World& world, const Config& config, const TrainTask& task,
                   bool initialize);
std::unique_ptr<Optimizer> make_optimizer(const Config& config, const Sharded& sharded);

// Collective. The directory must exist.
Training assemble(const World& world, const Config& config, const RunDirectory& directory);

// The state of a run between two steps. Together with the model and the optimizer, this is all that
// a run needs to continue as if it had never stopped.
struct RunState {
  int64_t step = 0;      // steps done
  int64_t position = 0;  // samples consumed, over all ranks
  int64_t tokens = 0;
  int64_t skipped = 0;  // steps without an update
};

// The state of the generators that dropout draws from.
struct RandomState {
  at::Tensor cpu, device;  // `device` is undefined on the CPU
};
RandomState random_state(at::Device device);
void set_random_state(at::Device device, const RandomState& state);

// What every checkpoint of a run holds besides the model and the optimizer.
checkpoint::SaveOptions save_options(const Training& training, const RunState& state);
// Collective. With checkpoint.async the checkpoint is written in the background after save()
// returns; training.saving tracks it, and the next step throws its failure. False: nothing is
// saved, because the save before is still being written (checkpoint.when_busy; never with `must`).
bool save(Training& training, const RunState& state, bool must);
int64_t steps_done(const std::filesystem::path& checkpoint);
// What a run's checkpoints hold of its model: all, or its adapters.
checkpoint::LoadOptions load_options(const Config& config);
RunState restore(Training& training, const std::filesystem::path& checkpoint);

}  // namespace fsdp::train
