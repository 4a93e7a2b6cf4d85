/// @file
/// The exception that every failure of this library throws.
#pragma once

#include <stdexcept>
#include <string>

namespace fsdp {

/// A failure: a message and a hint. what() has both.
class Error : public std::runtime_error {
 public:
  /// Both are plain sentences. What could act on a terminal is escaped, and very long lines lose
  /// their middle: a name in them may come from a hostile file.
  Error(const std::string& message, const std::string& hint);

  /// What happened, and to which rank, operation, tensor or file.
  const std::string& message() const { return message_; }
  /// What to do about it.
  const std::string& hint() const { return hint_; }

 private:
  struct Printable;
  explicit Error(Printable text);

  std::string message_;
  std::string hint_;
};

}  // namespace fsdp
