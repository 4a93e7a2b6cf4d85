// Training: the parts of one run, put together from its config: corpus, model, optimizer, schedule.
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
#include "train/trainee.h"

namespace fsdp::train {

struct Training {
  World world;
  Config config;  // precision and the model's vocabulary as they came out
  RunDirectory directory;
  std::unique_ptr<Corpus> corpus;
  Trainee trainee;
  Sharded sharded;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<LRScheduler> scheduler;
  std::unique_ptr<GradScaler> scaler;  // float16 only
  int64_t steps = 0;                   // of the whole run
  checkpoint::AsyncSave saving;        // the last one, which may still be going on
};

ShardingStrategy parse_strategy(const std::string& name);  // FULL_SHARD, …, in either case

// What a config asks for; for plans, too.
ShardOptions shard_options(const World& world, const Config& config, const Trainee& trainee);
// Nothing where everything is kept.
std::optional<RecomputePolicy> activation_policy(const ActivationsConfig& activations,
                                                 const Trainee& trainee);
std::unique_ptr<Optimizer> make_optimizer(const OptimConfig& optim, const Sharded& sharded);

// Collective. The directory exists.
Training assemble(const World& world, const Config& config, const RunDirectory& directory);

// Where a run stands between two steps. With the model and the optimizer, all that is needed to go
// on as if it had never stopped.
struct RunState {
  int64_t step = 0;      // steps done
  int64_t position = 0;  // samples taken
  int64_t tokens = 0;
  int64_t skipped = 0;  // steps without an update
};

// Of the generators that dropout and the like draw from.
struct RandomState {
  at::Tensor cpu, device;  // `device` is undefined for the CPU
};
RandomState random_state(at::Device device);
void set_random_state(at::Device device, const RandomState& state);

// Collective. With checkpoint.async it goes on behind the training after it returned: in
// training.saving, whose failure the next step throws.
void save(Training& training, const RunState& state);
RunState restore(Training& training, const std::filesystem::path& checkpoint);

}  // namespace fsdp::train
