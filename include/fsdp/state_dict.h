// State dicts: the values of a sharded model and its optimizer in memory, by the names that they
// have in a checkpoint's files ("model.<parameter>", "optim.state.<parameter>.exp_avg", …).
//
//   namespace checkpoint = fsdp::checkpoint;
//   auto whole = checkpoint::state_dict(sharded, &optimizer);
//   auto mine = checkpoint::state_dict(sharded, &optimizer,
//                                      {.type = fsdp::StateDictType::SHARDED_STATE_DICT});
//   checkpoint::load_state_dict(whole, other, &other_optimizer);
//
// A full one has every tensor whole and fits any strategy, wrap policy and number of ranks. A
// sharded one has this rank's parts, and fits a model that is sharded in the same way.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "fsdp/checkpoint.h"
#include "fsdp/shard_info.h"

namespace fsdp {

enum class StateDictType {
  FULL_STATE_DICT,     // whole tensors
  SHARDED_STATE_DICT,  // this rank's parts of them
};

namespace checkpoint {

struct StateShard {
  Rectangle rectangle;  // of the tensor
  at::Tensor values;    // of the rectangle's sizes
};

struct StateTensor {
  std::vector<int64_t> sizes;  // of the whole tensor
  at::ScalarType dtype = at::kFloat;
  std::vector<StateShard> shards;  // full: one that is everything; sharded: none where this rank
                                   // has nothing of it, several when it is cut inside of rows
};

// "model.<name>" of every parameter (the master, under each name of a tied one the same memory) and
// buffer; with an optimizer "optim.state.<name>.<state>" and "optim.state.<name>.step" of every
// parameter that has been updated. Learning rates and the like are not in it: loading leaves them
// as the optimizer has them.
using State = std::map<std::string, StateTensor>;

struct StateDictOptions {
  StateDictType type = StateDictType::FULL_STATE_DICT;
  bool rank0_only = false;     // full: the other ranks get an empty one
  bool offload_to_cpu = true;  // values lie in CPU memory
  // false, sharded only: values are the model's own memory where that lies on the wanted device, so
  // they change with it and must not be written. Otherwise nothing is shared with the model.
  bool copy = true;
};

// A full one is collective: shards are gathered one flat buffer (the parameters of a unit that
// share a dtype) at a time, and what a rank does not keep is given up before the next. A sharded
// one sends nothing. Buffers are each rank's own, whole.
State state_dict(const Sharded& model, const Optimizer* optimizer = nullptr,
                 const StateDictOptions& options = {});

// Fills the model and the optimizer (unless that is null). Every rank must have what it needs: the
// same full state dict, or its own sharded one. Everything is checked before anything is written;
// dtypes are converted. Returns the names that did not fit, which with options.strict are an Error.
// Collective; an Error on one rank is one on every rank.
//
// A model on the meta device that gets all of its values needs no materialize().
std::vector<std::string> load_state_dict(const State& state, const Sharded& model,
                                         Optimizer* optimizer = nullptr,
                                         const LoadOptions& options = {});

}  // namespace checkpoint
}  // namespace fsdp
