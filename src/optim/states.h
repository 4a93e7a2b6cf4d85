// States: what an optimizer keeps: which range of which flat belongs to which group, the states of
// each, and how often each was updated. Checkpoints read and restore it.
//
// Methods take the model's lock (shard/model.h), which guards this, too: memory() reads it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/optim.h"

namespace fsdp::shard {
class Model;
}

namespace fsdp::optim {

class States {
 public:
  // Names of the states of each group's parameters; one list stands for all groups.
  using Names = std::vector<std::vector<std::string>>;

  // `lr` and `weight_decay` are the defaults of the groups. Throws Error for values out of range.
  States(std::shared_ptr<shard::Model> model, std::vector<ParamGroup> wanted, double lr,
         double weight_decay, Names names);
  ~States();

  const std::shared_ptr<shard::Model>& model() const { return model_; }
  std::vector<Optimizer::Group> groups;
  bool own_lr(size_t group) const;  // its ParamGroup has one
  size_t group_of(const shard::Flat& flat, size_t parameter) const;

  // Rates and counts on the device.
  bool capturable() const { return rates_.defined(); }
  void set_capturable(bool on);
  void write_rate(size_t group, int64_t which, double value);  // 0: lr, 1: weight decay

  // --- updates ---

  // An update of nothing yet.
  Optimizer::Update update(const at::Tensor& factor) const {
    return {.factor = factor, .rates = rates_, .counts = counts_};
  }
  // Adds the flat's pieces, which counts as an update of them.
  void add(const shard::Flat& flat, Optimizer::Update& to);
  void prepare(const shard::Flat& flat);        // allocates what add() needs
  void forget_pieces(const shard::Flat& flat);  // they would keep the flat's memory

  // --- checkpoints ---

  // The names of a parameter's states. State i is in slot i of the flat. A slot holds state i of
  // all the flat's parameters, whose names for it may differ, and has no memory for those without
  // one.
  const std::vector<std::string>& names(const shard::Flat& flat, size_t parameter) const;
  // The slots of a flat; empty before the first update.
  std::vector<at::Tensor> slots(const shard::Flat& flat) const;
  // The same, but states on disk stay there. For dtypes, sizes and devices only.
  std::vector<at::Tensor> slots_unread(const shard::Flat& flat) const;
  // A slot laid out like the flat's master, zero where it has no memory; a copy if it has gaps.
  at::Tensor spread(const shard::Flat& flat, size_t slot) const;
  // This rank's part of a parameter in a slot, or in a tensor like it.
  at::Tensor part(const shard::Flat& flat, size_t parameter, size_t slot,
                  const at::Tensor& memory) const;
  // Number of updates of each of its parameters. Waits for the device if capturable.
  std::vector<int64_t> steps_of_parameters(const shard::Flat& flat) const;
  int64_t steps(const shard::Flat& flat) const;  // the largest of them
  // Sets the numbers of updates, one per parameter or one for all, and returns the slots for the
  // caller to fill. Makes them if there are none.
  std::vector<at::Tensor> restore(const shard::Flat& flat, const std::vector<int64_t>& steps);
  std::vector<at::Tensor> restore(const shard::Flat& flat, int64_t steps);

  int64_t bytes(bool on_host_only = false) const;  // in memory

 private:
  struct Entry;
  struct Stretch {
    int64_t begin, end;  // in the shard
    size_t group;
    size_t line;  // see Entry
  };
  struct Run {           // a stretch of the shard that a slot has memory for
    int64_t begin, end;  // in the shard
    int64_t at;          // in the slot
  };
  Entry& entry(const shard::Flat& flat);
  void make_slots(Entry& entry) const;
  std::vector<Run> runs_of(const shard::Flat& flat, size_t slot) const;
  void refresh(Entry& entry) const;
  void split_lines(Entry& entry) const;
  std::vector<Stretch> stretches_of(const Entry& entry) const;
  std::vector<int64_t> line_steps(const Entry& entry) const;

  const std::shared_ptr<shard::Model> model_;
  const std::vector<ParamGroup> wanted_;
  const Names names_;
  std::map<const shard::Flat*, std::unique_ptr<Entry>> entries_;
  at::Tensor rates_;   // [groups, 2] float64, if capturable
  at::Tensor counts_;  // [parameters] float64, if capturable; an entry uses one per line
};

States& states_of(const Optimizer& optimizer);

}  // namespace fsdp::optim
