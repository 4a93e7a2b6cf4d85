// [activations] and [offload] of a run's config.
#pragma once

#include <cstdint>
#include <string>

#include "base/enum_names.h"

namespace fsdp::base {
class OptionList;
}

namespace fsdp::memory {

enum class ActivationsMode { kNone, kSelective, kFeedForward, kFull, kOffload, kLong };
constexpr auto enum_table(ActivationsMode) {
  return std::to_array<EnumName>(
      {{"none", "keep everything for backward"},
       {"selective", "recompute norms and activations, which the layers of these models always do"},
       {"feed_forward", "also recompute the wide products of feed-forward layers"},
       {"full", "recompute whole blocks"},
       {"offload", "move to host memory"},
       {"long",
        "recompute whole blocks from inputs in host memory, with feed-forward layers in tiles"}});
}

struct ActivationsConfig {
  ActivationsMode mode = ActivationsMode::kNone;
  int64_t every = 1;      // applies to every n-th block
  int64_t keep_last = 0;  // except the last n
  int64_t tile = 0;       // tokens; 0: none
};

// Whether activations move to host memory.
inline bool offloads(ActivationsMode mode) {
  return mode == ActivationsMode::kOffload || mode == ActivationsMode::kLong;
}
// Tokens of feed-forward layers to compute at a time. 0: all.
int64_t tile_of(const ActivationsConfig& activations);

struct OffloadConfig {  // see fsdp::Offload
  bool optimizer = false;
  bool parameters = false;
  bool gradients = false;
  double fraction = 1;
  std::string directory;
  bool step_in_backward = false;

  bool any() const { return optimizer || parameters || gradients; }
};

void describe(ActivationsConfig& activations, OptionList& list);
void describe(OffloadConfig& offload, OptionList& list);
void check(const ActivationsConfig& activations, int64_t layers);
void check(const OffloadConfig& offload);

}  // namespace fsdp::memory
