#include "optim/config.h"

#include "base/format.h"
#include "base/options.h"
#include "fsdp/error.h"

namespace fsdp::optim {

void describe(OptimConfig& optim, OptionList& list) {
  using enum ScheduleType;
  constexpr double kMostSteps = 1e15;
  const OnlyWith adamw(optim.type, {OptimizerType::kAdamW, OptimizerType::kMuon});
  const OnlyWith muon(optim.type, {OptimizerType::kMuon}), wsd(optim.schedule, {kWsd});
  list.section("optim", "Optimizer and learning rate");
  list.add("type", optim.type, "Optimizer");
  list.add("lr", optim.lr, "Learning rate after warm-up", {.least = 0});
  list.add("beta1", optim.beta1, "adamw, muon: decay rate of the first moment",
           {.least = 0, .most = 0.999999, .only_with = adamw});
  list.add("beta2", optim.beta2, "adamw, muon: decay rate of the second moment",
           {.least = 0, .most = 0.999999999, .only_with = adamw});
  list.add("eps", optim.eps, "adamw, muon: epsilon in the denominator",
           {.least = 0, .only_with = adamw});
  list.add("weight_decay", optim.weight_decay,
           "Weight decay of matrices; none for norms and biases", {.least = 0});
  list.add("momentum", optim.momentum, "sgd: momentum",
           {.least = 0, .most = 0.999999, .only_with = {optim.type, {OptimizerType::kSgd}}});
  list.add("muon_momentum", optim.muon_momentum, "muon: decay rate of the average gradient",
           {.least = 0, .most = 0.999999, .only_with = muon});
  list.add("muon_steps", optim.muon_steps, "muon: steps of Newton-Schulz",
           {.least = 1, .most = 100, .only_with = muon});
  list.add("muon_polynomials", optim.muon_polynomials, "muon: polynomials of these steps",
           {.only_with = muon});
  list.add("muon_per_head", optim.muon_per_head,
           "muon: orthogonalize queries, keys and values of each head apart", {.only_with = muon});
  list.add("muon_rest_lr", optim.muon_rest_lr,
           "muon: learning rate of embeddings, head, norms and biases; 0: lr",
           {.least = 0, .only_with = muon});
  list.add("schedule", optim.schedule, "Learning rate schedule after warm-up");
  list.add("warmup_steps", optim.warmup_steps, "Steps of linear warm-up",
           {.least = 0, .most = kMostSteps});
  list.add("warmup_share", optim.warmup_share,
           "Share of the run's steps for warm-up, instead of warmup_steps",
           {.least = 0, .most = 1});
  list.add("decay_steps", optim.decay_steps, "wsd: steps of decay at the end",
           {.least = 0, .most = kMostSteps, .only_with = wsd});
  list.add("final_ratio", optim.final_ratio, "Final learning rate as a share of lr",
           {.least = 0, .most = 1, .only_with = {optim.schedule, {kLinear, kCosine, kWsd}}});
  list.add("grad_scaler", optim.grad_scaler,
           "fp16: scale the loss so that small gradients don't become zero");
}

void check(const OptimConfig& optim, std::optional<int64_t> steps) {
  const bool wsd = optim.schedule == ScheduleType::kWsd;
  if (wsd && optim.decay_steps == 0)
    throw Error("optim.schedule = wsd needs the length of its decay.",
                "set optim.decay_steps; a tenth to a fifth of all steps is typical.");
  if (optim.warmup_steps > 0 && optim.warmup_share > 0)
    throw Error("optim.warmup_steps and optim.warmup_share are both set.", "set one of them to 0.");
  if (!steps) return;
  const std::string all = formatted("is more than the run's {} steps.", *steps);
  if (optim.warmup_steps > *steps)
    throw Error(formatted("optim.warmup_steps = {} {}", optim.warmup_steps, all),
                formatted("lower it: --optim.warmup_steps {}.", *steps / 10));
  if (wsd && optim.warmup_steps > *steps - optim.decay_steps)
    throw Error("optim.warmup_steps plus optim.decay_steps " + all, "lower one of them.");
}

}  // namespace fsdp::optim
