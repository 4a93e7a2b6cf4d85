#include "cli/bench_ranks.h"

#include <unistd.h>

#include <filesystem>
#include <iostream>

#include "base/log.h"
#include "base/subprocess.h"
#include "fsdp/error.h"

namespace fsdp::cli {
namespace {

std::vector<Json> run(std::vector<std::string> launcher, const Ranks& ranks) {
  launcher.insert(launcher.end(), ranks.program.begin(), ranks.program.end());
  if (ranks.limit_s > 0)
    launcher.insert(launcher.begin(),
                    {"timeout", "--foreground", "-k", "10", std::to_string(ranks.limit_s)});
  bool shown = isatty(2);
  if (shown) std::cerr << "\r" << ranks.what << " …\033[K" << std::flush;
  std::vector<Json> lines;
  auto on_line = [&](const std::string& line) {
    Json parsed = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (parsed.is_object()) lines.push_back(parsed);
  };
  Finished finished = run_program(launcher, /*quiet=*/false, on_line,
                                  {{"OMP_NUM_THREADS", std::to_string(ranks.threads)}});
  if (shown) std::cerr << "\r\033[K" << std::flush;
  if (finished.code == 124 && ranks.limit_s > 0)
    throw Error(ranks.what + " took more than " + std::to_string(ranks.limit_s) + " s.",
                "give it more time.");
  if (finished.code != 0)
    throw Error(
        "the ranks of " + ranks.what + " ended with code " + std::to_string(finished.code) + ".",
        "their own words are above.");
  if (lines.empty())
    throw Error("the ranks of " + ranks.what + " measured nothing.", "their own words are above.");
  return lines;
}

}  // namespace

std::vector<Json> run_ranks(const Ranks& ranks) {
  return run({own_binary(), "run", "-n", std::to_string(ranks.count), "--no-prefix", "--"}, ranks);
}

std::vector<Json> run_peers_on_gpu(const Ranks& ranks) {
  return run({"bash", peer_script("launch.sh"), std::to_string(ranks.count)}, ranks);
}

std::optional<std::string> python_with_torch(const std::string& left_out) {
  std::string python = environment::text("FSDP_TEST_PYTHON").value_or("python3");
  if (run_program({python, "-c", "import torch"}).code == 0) return python;
  log::info(left_out + " left out: " + python + " has no torch (FSDP_TEST_PYTHON names another).");
  return std::nullopt;
}

std::string peer_script(const std::string& name) {
  namespace fs = std::filesystem;
  for (const fs::path& folder :
       {fs::path(FSDP_PEERS_DIR), fs::path(own_binary()).parent_path() / "../share/fsdp/peers"})
    if (fs::exists(folder / name)) return (folder / name).string();
  return "";
}

}  // namespace fsdp::cli
