// Checks of a whole config: sections that contradict each other or the number of ranks. Each
// violation is an Error that names the options and says what to do. What concerns one section is
// checked beside it (models/config.h and so on).
#pragma once

#include <cstdint>
#include <optional>

#include "train/config.h"

namespace fsdp::train {

void check(const Config& config, int world);
void check_choices(const Config& config, int world);  // without the checks of data and length

// runs/NAME would be another directory each time.
[[noreturn]] void refuse_without_dir(bool automatic);

// Whether attention within documents needs the host, which a CUDA graph excludes.
bool reads_documents_on_host(const Config& config);

// Steps of the run, if the config alone determines them (steps or tokens, not epochs).
std::optional<int64_t> known_steps(const Config& config);

}  // namespace fsdp::train
