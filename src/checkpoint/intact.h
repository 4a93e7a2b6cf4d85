// Whether a checkpoint is whole, as far as that is cheap to tell: from its manifest, the sizes of
// its files, and the sums of .metadata. `verify` reads everything.
#pragma once

#include <filesystem>
#include <string>

#include "checkpoint/metadata.h"

namespace fsdp::checkpoint {

// What is wrong, without a full stop; "" if nothing is. A checkpoint without a manifest is only
// whole if its .metadata doesn't say that there was one.
std::string problem_in(const std::filesystem::path& dir);

// Throws Damaged unless `metadata` and the manifest (null: there is none) belong together.
void require_mark(const std::filesystem::path& dir, const Metadata& metadata,
                  const Manifest* manifest);

// Makes a manifest that was lost again. Reads every byte; throws Damaged unless all are as saved.
void restore_manifest(const std::filesystem::path& dir);

}  // namespace fsdp::checkpoint
