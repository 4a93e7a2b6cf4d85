// StepGraph: the engine's part in recording a training step as a CUDA graph and replaying it.
//
// While a step is recorded the engine runs as always, but nothing that it tells the device happens.
// Events of before mean nothing inside of a recording, and those of inside nothing after it, so the
// engine begins and ends with nothing gathered and forgets all moments. A replay then does to the
// device what the step did; what the step did on the host and others must notice (versions of the
// parameters, bytes sent, calls to compare with other ranks) is done by hand.
//
// All of it is for every sharded model of the process: a loss may use several.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/shard_info.h"

namespace fsdp::shard {

class Model;

class StepGraph {
 public:
  virtual ~StepGraph() = default;
  // Records what `work` puts on the current stream, which is not the default one. Waits for the
  // device first. If it throws, the models are usable: nothing gathered, no gradients.
  virtual void record(const std::function<void()>& work) = 0;
  // On the current stream, between begin_replays and end_replays.
  virtual void replay() = 0;
};

// A graph in the memory of `sibling`, if there is one. An Error where there are no graphs.
std::unique_ptr<StepGraph> make_step_graph(Model& model, const StepGraph* sibling);
// Where there are graphs: on a GPU.
bool has_graphs(const Model& model);

// The seam for tests: what makes graphs instead, on the CPU too.
extern std::function<std::unique_ptr<StepGraph>()> step_graphs_of_tests;

// While alive, this thread records the graphs of a step of `model`, and what cannot be part of them
// may refuse. Gradients, and all memory that was taken for them before, are gone then: a graph
// would go on writing to it. Other models keep the gradients that they have, and must not take
// part.
class RecordsStep {
 public:
  explicit RecordsStep(Model& model);
  ~RecordsStep();
  RecordsStep(const RecordsStep&) = delete;
  RecordsStep& operator=(const RecordsStep&) = delete;
  static bool now();
};

// After a recording that failed anywhere, when the stream is no longer recorded.
void recover(Model& model);

// Whether a step must be taken eagerly for now: somebody watches the engine, or holds units.
bool must_be_eager(const Model& model);

// Changes with whatever a recording took for granted beside its inputs: where shards and masters
// are, what is trained, how gradients are reduced and who watches them, which units somebody holds.
uint64_t state_of_recordings(const Model& model);

// The two ends of a step that is replayed: throws what went wrong in the background, gives up what
// is gathered; and tells that the parameters have changed. On the stream of the replays.
void begin_replays(Model& model);
void end_replays(Model& model);

// Throws what the model's communicators found out behind our back.
void check_communicators(Model& model);

// Whether gradients are there, reduced or not.
bool has_gradients(const Model& model);

}  // namespace fsdp::shard
