// Refusals: says who was refused, without letting strangers fill the log: the first few at once,
// then one line per minute with their number. Not thread-safe.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "base/namespace.h"

namespace fsdp::base {

class Refusals {
 public:
  // "a connection to the store", "a launcher".
  explicit Refusals(std::string what) : what_(std::move(what)) {}

  // `why` continues a sentence that begins with the peer: "speaks another protocol".
  void add(const std::string& peer, const std::string& why);

  // The first few different ones: "10.0.0.7 speaks another protocol; ..."; "": there were none.
  std::string summary() const;

 private:
  std::string what_;
  int said_ = 0, unsaid_ = 0;
  std::chrono::steady_clock::time_point last_;
  std::vector<std::string> different_;
};

}  // namespace fsdp::base
