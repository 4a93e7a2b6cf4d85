// What is written to stderr while something runs: warnings and notes of the engine.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <iostream>
#include <string>

namespace fsdp::testing {

// Captures it, and still shows it.
inline std::string told(const std::function<void()>& work) {
  ::testing::internal::CaptureStderr();
  work();
  std::string said = ::testing::internal::GetCapturedStderr();
  std::cerr << said;
  return said;
}

}  // namespace fsdp::testing
