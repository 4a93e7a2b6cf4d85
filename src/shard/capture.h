// StepGraph: the engine's part in recording a training step as a CUDA graph and replaying it.
//
// While a step is recorded the engine runs as usual, but the device executes nothing. Stream events
// from before are invalid inside a recording, and those from inside it are invalid afterwards; so a
// recording begins and ends with nothing gathered, and the engine forgets all events. A replay
// repeats the step's work on the device. The step's effects on the host that others rely on
// (versions of the parameters, bytes sent, calls to compare with other ranks) are repeated
// explicitly.
//
// This covers every sharded model of the process: a loss may use several.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/shard_info.h"
#include "shard/thread_state.h"

namespace fsdp::shard {

class Model;

class StepGraph {
 public:
  virtual ~StepGraph() = default;
  // Records what `work` puts on the current stream, which must not be the default stream. Waits for
  // the device first. If it throws, the models remain usable, resharded and without gradients.
  virtual void record(const std::function<void()>& work) = 0;
  // On the current stream, between begin_replays and end_replays.
  virtual void replay() = 0;
};

// A graph that shares the memory pool of `sibling`, if given. An Error without CUDA graphs.
std::unique_ptr<StepGraph> make_step_graph(Model& model, const StepGraph* sibling);
bool has_graphs(const Model& model);  // on a GPU, or by the seam for tests

// While alive, this thread records the graphs of a step of `model`; operations that can't be part
// of a graph may throw. Frees the gradients and all their memory first: a graph would keep writing
// to it. Other models keep the gradients they have, and must not take part in the step.
struct RecordsStep : ThreadScope<&ThreadState::records_step> {
  explicit RecordsStep(Model& model);
  ~RecordsStep();
};

// Resets the model after a recording that failed at any point, once the capture has ended.
void recover(Model& model);

// Whether a step must be eager for now: events or a profile are recorded, or units are pinned.
bool must_be_eager(Model& model);

// A hash of everything a recording depends on besides its inputs: the memory of shards and masters,
// which parameters are trained, how gradients are reduced and hooked, which units are pinned.
uint64_t state_of_recordings(Model& model);

// The beginning and end of a replayed step, on the stream of the replays. begin_replays throws
// failures of background work and reshards all units; end_replays marks the parameters as changed.
// before_replayed_update comes before the graph with the update: a save may still read the masters.
void begin_replays(Model& model);
void before_replayed_update(Model& model);
void end_replays(Model& model);

// Whether there are gradients, reduced or not.
bool has_gradients(Model& model);

}  // namespace fsdp::shard
