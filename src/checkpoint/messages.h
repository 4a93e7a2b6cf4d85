// Messages: what ranks send each other when they save and load. Each has one encoding. Decoding is
// strict: `sender` begins the Error for a text that isn't such a message.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "base/exit_code.h"
#include "checkpoint/manifest.h"
#include "checkpoint/metadata.h"

namespace fsdp::checkpoint {

// How an action ended on a rank.
struct Outcome {
  std::string result;  // if it succeeded
  std::optional<CodedError> failure = {};

  [[noreturn]] void fail() const;  // throws the failure; a Damaged with kExitDamaged

  std::string encode() const;
  static Outcome decode(std::string_view text, const std::string& sender);
};

// What a rank wrote into a checkpoint, or what several did.
struct SaveReport {
  Metadata metadata;
  Manifest manifest;

  void add(SaveReport other);  // another rank's
  std::string encode() const;
  static SaveReport decode(std::string_view text, const std::string& sender);
};

// The first of several values of the store that hold one text; a value's size is limited.
struct FirstPiece {
  size_t pieces = 1;  // including this one
  std::string text;

  std::string encode() const;
  static FirstPiece decode(std::string_view text, const std::string& sender);
};

}  // namespace fsdp::checkpoint
