// Checkpoints: a model, its optimizer and whatever else a run must remember, in a directory that
// torch.distributed.checkpoint reads and writes as well.
//
//   namespace checkpoint = fsdp::checkpoint;
//   checkpoint::save("run/step-100", sharded, &optimizer, {.extra = {{"step", 100}}});
//   auto loaded = checkpoint::load("run/step-100", sharded, &optimizer);
//   auto step = std::get<int64_t>(loaded.extra.at("step"));
//
// A checkpoint appears under its name when every rank's part of it lies on the disk, and not
// before: a run that is killed while it saves leaves the older checkpoints as they were. What was
// saved by any number of ranks, with any strategy and wrap policy, loads on any other.
// docs/checkpoints.md describes the files.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp {

class Optimizer;
class Sharded;

namespace checkpoint {

// What else a run must remember. Keys must not be empty; tensors are stored as they are.
using Value = std::variant<int64_t, double, bool, std::string, at::Tensor>;
using Extra = std::map<std::string, Value>;

// What save_async does when the save before it is still going on.
enum class IfBusy {
  WAIT,    // waits for it
  REFUSE,  // an Error, on every rank
};

struct SaveOptions {
  Extra extra = {};       // the same on every rank; rank 0's is written, as "extra.<key>"
  Extra per_rank = {};    // each rank's own (random state, …), as "extra.rank<k>.<key>"
  int64_t keep_last = 0;  // when it is complete, keep_last(folder, this) is called; 0: it is not
  IfBusy if_busy = IfBusy::WAIT;
};

// Writes `dir`, whose last part is the checkpoint's name ("step-100"), and lets the link `latest`
// beside it point there. A checkpoint of that name is replaced; a directory that holds anything
// else is an Error. Collective over the world of the model; a failure on one rank (a full disk,
// say) is an Error on every rank, and then the older checkpoints are as they were. Without an
// optimizer only the model is written.
void save(const std::filesystem::path& dir, const Sharded& model, const Optimizer* optimizer,
          const SaveOptions& options = {});

// A save that goes on behind the training. Copies are handles to the same one.
class AsyncSave {
 public:
  AsyncSave() = default;  // of nothing: done

  bool done() const;                         // complete or failed
  void wait() const;                         // until it is; throws the Error that it failed with
  std::chrono::nanoseconds blocked() const;  // how long save_async held its caller

  struct State;

 private:
  friend AsyncSave save_async(const std::filesystem::path& dir, const Sharded& model,
                              const Optimizer* optimizer, const SaveOptions& options);
  std::shared_ptr<State> state_;
};

// As save(), but returns as soon as everything is copied to host memory (pinned, where it comes
// from a GPU), which is kept for the next time. Writing goes on in a thread; the checkpoint is
// there, and `latest` names it, when wait() returns. A failure is thrown by wait() and, if that
// was not called, by the optimizer's next step() or the next save; if there is none, it is logged
// when the model ends, which waits for the save. Collective, but only until it returns. Where a
// host has no memory for the copy, it is a save(), and a line says so.
AsyncSave save_async(const std::filesystem::path& dir, const Sharded& model,
                     const Optimizer* optimizer, const SaveOptions& options = {});

// Gets the memory for save_async ready in a thread, so that the first one holds its caller no
// longer than those after it. To be called once the optimizer has its states: after the first
// step().
void prepare_async(const Sharded& model, const Optimizer* optimizer);

struct LoadOptions {
  bool strict = true;     // tensors that only one side has are an Error, else they are skipped
  bool optimizer = true;  // false: states in the file are left there
};

struct Loaded {
  Extra extra;
  Extra per_rank;                    // empty where the saved world had no such rank
  std::vector<std::string> skipped;  // names that strict would have complained about, and extra
                                     // values of a Python type that Value has not
};

// Fills the model and the optimizer (unless that is null) from `dir`, or from what the link `dir`
// points to. Each rank reads just the bytes it needs, converting where dtypes differ. Everything is
// checked before anything is written. Collective; an Error on one rank is one on every rank.
//
// A model on the meta device that gets all of its values needs no materialize(), and one of
// deferred_init need not be initialised: ShardOptions::initialize.
// Learning rates and weight decays stay the optimizer's own.
Loaded load(const std::filesystem::path& dir, const Sharded& model, Optimizer* optimizer,
            const LoadOptions& options = {});

// The same for a plain module, in one process: parameters and buffers. `per_rank` is rank 0's. A
// module of deferred_init gets its memory by being loaded, and is not initialised first.
Loaded load(const std::filesystem::path& dir, torch::nn::Module& module,
            const LoadOptions& options = {});

// What SaveOptions::extra held, without reading any tensor of the model.
Extra read_extra(const std::filesystem::path& dir);

// --- a folder of checkpoints ---

// The checkpoint that the link `folder`/latest names; where that is missing, broken or lacks files,
// the newest that does not; none if there is none.
std::optional<std::filesystem::path> latest(const std::filesystem::path& folder);

// The complete checkpoints of a folder by the number their names end in ("step-100"), oldest first.
std::vector<std::filesystem::path> list(const std::filesystem::path& folder);

// Deletes all but the newest `count` of them, but never the one that `latest` names, nor one that
// holds other files as well. Those in which files are missing or cut off do not count, so one that
// loads is left. For one rank.
void keep_last(const std::filesystem::path& folder, int64_t count);

}  // namespace checkpoint
}  // namespace fsdp
