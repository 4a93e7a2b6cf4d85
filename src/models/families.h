// The families of decoders: what all models of one share, and what transformers calls them.
#pragma once

#include <cstdint>
#include <string_view>

#include "fsdp/models/decoder.h"

namespace fsdp::models {

struct FamilyRow {
  Family family;
  std::string_view type;          // model_type in config.json
  std::string_view architecture;  // in config.json

  // What transformers takes for a key that config.json doesn't have.
  double norm_eps = 1e-6;
  double rope_base = 10000;
  bool tied = false;
  int64_t head_dim = 0;          // 0: dim / heads
  bool all_kv_heads = false;     // as many as heads; false: a number of one published model
  int64_t max_positions = 2048;  // max_position_embeddings
  bool experts = false;          // instead of feed-forwards
};

const FamilyRow& row_of(Family family);
// Null if no family has that model_type.
const FamilyRow* find_family(std::string_view type);

// Throws Error if `config` computes something that models of its family don't: config.json couldn't
// say so.
void check_family(const DecoderConfig& config);

}  // namespace fsdp::models
