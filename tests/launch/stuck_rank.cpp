// A rank that reports a step and hangs, for tests of the launcher. It ignores SIGTERM and SIGINT.
// Rank 0 spins inside a collective; the others sleep after one.
//
// usage: stuck_rank FOLDER [GRACE [CODE]]   writes its pid to FOLDER/rank-N; GRACE: seconds to ask
// for; CODE: what SIGUSR1 makes it exit with
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <string>

#include "base/rank_status.h"

namespace status = fsdp::rank_status;

int main(int argc, char** argv) {
  const char* rank = std::getenv("RANK");
  if (argc < 2 || !rank) return 2;
  signal(SIGTERM, SIG_IGN);
  signal(SIGINT, SIG_IGN);
  static int code = argc > 3 ? std::atoi(argv[3]) : 0;
  if (code != 0) signal(SIGUSR1, [](int) { _exit(code); });
  status::set_step(12);
  status::set_phase("backward");
  status::set_unit("layers.7", "backward");
  if (argc > 2) status::set_grace(std::atof(argv[2]));
  bool spins = std::string(rank) == "0";
  if (!spins) status::Collective("reduce_scatter", 512, "unit \"layers.8\" (gradients)");
  status::Collective* running =
      spins ? new status::Collective("all_gather", 1024, "unit \"layers.7\" (backward)") : nullptr;
  std::ofstream(argv[1] + std::string("/rank-") + rank) << getpid() << std::endl;
  volatile bool forever = true;
  while (forever) {
    if (!spins) pause();
  }
  delete running;
}
