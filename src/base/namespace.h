// The names of src/base are in fsdp::base, and the rest of the library uses them without a prefix.
// The root namespace itself is for the public API.
#pragma once

namespace fsdp::base {}

namespace fsdp {
using namespace base;
}
