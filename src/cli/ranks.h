// Starts ranks of a program and reads the JSON objects they print, one per line (explain and the
// benchmarks).
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace fsdp::cli {

using Json = nlohmann::ordered_json;

struct Ranks {
  int count = 1;
  int threads = 1;                         // per rank
  std::vector<std::string> program;        // what each rank runs
  std::string what;                        // for messages: "FSDP2, round 2 of 3"
  int limit_s = 0;                         // time limit in seconds; 0: none
  std::vector<std::string> launcher = {};  // its words come before the program's; empty: fsdp run
};

// The program of a rank of this binary's `command`. The rank gets `row` as JSON (Flags::runs).
std::vector<std::string> rank_program(const char* command, const nlohmann::json& row);

// Runs the ranks to completion and returns the JSON objects they printed. Throws an Error if they
// fail, exceed the time limit or print none.
std::vector<Json> run_ranks(const Ranks& ranks);

}  // namespace fsdp::cli
