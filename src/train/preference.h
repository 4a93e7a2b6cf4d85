// Direct preference optimization (DPO): adapters learn to prefer chosen to rejected answers,
// compared with the base without them.
//
// Of a pair with answers c and r, the reward of each is beta · (log p(answer) - log
// p_base(answer)), and the loss is -log sigmoid(reward of c - reward of r).
#pragma once

#include <ATen/core/Tensor.h>

#include "fsdp/models/causal_lm.h"
#include "train/task.h"

namespace fsdp::train {

// What a step's pairs add up to: TrainStepOptions::tally and StepOutcome::tally.
enum PreferenceTally { kPairs, kChosenRewards, kRejectedRewards, kRightOnes, kPreferenceTallies };

// The sum of the losses of the pairs in packed samples: documents 0 and 1 of each sample, 2 and 3,
// and so on, of which `samples.room` is even. Pairs without targets that count in both don't count.
// `tally` (float64 [kPreferenceTallies] on the device, or undefined) is added to.
at::Tensor preference_loss(models::CausalLMImpl& model, const Samples& samples, double beta,
                           const at::Tensor& tally);

}  // namespace fsdp::train
