// [optim] of a run's config.
#pragma once

#include <cstdint>
#include <optional>

#include "base/enum_names.h"

namespace fsdp::base {
class OptionList;
}

namespace fsdp::optim {

enum class OptimizerType { kAdamW, kSgd, kMuon };
constexpr auto enum_table(OptimizerType) {
  return std::to_array<EnumName>(
      {{"adamw"}, {"sgd"}, {"muon", "for matrices, and adamw for the rest"}});
}

enum class Polynomials { kQuintic, kPolarExpress };  // as NewtonSchulz
constexpr auto enum_table(Polynomials) {
  return std::to_array<EnumName>({{"quintic"}, {"polar_express"}});
}

enum class ScheduleType { kConstant, kLinear, kCosine, kWsd };
constexpr auto enum_table(ScheduleType) {
  return std::to_array<EnumName>({{"constant"},
                                  {"linear"},
                                  {"cosine"},
                                  {"wsd", "constant, then decays over the last decay_steps"}});
}

struct OptimConfig {
  OptimizerType type = OptimizerType::kAdamW;
  double lr = 3e-4;
  double beta1 = 0.9, beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  // of matrices; none for norms and biases
  double momentum = 0.9;      // sgd
  double muon_momentum = 0.95;
  int64_t muon_steps = 5;
  Polynomials muon_polynomials = Polynomials::kQuintic;
  bool muon_per_head = false;
  double muon_rest_lr = 0;  // of what isn't a matrix; 0: lr
  ScheduleType schedule = ScheduleType::kCosine;
  int64_t warmup_steps = 0;
  double warmup_share = 0;  // of the run's steps, if warmup_steps is 0
  int64_t decay_steps = 0;  // wsd
  double final_ratio = 0.1;
  bool grad_scaler = true;  // fp16: scales the loss against underflow of gradients
};

void describe(OptimConfig& optim, OptionList& list);
void check(const OptimConfig& optim, std::optional<int64_t> steps);  // of the run; nullopt: unknown

}  // namespace fsdp::optim
