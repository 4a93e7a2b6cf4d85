// Error: what every failure of this library is. The message says what happened and to whom (rank,
// operation, tensor, file); the hint says what to do about it.
#pragma once

#include <stdexcept>
#include <string>

namespace fsdp {

class Error : public std::runtime_error {
 public:
  Error(std::string message, std::string hint)
      : std::runtime_error(hint.empty() ? message : message + "\n  HINT: " + hint),
        message_(std::move(message)),
        hint_(std::move(hint)) {}

  const std::string& message() const { return message_; }
  const std::string& hint() const { return hint_; }

 private:
  std::string message_;
  std::string hint_;
};

}  // namespace fsdp
