// How a benchmark starts ranks and peers, and reads what they measured: rank 0 prints one JSON
// object a line.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/environment.h"

namespace fsdp::cli {

using Json = nlohmann::ordered_json;

struct Ranks {
  int count = 1;
  int threads = 1;                   // each
  std::vector<std::string> program;  // what each rank runs
  std::string what;                  // for people: "FSDP2, round 2 of 3"
  int limit_s = 0;                   // seconds after which they are ended; 0: none
};

// Runs them to their end and returns the JSON objects they printed; an Error if they failed, or
// printed none.
std::vector<Json> run_ranks(const Ranks& ranks);

// As run_ranks, through bench/peers/launch.sh: processes of others that are to share a GPU.
std::vector<Json> run_peers_on_gpu(const Ranks& ranks);

// A python3 that has torch (FSDP_TEST_PYTHON, or python3); nullopt, with a line for people, where
// there is none.
std::optional<std::string> python_with_torch(const std::string& left_out);

// A script of bench/peers, in the source tree or beside an installed binary; empty if there is
// none.
std::string peer_script(const std::string& name);

}  // namespace fsdp::cli
