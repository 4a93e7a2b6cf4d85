// The error for a model that doesn't match what is loaded into it.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {

// Shows the first few problems. `what` starts the message: "run/step-100", "the state dict".
[[noreturn]] inline void throw_mismatch(const std::string& what,
                                        const std::vector<std::string>& problems) {
  constexpr size_t kShown = 5;
  std::string shown;
  for (size_t i = 0; i < std::min(problems.size(), kShown); ++i)
    shown += (i ? "; " : "") + problems[i];
  if (problems.size() > kShown) shown += formatted("; and {} more", problems.size() - kShown);
  throw Error(formatted("{} doesn't match the model: {}.", what, shown),
              "load it into a model of the same configuration, or use .strict = false to skip "
              "mismatches.");
}

}  // namespace fsdp::checkpoint
