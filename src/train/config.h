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
#include "observe/config.h"
#include "optim/config.h"
#include "shard/config.h"

namespace fsdp::train {

enum class OnNan { kSkip, kStop };
constexpr auto enum_table(OnNan) {
  return std::to_array<EnumName>({{"skip"}, {"stop"}});
}

enum class GraphMode { kAuto, kOn, kOff };
constexpr auto enum_table(GraphMode) {
  return std::to_array<EnumName>(
      {{"auto", "if possible and the run is long enough"}, {"on"}, {"off"}});
}

struct TrainConfig {
  int64_t steps = 0;  // exactly one of steps, tokens and epochs is set
  int64_t tokens = 0;
  double epochs = 0;
  int64_t batch = 32;       // samples per step, over all ranks
  int64_t micro_batch = 0;  // samples per pass on each rank; 0: the rank's part of the batch
  int64_t seed = 1;
  double clip = 1.0;            // maximum gradient norm; 0: no clipping
  OnNan on_nan = OnNan::kSkip;  // for a non-finite loss or gradient
  int64_t max_skips = 10;       // consecutive skips before the run stops anyway
  int64_t eval_every = 0;       // steps; 0: only at the end
  int64_t eval_batches = 8;     // of `batch` samples; 0: all
  int64_t sample_every = 0;     // steps; 0: only at the end
  int64_t sample_tokens = 200;
  std::string sample_prompt = "";
  double sample_temperature = 0.8;
  bool deterministic = false;          // GPU operators give the same bits every time
  GraphMode graph = GraphMode::kAuto;  // steps as CUDA graphs
  int64_t profile = 0;                 // steps to profile; 0: none
  double grace = 0;                    // seconds from a signal to the kill; 0: by recent steps
};

struct Config {
  std::string dir = "";  // of the run; empty: runs/NAME, after the config's name
  bool resume = false;
  std::string init_from = "";  // a Hugging Face directory, a run or a checkpoint; empty: none
  models::ModelConfig model;
  data::DataConfig data;
  TrainConfig train;
  optim::OptimConfig optim;
  shard::ShardConfig shard;
  memory::ActivationsConfig activations;
  memory::OffloadConfig offload;
  checkpoint::CheckpointConfig checkpoint;
  comm::CommConfig comm;
  observe::LogConfig log;
};

// In the order of --help and of a written config. Targets point into `config`, which must outlive
// the result.
std::vector<Option> options(Config& config);

}  // namespace fsdp::train
