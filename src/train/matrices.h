// How an optimizer of whole matrices cuts the fused parameters of a config's model.
#pragma once

#include "fsdp/muon.h"
#include "train/config.h"

namespace fsdp::train {

// Queries, keys and values apart, and gates and ups; queries, keys and values of each head if
// optim.muon_per_head.
MatrixParameters matrix_parameters(const Config& config);

}  // namespace fsdp::train
