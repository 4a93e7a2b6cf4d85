/// @file
/// Checkpoints: a model, its optimizer and extra state of a run, in a directory that
/// torch.distributed.checkpoint also reads and writes.
///
///     namespace checkpoint = fsdp::checkpoint;
///     checkpoint::save("run/step-100", sharded, &optimizer, {.extra = {{"step", 100}}});
///     auto loaded = checkpoint::load("run/step-100", sharded, &optimizer);
///     auto step = std::get<int64_t>(loaded.extra.at("step"));
///
/// A checkpoint gets its name only when every rank's part is on disk, so a run killed during a save
/// leaves the older checkpoints intact. It loads on any number of ranks, with any strategy and wrap
/// policy. docs/checkpoints.md describes the files.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
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

/// Saving and loading.
namespace checkpoint {

/// A value of Extra. Tensors are stored as they are.
using Value = std::variant<int64_t, double, bool, std::string, at::Tensor>;
/// Extra state of a run (step, random state, …) by key. Keys must not be empty.
using Extra = std::map<std::string, Value>;

/// What save_async() does if the save before it is still running.
enum class IfBusy {
  WAIT,    ///< Wait for it.
  REFUSE,  ///< Throw Error, on every rank.
  SKIP,    ///< Save nothing; AsyncSave::skipped() is true.
  QUEUE,   ///< Copy now and write later, if the pools have room for another copy; otherwise SKIP.
};

/// How far a save in the background is, on this rank.
struct SaveProgress {
  int64_t bytes = 0;    ///< To be written.
  int64_t written = 0;  ///< Of them, so far.
  double seconds = 0;   ///< Since save_async(), until now or until its end.
};

/// The right of a process to write into a folder, if another one may take it away. `fsdp train` uses
/// it for the directory of a run. Only rank 0's counts.
struct Ownership {
  /// Part of the name of unfinished checkpoints: "step-100.partial.EPOCH". Letters, digits and "-",
  /// and never the same in two processes. Empty: a random one for each save.
  std::string epoch = {};
  /// Called before anything in the folder changes: as the save begins, right before the checkpoint
  /// gets its name, before `latest` moves and before old ones are deleted. Throws if this process
  /// isn't the owner anymore; the save then fails. In the background, another thread calls it.
  std::function<void()> check = {};
};

/// Chooses tensors of a model by name.
using Chosen = std::function<bool(const std::string& name)>;

/// Options of save() and save_async().
struct SaveOptions {
  Extra extra = {};       ///< The same on every rank. Rank 0 writes it as `extra.<key>`.
  Extra per_rank = {};    ///< Each rank's own. Rank k writes it as `extra.rank<k>.<key>`.
  Chosen only = {};       ///< Parameters to save, with their states. Empty: all.
  int64_t keep_last = 0;  ///< After the save, delete all but this many (keep_last()). 0: keep all.
  IfBusy if_busy = IfBusy::WAIT;  ///< For save_async().

  /// Empty: none. Of two processes that save the same checkpoint at the same time, one then gets an
  /// Error, and the other's is whole.
  Ownership owner = {};
  /// For save_async(): only AsyncSave::wait() throws a failure, not the next step() or save; without
  /// memory for a pool, it saves nothing.
  bool may_fail = false;
  /// `dir` is in the memory of each host: every host gets the files of its ranks, and the metadata.
  /// If every host has whole copies of the model (HYBRID_SHARD, NO_SHARD), it gets all files, but not
  /// per_rank.
  bool on_each_host = false;
};

/// Writes the checkpoint `dir` ("run/step-100") and points the link `latest` next to it there.
///
/// Replaces a checkpoint of that name; a directory with other contents is an Error. Without an
/// optimizer it writes only the model. A failure on one rank, such as a full disk, is an Error on
/// every rank and leaves the older checkpoints as they were. Collective over the world. Waits for
/// the device.
void save(const std::filesystem::path& dir, const Sharded& model, const Optimizer* optimizer,
          const SaveOptions& options = {});

/// A save that runs in the background. A shared handle.
class AsyncSave {
 public:
  /// No save: done.
  AsyncSave() = default;

  /// Whether the save has finished or failed.
  bool done() const;
  /// Waits until then. Throws the Error that it failed with.
  void wait() const;
  /// How long the host was blocked: by save_async(), and by updates that waited for the copy.
  std::chrono::nanoseconds blocked() const;
  /// Nothing is saved: the save before was still running (IfBusy), or SaveOptions::may_fail.
  bool skipped() const;
  /// How far it is.
  SaveProgress progress() const;

  struct Job;

