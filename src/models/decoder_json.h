// A decoder's description in config.json, as transformers 4 and 5 write it and both read it.
#pragma once

#include "models/families.h"
#include "models/fields.h"

namespace fsdp::models {

// Bounds that no model reaches; within them, parameter counts fit in 64 bits.
constexpr int64_t kWidest = 1'000'000, kMostTokens = 100'000'000, kMostLayers = 100'000;

// Throws Error for a setting that the decoder doesn't have.
DecoderConfig read_decoder(const Fields& fields, const FamilyRow& row);

// Without the ids of tokens. `max_positions` is the longest sequence; 0: transformers' default.
Json decoder_json(const DecoderConfig& config, int64_t max_positions);

}  // namespace fsdp::models
