/// @file
/// The exception that every failure of this library throws.
#pragma once

#include <stdexcept>
#include <string>

namespace fsdp {

/// A failure: a message and a hint. what() has both.
class Error : public std::runtime_error {
 public:
  /// Both are plain sentences.
  Error(std::string message, std::string hint)
      : std::runtime_error(hint.empty() ? message : message + "\n  HINT: " + hint),
        message_(std::move(message)),
        hint_(std::move(hint)) {}

  /// What happened, and to which rank, operation, tensor or file.
  const std::string& message() const { return message_; }
  /// What to do about it.
  const std::string& hint() const { return hint_; }

 private:
  std::string message_;
  std::string hint_;
};

}  // namespace fsdp
