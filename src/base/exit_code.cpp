#include "base/exit_code.h"

#include <new>

namespace fsdp::base {

ExitCode exit_code(const std::exception& failure) {
  if (const auto* coded = dynamic_cast<const CodedError*>(&failure)) return coded->code();
  if (dynamic_cast<const std::bad_alloc*>(&failure)) return kExitNoMemory;
  return kExitFailed;
}

}  // namespace fsdp::base
