// Alone, because a compiler cache can't share between clones what is compiled with a path.
#include <filesystem>

#include "bench/row.h"
#include "cli/program.h"

namespace fsdp::bench {

std::string bench_file(const std::string& name) {
  const std::string source = FSDP_BENCH_DIR "/" + name;
  return std::filesystem::exists(source) ? source : cli::beside("../share/fsdp/" + name);
}

}  // namespace fsdp::bench