 private:
  friend AsyncSave save_async(const std::filesystem::path& dir, const Sharded& model,
                              const Optimizer* optimizer, const SaveOptions& options);
  std::shared_ptr<Job> job_;
};

/// Like save(), but copies and writes in the background.
///
/// The state is that of the call. What fits into the device's free memory is copied there at once.
/// The rest is copied to host memory while the next forward and backward run, and the next change
/// of parameters or states through this library (step(), load(), …) waits for that. Wait for the
/// save before you change tensors from Sharded::shards() yourself.
///
/// Copies in host memory are in a pool (prepare_async()). A state that is larger than the pool
/// flows through it as the file is written, and the next step() waits until the last of it is
/// copied.
///
/// The checkpoint exists, and `latest` names it, when AsyncSave::wait() returns. wait() throws a
/// failure; if it isn't called, the optimizer's next step() or the next save throws; if neither
/// comes, the failure is logged when the model is destroyed, which waits for the save. If a host
/// has no memory for a pool, all ranks save synchronously, and rank 0 logs it. Collective over the
/// world until it returns.
AsyncSave save_async(const std::filesystem::path& dir, const Sharded& model,
                     const Optimizer* optimizer, const SaveOptions& options = {});

/// What prepare_async() found, on this rank.
struct PoolRoom {
  int64_t bytes = 0;  ///< Of a save.
  int64_t pool = 0;   ///< Largest size of the pool. Smaller: updates wait for part of the writing.
};

/// Allocates the pool for save_async() in a thread, so that the first save is as fast as later
/// ones. Call it after the first step(), when the optimizer has its states. `pool`: its largest
/// size in bytes on this rank; 0: half of the host memory that is available (in a container, below
/// its limit), divided by the ranks on the host. Only the first call, before any save_async(), sets
/// it. `only`: SaveOptions::only.
PoolRoom prepare_async(const Sharded& model, const Optimizer* optimizer, int64_t pool = 0,
                       const Chosen& only = {});

/// A parameter that is made of a matrix in the checkpoint, each row of one of the matrix's rows.
struct MadeOfRows {
  int64_t columns = 0;  ///< Of the matrix.

  std::function<at::Tensor(const at::Tensor&)> make;  ///< float32 [n, columns], CPU → its n rows.
};

/// Options of load() and load_state_dict().
struct LoadOptions {
  bool strict = true;     ///< Tensors that only one side has are an Error. False: they are skipped.
  bool optimizer = true;  ///< False: optimizer states aren't loaded.
  bool model = true;      ///< False: the model keeps its values; only states are loaded.
  Chosen only = {};       ///< Parameters to load; others keep their values. Empty: all.

  /// For load(): parameters that are made of the checkpoint's rows, by name (nn/quantised.h). Those
  /// that the checkpoint has in the parameter's own shape are read as they are.
  std::function<std::optional<MadeOfRows>(const std::string& name)> made_of = {};
};

/// What load() read besides the model and the optimizer.
struct Loaded {
  Extra extra;     ///< SaveOptions::extra.
  Extra per_rank;  ///< This rank's SaveOptions::per_rank. Empty if the saved world lacked the rank.

  /// Names that `strict` would have refused, and extra values of Python types that Value lacks.
  std::vector<std::string> skipped;
};

/// Fills the model and the optimizer (unless null) from `dir` or the checkpoint that `dir` links
/// to.
///
/// Each rank reads only the bytes it needs and converts dtypes. Everything is checked before
/// anything is written. Learning rates and weight decays stay the optimizer's own. A model on the
/// meta device that gets all its values needs no materialize(), and one from deferred_init() needs
/// no initialization (ShardOptions::initialize). An Error on one rank is an Error on every rank.
/// Collective over the world. Waits for the device.
Loaded load(const std::filesystem::path& dir, const Sharded& model, Optimizer* optimizer,
            const LoadOptions& options = {});

/// The same for a plain module in one process: parameters and buffers. `per_rank` is rank 0's. A
/// module from deferred_init() gets its memory here and isn't initialized first.
Loaded load(const std::filesystem::path& dir, torch::nn::Module& module,
            const LoadOptions& options = {});

/// Reads SaveOptions::extra without reading any tensor of the model.
Extra read_extra(const std::filesystem::path& dir);

/// @name A folder of checkpoints
/// @{

/// The checkpoint that the link `latest` in `folder` names. If the link is missing or broken, or
/// files of the checkpoint are missing, cut off or mixed up, the newest one that is whole; if all are
/// damaged, the newest. nullopt if there is none. Only load() reads all bytes.
std::optional<std::filesystem::path> latest(const std::filesystem::path& folder);

/// The finished checkpoints in a folder, oldest first by the number at the end of their names
/// ("step-100").
std::vector<std::filesystem::path> list(const std::filesystem::path& folder);

/// Deletes all but the newest `count` checkpoints. It spares the one that `latest` names and any
/// that hold other files, and doesn't count damaged ones, so one that loads always remains. Call it
/// on one rank.
void keep_last(const std::filesystem::path& folder, int64_t count);

/// @}

}  // namespace checkpoint
}  // namespace fsdp
