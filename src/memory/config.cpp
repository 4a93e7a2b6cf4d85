#include "memory/config.h"

#include <utility>

#include "base/format.h"
#include "base/options.h"
#include "fsdp/error.h"

namespace fsdp::memory {
namespace {

// Large enough that products run at full speed; a tile of Llama 8B's feed-forward is 0.7 GB.
constexpr int64_t kLongTile = 8192;

}  // namespace

void describe(ActivationsConfig& activations, OptionList& list) {
  using enum ActivationsMode;
  const OnlyWith some(activations.mode, {kSelective, kFeedForward, kFull, kOffload, kLong});
  list.section("activations", "Activation recomputation and offload");
  list.add("mode", activations.mode, "");
  list.add("every", activations.every, "Apply to every n-th block",
           {.least = 1, .only_with = some});
  list.add("keep_last", activations.keep_last,
           "The last n blocks aren't recomputed: backward reaches them while memory is still free",
           {.least = 0, .only_with = some});
  list.add(
      "tile", activations.tile,
      "Tokens of feed-forward layers to compute at a time and recompute in backward; 0: all at "
      "once, with mode long 8192",
      {.least = 0});
}

int64_t tile_of(const ActivationsConfig& activations) {
  const bool implied = activations.mode == ActivationsMode::kLong && activations.tile == 0;
  return implied ? kLongTile : activations.tile;
}

void describe(OffloadConfig& offload, OptionList& list) {
  list.section("offload", "What is kept in host memory instead of device memory");
  list.add("optimizer", offload.optimizer,
           "Keep masters, optimizer states and gradients in host memory and update on the CPU");
  list.add("parameters", offload.parameters,
           "Keep parameter shards in host memory; they move to the device when they are gathered");
  list.add("gradients", offload.gradients,
           "Move gradients to host memory during backward; implied by optimizer");
  list.add("fraction", offload.fraction,
           "Share of the model to offload, in whole units, the last ones first",
           {.least = 0, .most = 1});
  list.add("directory", offload.directory,
           "Keep masters and optimizer states in a file in this directory; empty: in host memory");
  list.add("step_in_backward", offload.step_in_backward,
           "Update each unit as soon as its gradients arrive; a non-finite step then ends the run");
}

void check(const ActivationsConfig& activations, int64_t layers) {
  if (activations.every > layers)
    throw Error(formatted("activations.every is {}, but there are only {} layers (model.layers).",
                          activations.every, layers),
                formatted("set it to at most {}.", layers));
  if (activations.mode != ActivationsMode::kNone && activations.keep_last >= layers)
    throw Error(formatted("activations.keep_last is {}, but there are only {} layers "
                          "(model.layers).",
                          activations.keep_last, layers),
                "set it to less than that, or activations.mode to none.");
  if (activations.mode == ActivationsMode::kFeedForward && activations.tile > 0)
    throw Error(
        "activations.mode is feed_forward, but tiles (activations.tile) recompute "
        "feed-forward layers already.",
        "set activations.mode to none, or activations.tile to 0.");
}

void check(const OffloadConfig& offload) {
  if (offload.fraction != 1 && !offload.any())
    throw Error("offload.fraction is set, but nothing is offloaded.",
                "add --offload.optimizer, --offload.parameters or --offload.gradients.");
  for (auto [on, key] : {std::pair(!offload.directory.empty(), "offload.directory"),
                         std::pair(offload.step_in_backward, "offload.step_in_backward")})
    if (on && !offload.optimizer)
      throw Error(std::string(key) + " is set, but offload.optimizer is not.",
                  "add --offload.optimizer: this option is for updates on the CPU.");
}

}  // namespace fsdp::memory
