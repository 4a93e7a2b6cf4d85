// Flags that several benchmarks have, declared alike.
#pragma once

#include <CLI/CLI.hpp>

#include <string>

namespace fsdp::cli {

// A whole number from `least` to `most`.
template <typename Number>
void add_count(CLI::App& command, const char* name, Number& value, const char* help, int least = 1,
               int most = 1 << 20) {
  command.add_option(name, value, help)
      ->check(CLI::Range(least, most).description(""))
      ->type_name("N")
      ->capture_default_str();
}

inline void add_device(CLI::App& command, std::string& device) {
  command.add_option("--device", device, "cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
}

}  // namespace fsdp::cli
