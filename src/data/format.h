// Formats of data files.
#pragma once

#include "base/enum_names.h"

namespace fsdp::data {

enum class Format { kAuto, kText, kNanogpt, kLlmc, kMegatron };  // kAuto: by the files themselves
constexpr auto enum_table(Format) {
  return std::to_array<EnumName>({{"auto"}, {"text"}, {"nanogpt"}, {"llmc"}, {"megatron"}});
}

}  // namespace fsdp::data
