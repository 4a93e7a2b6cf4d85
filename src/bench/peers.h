// How a benchmark starts what it compares with: PyTorch, by the scripts of bench/peers.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/ranks.h"

namespace fsdp::bench {

using cli::Json;
using cli::Ranks;
using cli::run_ranks;

// As run_ranks, through bench/peers/launch.sh, for PyTorch ranks that share one GPU.
std::vector<Json> run_peers_on_gpu(const Ranks& ranks);

// A Python that has torch: FSDP_TEST_PYTHON, or python3. nullopt, with a line in the log, if it has
// none; `left_out` names what isn't measured then.
std::optional<std::string> python_with_torch(const std::string& left_out);

// A script of bench/peers, in the source tree or beside an installed binary; empty if neither has
// it.
std::string peer_script(const std::string& name);

}  // namespace fsdp::bench
