// Damaged: the Error for bytes of a checkpoint that are missing, can't be read or differ from what
// was saved. Another checkpoint may be whole, so a run that resumes tries the one before.
#pragma once

#include "base/exit_code.h"

namespace fsdp::checkpoint {

class Damaged : public CodedError {
 public:
  Damaged(const std::string& message, const std::string& hint)
      : CodedError(kExitDamaged, message, hint) {}
};

}  // namespace fsdp::checkpoint
