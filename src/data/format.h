// Formats of data files.
#pragma once

#include "base/enum_names.h"

namespace fsdp {

namespace data {
enum class Format { kAuto, kText, kNanogpt, kLlmc, kMegatron };  // kAuto: by the files themselves
}

template <>
inline constexpr auto kEnumNames<data::Format> =
    std::to_array<EnumName>({{"auto"}, {"text"}, {"nanogpt"}, {"llmc"}, {"megatron"}});

}  // namespace fsdp
