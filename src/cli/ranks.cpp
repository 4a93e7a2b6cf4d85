#include "cli/ranks.h"

#include <unistd.h>

#include <iostream>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/subprocess.h"
#include "cli/program.h"
#include "fsdp/error.h"

namespace fsdp::cli {

std::vector<std::string> rank_program(const char* command, const nlohmann::json& row) {
  return {own_binary(), command, "--worker", row.dump()};
}

std::vector<Json> run_ranks(const Ranks& ranks) {
  std::vector<std::string> words = ranks.launcher;
  if (words.empty())
    words = {beside("fsdp"), "run", "-n", std::to_string(ranks.count), "--no-prefix", "--"};
  words.insert(words.end(), ranks.program.begin(), ranks.program.end());
  if (ranks.limit_s > 0)
    words.insert(words.begin(),
                 {"timeout", "--foreground", "-k", "10", std::to_string(ranks.limit_s)});
  bool shown = isatty(2);
  if (shown) std::cerr << "\r" << ranks.what << " …\033[K" << std::flush;
  std::vector<Json> lines;
  auto on_line = [&](const std::string& line) {
    Json parsed = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (parsed.is_object()) lines.push_back(parsed);
  };
  Finished finished = run_program(words, /*quiet=*/false, on_line,
                                  {{"OMP_NUM_THREADS", std::to_string(ranks.threads)}});
  if (shown) std::cerr << "\r\033[K" << std::flush;
  if (finished.code == 124 && ranks.limit_s > 0)
    throw Error(formatted("{} took more than {} s.", ranks.what, ranks.limit_s), "raise --limit.");
  if (finished.code != 0)
    throw CodedError(static_cast<ExitCode>(finished.code),
                     formatted("the ranks of {} exited with code {}.", ranks.what, finished.code),
                     "their own errors are above.");
  if (lines.empty())
    throw Error(formatted("the ranks of {} printed no result.", ranks.what),
                "their own errors are above.");
  return lines;
}

}  // namespace fsdp::cli
