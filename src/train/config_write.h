// A Config as TOML that parses back to the same values, and the tables of docs/config.md.
#pragma once

#include <string>

#include "train/config.h"

namespace fsdp::train {

// Every key with its help as a comment. Doubles keep all their bits.
std::string to_toml(const Config& config);

// docs/config.md from its first table on: one table per section.
std::string describe_options_markdown();

}  // namespace fsdp::train
