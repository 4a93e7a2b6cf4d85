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
  // `lr` and `weight_decay` are the defaults of the groups. Throws Error for values out of range.
  States(std::shared_ptr<shard::Model> model, std::vector<ParamGroup> wanted, double lr,
         double weight_decay, std::vector<std::string> names);
  ~States();

  const std::shared_ptr<shard::Model>& model() const { return model_; }
  const std::vector<std::string>& names() const { return names_; }
  std::vector<Optimizer::Group> groups;
  bool own_lr(size_t group) const;  // its ParamGroup has one

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

  // A flat's states by name, each laid out like its master. Empty before the first update.
  std::map<std::string, at::Tensor> state(const shard::Flat& flat) const;
  // Number of updates of each of its parameters. Waits for the device if capturable.
  std::vector<int64_t> steps_of_parameters(const shard::Flat& flat) const;
  int64_t steps(const shard::Flat& flat) const;  // the largest of them
  // Sets the numbers of updates, one per parameter or one for all, and returns the states for the
  // caller to fill. Makes them if there are none.
  std::map<std::string, at::Tensor> restore(const shard::Flat& flat,
                                            const std::vector<int64_t>& steps);
  std::map<std::string, at::Tensor> restore(const shard::Flat& flat, int64_t steps);

  int64_t bytes(bool on_host_only = false) const;  // in memory

 private:
  struct Entry;
  struct Stretch {
    int64_t begin, end;  // in the shard
    size_t group;
    size_t line;  // see Entry
  };
  Entry& entry(const shard::Flat& flat);
  size_t group_of(const shard::Flat& flat, size_t parameter) const;
  void refresh(Entry& entry) const;
  void split_lines(Entry& entry) const;
  std::vector<Stretch> stretches_of(const Entry& entry) const;
  std::vector<int64_t> line_steps(const Entry& entry) const;

  const std::shared_ptr<shard::Model> model_;
  const std::vector<ParamGroup> wanted_;
  const std::vector<std::string> names_;
  std::map<const shard::Flat*, std::unique_ptr<Entry>> entries_;
  at::Tensor rates_;   // [groups, 2] float64, if capturable
  at::Tensor counts_;  // [parameters] float64, if capturable; an entry uses one per line
};

States& states_of(const Optimizer& optimizer);

}  // namespace fsdp::optim
