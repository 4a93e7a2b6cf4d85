/// @file
/// Optimizers that update whole matrices of a sharded model, and Muon, one of them.
///
///     fsdp::Muon optimizer(sharded, {.lr = 3e-4, .weight_decay = 0.1,
///                                    .adamw = {.groups = {fsdp::no_decay()}}});
///
/// Use it like any Optimizer. States stay sharded. Each matrix is updated by one rank of those that
/// share its unit: pieces of it go there by an all-to-all, in the dtype of the parameters, and
/// pieces of the update come back the same way. A matrix that one rank has completely costs no
/// bytes. Replicas (HYBRID_SHARD, NO_SHARD) share the work and send each other the updates.
#pragma once

#include "fsdp/optim.h"

namespace fsdp {

namespace optim {
struct MatrixWork;
struct MatrixKinds;
}  // namespace optim

/// How a parameter is cut into matrices that are updated apart.
struct MatrixSplit {
  int64_t dim = 0;                  ///< The dimension to cut: 0 or 1.
  std::vector<int64_t> sizes = {};  ///< Sizes of the parts along it. Empty: not cut.
};

/// Which parameters are matrices, and the groups of all parameters.
///
/// Matrices are the parameters of two dimensions, except those of embeddings and norms; the weights
/// of convolutions, as [out, the rest]; and other parameters of three dimensions, as one matrix for
/// each index of the first (an expert).
struct MatrixParameters {
  /// Further parameters that aren't matrices. Default: those of modules named "lm_head", "head" or
  /// "output".
  std::function<bool(const std::string& name, const at::Tensor& parameter)> others = {};
  /// Cuts a parameter (or each expert): fused projections, heads. Default: none is cut.
  std::function<MatrixSplit(const std::string& name, const at::Tensor& parameter)> split = {};
  /// Groups of matrices. `norms` chooses none.
  std::vector<ParamGroup> groups = {};
};

/// The base of optimizers that need whole matrices. Parameters that aren't matrices are updated
/// elementwise.
///
/// groups() lists the groups of matrices first (group 0 has those that no other has), then those of
/// the other parameters, of which the last has what no other has.
class MatrixOptimizer : public Optimizer {
 public:
  ~MatrixOptimizer() override;
  /// Throws Error if units are updated in host memory: a matrix needs the gradients of all ranks.
  void step_in_backward() override;
  /// Whether a group has matrices.
  bool has_matrices(size_t group) const;

 protected:
  /// What a MatrixOptimizer is made of.
  struct Setup {
    MatrixParameters matrices = {};               ///< Which parameters are matrices.
    double lr = 1e-3;                             ///< Of all groups without one.
    double weight_decay = 0;                      ///< Of groups of matrices without one.
    std::vector<std::string> matrix_states = {};  ///< States of matrices.
    ParamGroup others = {};                       ///< Settings of the others; chooses nothing.
    std::vector<ParamGroup> other_groups = {};    ///< Groups of the others.
    std::vector<std::string> other_states = {};   ///< States of the others.
  };
  /// Make it after the last fully_shard().
  MatrixOptimizer(const Sharded& sharded, const Setup& setup);

  /// Returns the work that updates the states of matrices and writes into directions[i], of the
  /// length of what.pieces[i], what their owners shall get. It may run in another thread.
  virtual std::function<void()> prepare_directions(
      const Update& what, const std::vector<at::Tensor>& directions) const = 0;
  /// On their owner: the updates of whole matrices [n, rows, cols], of the same sizes and dtype.
  /// The parameters lose the rate times the update, and the rate times their decay.
  virtual at::Tensor updates_of(const at::Tensor& directions) const = 0;

 private:
  MatrixOptimizer(const Sharded& sharded, std::shared_ptr<optim::MatrixKinds> kinds,
                  const Setup& setup);
  void update_flats(shard::Engine& model, const std::vector<shard::Flat*>& flats,
                    const at::Tensor& factor) override;
  void update_host_flats(shard::Engine& model,
                         const std::vector<std::pair<shard::Flat*, size_t>>& flats,
                         const shard::HostFactor& factor) override;

  friend struct optim::MatrixWork;
  std::shared_ptr<optim::MatrixKinds> kinds_;
  std::unique_ptr<optim::MatrixWork> work_;
};

/// The polynomials that bring singular values to 1.
enum class NewtonSchulz {
  QUINTIC,        ///< One polynomial for all steps, as in torch.optim.Muon: values near 1.
  POLAR_EXPRESS,  ///< The best one for each step (arXiv 2505.16932): values nearer to 1.
};

/// How Muon updates parameters that aren't matrices: AdamW.
struct MuonAdamW {
  std::optional<double> lr = {};                  ///< Default: Muon's.
  std::pair<double, double> betas = {0.9, 0.95};  ///< Decay rates of the two averages.
  double eps = 1e-8;                              ///< Added to the denominator.
  std::optional<double> weight_decay = {};        ///< Default: Muon's.
  std::vector<ParamGroup> groups = {};            ///< Parameters with other settings.
};

/// Options of Muon.
struct MuonOptions {
  double lr = 1e-3;                                    ///< Learning rate.
  double momentum = 0.95;                              ///< Decay rate of the average gradient.
  bool nesterov = true;                                ///< Nesterov momentum.
  double weight_decay = 0.1;                           ///< Decoupled from the gradient.
  NewtonSchulz newton_schulz = NewtonSchulz::QUINTIC;  ///< The polynomials.
  int steps = 5;                                       ///< How many of them.
  double eps = 1e-7;                                   ///< Least norm that a matrix is divided by.
  bool maximize = false;                               ///< Climb instead of descend.
  MatrixParameters matrices = {};                      ///< Which parameters are matrices.
  MuonAdamW adamw = {};                                ///< How the others are updated.
};

/// Muon: the momentum of each matrix, orthogonalized, times 0.2 √(max(rows, cols)), which gives
/// updates the size of AdamW's, so that its rates and decay can be kept. States: "momentum_buffer";
/// of other parameters "exp_avg", "exp_avg_sq".
class Muon : public MatrixOptimizer {
 public:
  /// Make it after the last fully_shard().
  explicit Muon(const Sharded& sharded, MuonOptions options = {});
  /// As given to the constructor.
  const MuonOptions& options() const { return options_; }

 private:
  std::function<void()> prepare(const Update& what) const override;
  std::function<void()> prepare_directions(
      const Update& what, const std::vector<at::Tensor>& directions) const override;
  at::Tensor updates_of(const at::Tensor& directions) const override;

  MuonOptions options_;
};

}  // namespace fsdp
