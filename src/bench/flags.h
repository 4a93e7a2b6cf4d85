// Flags that several benchmarks share.
#pragma once

#include <CLI/CLI.hpp>

#include <string>

#include "fsdp/error.h"

namespace fsdp::bench {

inline constexpr const char* kNamedRows = "Named rows";

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

inline void add_init(CLI::App& command, std::string& init) {
  command
      .add_option(
          "--init", init,
          "Where to draw the initial weights: cpu, or device, which is faster; default: cpu, "
          "or the row's own")
      ->check(CLI::IsMember({"cpu", "device"}));
}

// Flags of named rows are refused without --rows.
inline void require_rows(const CLI::App& command, const std::string& rows) {
  if (!rows.empty()) return;
  for (const CLI::Option* option : command.get_options())
    if (option->get_group() == kNamedRows && option->count() > 0)
      throw Error(option->get_name() + " is only for named rows.",
                  "add --rows; --help lists them.");
}

// For commands with named rows.
inline void add_page_flags(CLI::App& command, std::string& page, std::string& keep, int& limit) {
  const char* group = kNamedRows;
  command
      .add_option("--write", page,
                  "Write a page with commands, versions and raw lines; default: in bench/results")
      ->expected(0, 1)
      ->type_name("[FILE]")
      ->group(group);
  command
      .add_option("--keep", keep,
                  "Append raw lines to this file, and don't repeat what it already has")
      ->type_name("FILE")
      ->group(group);
  command.add_option("--limit", limit, "Time limit of one measurement, in seconds")
      ->check(CLI::Range(1, 1 << 20).description(""))
      ->type_name("N")
      ->capture_default_str()
      ->group(group);
}

}  // namespace fsdp::bench
