// What is said where a model and what is loaded into it do not fit.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "fsdp/error.h"

namespace fsdp::checkpoint {

// Shows the first of the problems. `what` begins the message: "run/step-100", "the state dict".
[[noreturn]] inline void throw_mismatch(const std::string& what,
                                        const std::vector<std::string>& problems) {
  constexpr size_t kShown = 5;
  std::string text = what + " does not fit: ";
  for (size_t i = 0; i < std::min(problems.size(), kShown); ++i)
    text += (i ? "; " : "") + problems[i];
  if (problems.size() > kShown)
    text += "; and " + std::to_string(problems.size() - kShown) + " more";
  throw Error(text + ".",
              "load it into a model of the same configuration, or with .strict = false to skip "
              "what does not fit.");
}

}  // namespace fsdp::checkpoint
