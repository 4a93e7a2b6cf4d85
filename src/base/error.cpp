#include "fsdp/error.h"

#include <utility>

#include "base/printable.h"

namespace fsdp {

struct Error::Printable {
  std::string message, hint;
};

Error::Error(const std::string& message, const std::string& hint)
    : Error(Printable{base::printable(message), base::printable(hint)}) {}

Error::Error(Printable text)
    : std::runtime_error(text.hint.empty() ? text.message
                                           : text.message + "\n  HINT: " + text.hint),
      message_(std::move(text.message)),
      hint_(std::move(text.hint)) {}

}  // namespace fsdp
