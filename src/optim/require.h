// require: checks an option of the user's; the Error names the field and its value.
#pragma once

#include <string>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::optim {

template <typename Value>
void require(bool holds, const char* who, const std::string& field, Value value, const char* must,
             const std::string& hint) {
  if (!holds) throw Error(formatted("{}: {} = {} must be {}.", who, field, value, must), hint);
}

}  // namespace fsdp::optim
