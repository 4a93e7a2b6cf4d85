// Optimizers over a sharded model: each rank updates its own part of every parameter, in one pass
// over memory.
//
//   fsdp::AdamW optimizer(sharded, {.lr = 3e-4, .betas = {0.9, 0.95}, .weight_decay = 0.1,
//                                   .groups = {fsdp::no_decay()}});
//   loss.backward();
//   sharded.clip_grad_norm_(1.0);   // its factor is applied by step(), not in a pass of its own
//   optimizer.step();
//   optimizer.zero_grad();
//
// Results equal those of torch::optim on the whole model, to within rounding. What differs: the
// parameters of a unit that share a dtype have one gradient buffer, so a parameter that took no
// part in a backward of its unit counts as having a gradient of zero, not none. A unit that took no
// part at all is left alone, and so are frozen parameters (requires_grad false).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp {

class Sharded;
namespace shard {
class Flat;
class Model;
struct HostFactor;
}  // namespace shard

// Parameters that are updated with other numbers than the rest.
struct ParamGroup {
  using Where = std::function<bool(const std::string& name, const at::Tensor& parameter)>;

  Where where = {};    // by name, sizes or dtype; values must not be read (they are sharded)
  bool norms = false;  // parameters of normalisation layers too
  std::optional<double> lr = {};            // default: the optimizer's
  std::optional<double> weight_decay = {};  // likewise
};

// Norms, biases and everything else of at most one dimension, without weight decay.
ParamGroup no_decay();

class Optimizer {
 public:
  // A group as it is used. Group 0 holds what no ParamGroup chose; 1 is the first of these.
  struct Group {
    double lr;
    double weight_decay;
    std::vector<std::string> parameters;  // the module's own names
  };

  virtual ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Updates what has a gradient. Gives up gathered units; collective where ranks share memory.
  void step();
  // Said before the last backward of a step: units that are updated in host memory
  // (ShardOptions::offload) are so as soon as their gradients have come, while backward goes on,
  // and step() does what is left. For steps that neither clip nor scale nor look at gradients. A
  // backward that fails leaves units updated; a learning rate for this step is set before. Without
  // such units nothing changes.
  void step_in_backward();
  void zero_grad(bool set_to_none = true);

  // A parameter belongs to the first ParamGroup that wants it.
  const std::vector<Group>& groups() const { return groups_; }
  double lr(size_t group = 0) const;
  // Of every group that has no learning rate of its own. May be called at any time.
  void set_lr(double lr);
  void set_lr(double lr, size_t group);
  void set_weight_decay(double weight_decay, size_t group);

  // Capturable: learning rates, weight decays and the numbers of updates live on the device, and
  // step() launches nothing that depends on the host's. A CUDA graph of step() then follows
  // set_lr(), which writes the device's value in stream order. Results are the same. Not to be
  // changed during a capture; switching it off waits for the device.
  //
  // A step whose factor from clip_grad_norm_ is not finite (that of a norm which is not) writes
  // nothing. It is not counted either, except on a GPU where the optimizer is not capturable: the
  // host does not know there.
  void set_capturable(bool on);
  bool capturable() const { return rates_.defined(); }

  // --- for checkpoints ---
  // The model that is updated.
  const std::shared_ptr<shard::Model>& model() const { return model_; }
  // Names of the states, torch's own ("exp_avg").
  const std::vector<std::string>& state_names() const { return state_names_; }
  // A flat's states by name: tensors like its master, so what Layout says of a shard holds for
  // them. Empty before the flat's first update.
  std::map<std::string, at::Tensor> state(const shard::Flat& flat) const;
  int64_t steps(const shard::Flat& flat) const;  // updates it has had; capturable: waits
  // Sets the number of updates and returns the states to be filled, made if there are none.
  std::map<std::string, at::Tensor> restore(const shard::Flat& flat, int64_t steps);
  int64_t state_bytes() const;

 protected:
  // A stretch of a flat whose parameters are of one group. All but the gradient are views of it.
  struct Piece {
    at::Tensor master;               // undefined where `rest` is not
    at::Tensor low;                  // the shard that is gathered; undefined if that is the master
    at::Tensor rest;                 // of a master in two halves (kernels/split.h): `low` is one
    std::vector<at::Tensor> states;  // in the order of state_names
    at::Tensor grad;                 // of the whole flat: a view would keep its memory
    int64_t begin;                   // of the stretch in the flat
    size_t group;
    int64_t flat;  // place in `counts`
    int64_t step;  // number of this update, from 1; not where capturable
  };

  struct Update {
    std::vector<Piece> pieces;
    at::Tensor factor;  // see kernels/update.h
    // Where capturable, else undefined: kernels::DeviceNumbers.
    at::Tensor rates, counts;
  };

  Optimizer(const Sharded& sharded, std::vector<ParamGroup> groups, double lr, double weight_decay,
            std::vector<std::string> state_names);

  virtual void update(const Update& what) = 0;

 private:
  struct Entry;
  struct Stretch {
    int64_t begin, end;  // in the shard
    size_t group;
  };
  Entry& entry(const shard::Flat& flat);
  void add(const shard::Flat& flat, Update& to);
  void update_on_device(const at::Tensor& factor);
  void update_on_host(shard::Flat& flat, size_t place, const shard::HostFactor& factor);
  size_t group_of(const shard::Flat& flat, size_t parameter) const;
  void refresh(Entry& entry) const;
  std::vector<Stretch> stretches_of(const shard::Flat& flat,
                                    const std::vector<bool>& trained) const;
  void write_rate(size_t group, int64_t which, double value);

  std::shared_ptr<shard::Model> model_;
  std::vector<ParamGroup> wanted_;
  std::vector<std::string> state_names_;
  std::vector<Group> groups_;
  std::map<const shard::Flat*, std::unique_ptr<Entry>> entries_;
  at::Tensor rates_;   // [groups, 2] float64, where capturable
  at::Tensor counts_;  // [flats] float64, where capturable
};

struct AdamWOptions {
  double lr = 1e-3;
  std::pair<double, double> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;  // decoupled
  bool maximize = false;
  std::vector<ParamGroup> groups = {};
};

// Adam with decoupled weight decay. States: "exp_avg", "exp_avg_sq".
class AdamW : public Optimizer {
 public:
  explicit AdamW(const Sharded& sharded, AdamWOptions options = {});
  const AdamWOptions& options() const { return options_; }

 private:
  void update(const Update& what) override;

  AdamWOptions options_;
};

struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  bool maximize = false;
  std::vector<ParamGroup> groups = {};
};

// Stochastic gradient descent. State: "momentum_buffer", if there is momentum.
class SGD : public Optimizer {
 public:
  explicit SGD(const Sharded& sharded, SGDOptions options = {});
  const SGDOptions& options() const { return options_; }

 private:
  void update(const Update& what) override;

  SGDOptions options_;
};

}  // namespace fsdp
