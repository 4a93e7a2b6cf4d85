#include "bench/peers.h"

#include <filesystem>

#include "base/environment.h"
#include "base/log.h"
#include "base/subprocess.h"

namespace fsdp::bench {

std::vector<Json> run_peers_on_gpu(const Ranks& ranks) {
  return run_ranks(ranks, {"bash", peer_script("launch.sh"), std::to_string(ranks.count)});
}

std::optional<std::string> python_with_torch(const std::string& left_out) {
  std::string python = environment::text("FSDP_TEST_PYTHON").value_or("python3");
  if (run_program({python, "-c", "import torch"}).code == 0) return python;
  log::info(left_out + " left out: " + python + " has no torch (set FSDP_TEST_PYTHON to one).");
  return std::nullopt;
}

std::string peer_script(const std::string& name) {
  namespace fs = std::filesystem;
  for (const fs::path& folder :
       {fs::path(FSDP_PEERS_DIR), fs::path(own_binary()).parent_path() / "../share/fsdp/peers"})
    if (fs::exists(folder / name)) return (folder / name).string();
  return "";
}

}  // namespace fsdp::bench
