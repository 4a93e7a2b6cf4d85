/// @file
/// State dicts: the values of a sharded model and its optimizer in memory, under the names that
/// they have in a checkpoint.
///
///     namespace checkpoint = fsdp::checkpoint;
///     auto whole = checkpoint::state_dict(sharded, &optimizer);
///     auto mine = checkpoint::state_dict(sharded, &optimizer,
///                                        {.type = fsdp::StateDictType::SHARDED_STATE_DICT});
///     checkpoint::load_state_dict(whole, other, &other_optimizer);
///
/// A full state dict holds whole tensors and fits any strategy, wrap policy and number of ranks. A
/// sharded one holds this rank's parts and fits a model that is sharded in the same way.
#pragma once

#include <string>
#include <vector>

#include "fsdp/checkpoint.h"
#include "fsdp/shard_info.h"

namespace fsdp {

/// Whether a state dict holds whole tensors.
enum class StateDictType {
  FULL_STATE_DICT,     ///< Whole tensors.
  SHARDED_STATE_DICT,  ///< This rank's parts of them.
};

namespace checkpoint {

/// Options of state_dict().
struct StateDictOptions {
  StateDictType type = StateDictType::FULL_STATE_DICT;  ///< Whole tensors or this rank's parts.
  bool rank0_only = false;                              ///< Full: other ranks get an empty one.
  bool offload_to_cpu = true;                           ///< Values in CPU memory.

  /// False (sharded only): values on the wanted device are the model's own memory. They change with
  /// it and must not be written. True, and always for full ones: values are copies.
  bool copy = true;
};

/// The values of the model and, unless null, the optimizer.
///
/// Names: `model.<name>` for every parameter (its master; a tied one's names share memory) and
/// buffer. With an optimizer also `optim.state.<name>.<state>` and `optim.state.<name>.step` for
/// every parameter that has been updated. Learning rates and other settings aren't in it, and
/// loading leaves them alone.
///
/// A full one gathers one flat buffer (a unit's parameters of one dtype) at a time. Buffers are
/// each rank's own. Collective for a full one. Waits for the device with offload_to_cpu.
StateDict state_dict(const Sharded& model, const Optimizer* optimizer = nullptr,
                     const StateDictOptions& options = {});

/// Fills the model and the optimizer (unless null), and returns the names that didn't fit.
///
/// Every rank passes what it needs: the same full state dict, or its own sharded one. Everything is
/// checked before anything is written; dtypes are converted. With options.strict, names that don't
/// fit are an Error. A model on the meta device that gets all its values needs no materialize(). An
/// Error on one rank is an Error on every rank. Collective. Waits for the device.
std::vector<std::string> load_state_dict(const StateDict& state, const Sharded& model,
                                         Optimizer* optimizer = nullptr,
                                         const LoadOptions& options = {});

}  // namespace checkpoint
}  // namespace fsdp
