// The ports of a run that a test starts.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "free_port.h"
#include "launch/launched.h"

namespace fsdp::launch {

struct Ports {
  int master = free_port(), control = free_port();

  std::vector<std::string> flags(int nnodes, int node) const {
    return {"--nnodes",       std::to_string(nnodes),
            "--node-rank",    std::to_string(node),
            "--master",       "127.0.0.1:" + std::to_string(master),
            "--control-port", std::to_string(control)};
  }
  // A launcher without a secret.
  std::unique_ptr<Launched> start(int nnodes, int node, std::vector<std::string> rest) const {
    std::vector<std::string> all = flags(nnodes, node);
    all.insert(all.end(), rest.begin(), rest.end());
    return std::make_unique<Launched>(fsdp_run(all),
                                      std::vector<std::string>{"FSDP_SECRET", "FSDP_SECRET_FILE"});
  }
};

}  // namespace fsdp::launch
