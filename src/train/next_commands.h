// What rank 0 prints at the end of a run: its last checkpoint, and commands to try next.
#pragma once

#include <filesystem>

#include "train/training.h"

namespace fsdp::train {

void say_what_is_next(const Training& training, const std::filesystem::path& checkpoint,
                      bool stopped);

}  // namespace fsdp::train
