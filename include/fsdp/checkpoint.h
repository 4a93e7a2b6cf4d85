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

#include <cstdint>
#include <filesystem>
#include <map>
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

struct SaveOptions {
  Extra extra = {};     // the same on every rank; rank 0's is written, as "extra.<key>"
  Extra per_rank = {};  // each rank's own (random state, …), as "extra.rank<k>.<key>"
};

// Writes `dir`, whose last part is the checkpoint's name ("step-100"), and lets the link `latest`
// beside it point there. A checkpoint of that name is replaced; a directory that holds anything
// else is an Error. Collective over the world of the model; a failure on one rank (a full disk,
// say) is an Error on every rank, and then the older checkpoints are as they were. Without an
// optimizer only the model is written.
void save(const std::filesystem::path& dir, const Sharded& model, const Optimizer* optimizer,
          const SaveOptions& options = {});

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
// A model on the meta device that gets all of its values needs no materialize().
// Learning rates and weight decays stay the optimizer's own.
Loaded load(const std::filesystem::path& dir, const Sharded& model, Optimizer* optimizer,
            const LoadOptions& options = {});

// The same for a plain module, in one process: parameters and buffers. `per_rank` is rank 0's.
Loaded load(const std::filesystem::path& dir, torch::nn::Module& module,
            const LoadOptions& options = {});

// What SaveOptions::extra held, without reading any tensor of the model.
Extra read_extra(const std::filesystem::path& dir);

// --- a folder of checkpoints ---

// The checkpoint that the link `folder`/latest names; where that is missing or broken, the newest
// complete one; none if there is none.
std::optional<std::filesystem::path> latest(const std::filesystem::path& folder);

// The complete checkpoints of a folder by the number their names end in ("step-100"), oldest first.
std::vector<std::filesystem::path> list(const std::filesystem::path& folder);

// Deletes all but the newest `count` of them, but never the one that `latest` names, nor one that
// holds other files as well. For one rank.
void keep_last(const std::filesystem::path& folder, int64_t count);

}  // namespace checkpoint
}  // namespace fsdp
