// A rank that recovers, for tests of the launcher. In its status it does what `fsdp train` does when
// another rank dies, which it learns from a file or from the launcher.
//
// usage: recovering_rank FOLDER [WHAT]
//   FOLDER/rank-N     its pid, once it has joined the world
//   FOLDER/dead       makes it let go of the world and wait for the next start
//   FOLDER/joined-N   a line with attempt, port and pid for each start that it joined
//   FOLDER/done       makes it exit with 0
// WHAT "plain": it doesn't recover. "told": it lets go when the launcher says so. "stays": it never
// does. "fails": it exits with 3 instead of joining the first restart.
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>

#include "base/rank_status.h"

namespace status = fsdp::rank_status;
namespace fs = std::filesystem;

namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

bool wait_for(const std::function<bool()>& condition) {
  for (int i = 0; i < 60'000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

void take_over(const status::Start& start) {
  std::istringstream lines(start.variables);
  for (std::string line; std::getline(lines, line);) {
    const size_t equals = line.find('=');
    setenv(line.substr(0, equals).c_str(), line.substr(equals + 1).c_str(), 1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const std::string folder = argv[1], what = argc > 2 ? argv[2] : "", rank = variable("RANK");
  status::set_recovers(what != "plain");
  status::set_grace(0.3);
  for (;;) {
    const int attempt = std::atoi(variable("TORCHELASTIC_RESTART_COUNT").c_str());
    if (attempt == 1 && what == "fails") return 3;
    status::set_joined(attempt);
    std::ofstream(folder + "/joined-" + rank, std::ios::app)
        << attempt << " " << variable("MASTER_PORT") << " " << getpid() << std::endl;
    std::ofstream(folder + "/rank-" + rank) << getpid() << std::endl;
    const auto dead = [&] {
      if (what == "told") return status::told_to_let_go();
      return what != "stays" && attempt == 0 && fs::exists(folder + "/dead");
    };
    if (!wait_for([&] { return dead() || fs::exists(folder + "/done"); })) return 4;
    if (!dead()) return 0;
    status::set_waits_for(attempt + 1);
    if (!wait_for([&] { return status::announced().attempt > attempt; })) return 5;
    take_over(status::announced());
  }
}
