// Config: all options of a training run, as plain values. Each section is declared in the room that
// it configures; here are [train] and the options outside all sections.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/options.h"
#include "checkpoint/config.h"
#include "comm/config.h"
#include "data/config.h"
#include "memory/config.h"
#include "models/config.h"
#include "nn/config.h"
#include "observe/config.h"
#include "optim/config.h"
#include "shard/config.h"

namespace fsdp::train {

enum class Objective { kNextToken, kDpo };
constexpr auto enum_table(Objective) {
  return std::to_array<EnumName>(
      {{"next_token"}, {"dpo", "prefer chosen to rejected answers; needs adapters"}});
}

enum class OnNan { kSkip, kStop };
constexpr auto enum_table(OnNan) {
  return std::to_array<EnumName>({{"skip"}, {"stop"}});
}

enum class OnRetries { kStop, kWarn };
constexpr auto enum_table(OnRetries) {
  return std::to_array<EnumName>({{"stop", "with a memory report"}, {"warn"}});
}

enum class GraphMode { kAuto, kOn, kOff };
constexpr auto enum_table(GraphMode) {
  return std::to_array<EnumName>(
      {{"auto", "if possible and the run is long enough"}, {"on"}, {"off"}});
}

enum class KeepInMemory { kAuto, kOn, kOff };
constexpr auto enum_table(KeepInMemory) {
  return std::to_array<EnumName>({{"auto", "if fsdp run restarts ranks and the host has room"},
                                  {"on", "an error if that isn't possible"},
                                  {"off"}});
}

enum class KeepCopies { kAuto, kOn, kOff };
constexpr auto enum_table(KeepCopies) {
  return std::to_array<EnumName>({{"auto", "if a host has parts that no other has, and all have room"},
                                  {"on", "an error if that isn't possible"},
                                  {"off"}});
}

struct RecoveryConfig {
  KeepInMemory memory = KeepInMemory::kAuto;
  KeepCopies buddy = KeepCopies::kAuto;
  int64_t every = 0;  // steps; 0: chosen by what it costs
};

enum class Resume { kNo, kYes, kAuto };
constexpr auto enum_table(Resume) {
  return std::to_array<EnumName>(
      {{"false"}, {"true"}, {"auto", "where dir has a checkpoint; else the run begins there"}});
}

struct TrainConfig {
  int64_t steps = 0;  // exactly one of steps, tokens and epochs is set
  int64_t tokens = 0;
  double epochs = 0;
  int64_t batch = 32;       // samples per step, over all ranks
  int64_t micro_batch = 0;  // samples per pass on each rank; 0: the rank's part of the batch
  int64_t seed = 1;
  Objective objective = Objective::kNextToken;
  double dpo_beta = 0.1;                    // how closely to stay with the base
  double clip = 1.0;                        // maximum gradient norm; 0: no clipping
  OnNan on_nan = OnNan::kSkip;              // for a non-finite loss or gradient
  int64_t max_skips = 10;                   // consecutive skips before the run stops anyway
  OnRetries on_retries = OnRetries::kStop;  // for a GPU's allocator that is short at every step
  int64_t eval_every = 0;                   // steps; 0: only at the end
  int64_t eval_batches = 8;                 // of `batch` samples; 0: all
  int64_t sample_every = 0;                 // steps; 0: only at the end
  int64_t sample_tokens = 200;
  std::string sample_prompt = "";
  double sample_temperature = 0.8;
  bool deterministic = false;          // GPU operators give the same bits every time
  GraphMode graph = GraphMode::kAuto;  // steps as CUDA graphs
  int64_t profile = 0;                 // steps to profile; 0: none
  double grace = 0;                    // seconds from a signal to the kill; 0: by recent steps
  double stall = 10;                   // times a recent step, until a step is reported; 0: never
  double stall_least = 60;             // seconds, at least, until a step is reported
};

struct Config {
  std::string dir = "";  // of the run; empty: runs/NAME, after the config's name
  Resume resume = Resume::kNo;
  bool resumes = false;        // what resume comes to; set by resolve()
  bool take_over = false;      // even from a process that seems to be alive
  std::string init_from = "";  // a Hugging Face model, a run or a checkpoint; empty: none
  std::string optim_from = "";  // a checkpoint with the optimizer's states to start with
  models::ModelConfig model;
  nn::LoRAConfig lora;
  nn::Fp8Config fp8;
  data::DataConfig data;
  TrainConfig train;
  optim::OptimConfig optim;
  shard::ShardConfig shard;
  nn::ContextConfig context;
  memory::ActivationsConfig activations;
  memory::OffloadConfig offload;
  checkpoint::CheckpointConfig checkpoint;
  RecoveryConfig recovery;
  comm::CommConfig comm;
  observe::LogConfig log;
};

// In the order of --help and of a written config. Targets point into `config`, which must outlive
// the result.
std::vector<Option> options(Config& config);

}  // namespace fsdp::train
