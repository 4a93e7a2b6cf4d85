// fsdp doctor: checks what fsdp uses on this machine, one row per item, with a hint for each row
// that isn't ok. The rows come from probes.h; a probe that throws becomes a problem.
#include <CLI/CLI.hpp>
#include <cctype>
#include <iostream>
#include <memory>

#include "base/format.h"
#include "base/table.h"
#include "base/terminal.h"
#include "cli/commands.h"
#include "cli/probes.h"
#include "fsdp/error.h"

namespace fsdp::cli {
namespace {

struct Probe {
  const char* item;  // a stable key of --json
  Finding (*look)();
};

constexpr Probe kProbes[] = {
    {"fsdp", probe_fsdp},
    {"compiler", probe_compiler},
    {"LibTorch", probe_libtorch},
    {"CUDA library", probe_cuda_library},
    {"GPUs", probe_gpus},
    {"NCCL", probe_nccl},
    {"MPI", probe_mpi},
    {"BLAS", probe_blas},
    {"cores", probe_cores},
    {"memory", probe_memory},
    {"shared memory", probe_shared_memory},
    {"peer watch", probe_peer_watch},
    {"/dev/shm", probe_dev_shm},
    {"limits", probe_limits},
    {"huge pages", probe_huge_pages},
    {"io_uring", probe_io_uring},
    {"launcher", probe_launcher},
    {"environment", probe_environment},
    {"python peer", probe_python},
};

struct Look {
  const char* word;
  const char* colour;
};

constexpr Look kLooks[] = {{"ok", "32"}, {"note", "33"}, {"problem", "31"}};  // by Finding::Status

Finding look(const Probe& probe) {
  try {
    return probe.look();
  } catch (const Error& problem) {
    return {problem.message(), Finding::kProblem,
            problem.hint().empty() ? "docs/ says what this needs." : problem.hint()};
  } catch (const std::exception& surprise) {
    return {formatted("the probe failed: {}", surprise.what()), Finding::kProblem,
            "this is a bug in fsdp doctor; please report it with this line."};
  }
}

// One line of valid UTF-8: environment variables and drivers may hold any bytes.
std::string one_line(std::string raw) {
  using Json = nlohmann::json;
  for (char& c : raw)
    if (std::iscntrl(static_cast<unsigned char>(c))) c = ' ';
  return Json::parse(Json(raw).dump(-1, ' ', false, Json::error_handler_t::replace));
}

int run_doctor(bool json) {
  Table table({{"item", "item", Table::kLeft},
               {"found", "found", Table::kLeft},
               {"status", "status", Table::kLeft},
               {"hint", ""}});
  std::string hints;
  bool problem = false;
  for (const Probe& probe : kProbes) {
    Finding finding = look(probe);
    const Look& shown = kLooks[finding.status];
    std::string hint = one_line(finding.hint);
    table.add({text(probe.item),
               text(one_line(finding.found)),
               {shown.word, shown.word, shown.colour},
               text(hint)});
    if (!hint.empty())
      hints += formatted("\n{}\n  HINT: {}\n", paint(STDOUT, shown.colour, probe.item), hint);
    problem |= finding.status == Finding::kProblem;
  }
  table.print(std::cout, json);
  if (!json) std::cout << hints;
  return problem ? 1 : 0;
}

}  // namespace

void add_doctor(CLI::App& app, Action& action) {
  auto json = std::make_shared<bool>(false);
  CLI::App* command =
      app.add_subcommand("doctor", "Check this machine for fsdp, and say what to fix");
  command->add_flag("--json", *json, "One JSON object per line");
  command->footer(
      "Examples:\n"
      "  fsdp doctor\n"
      "  fsdp run -n 2 fsdp doctor\n"
      "\n"
      "Run it where and how the ranks run: in the container, under the launcher.\n"
      "note: it works, but could be better. problem: fix it first; the exit code is then 1.");
  command->callback([json, &action] { action = [json] { return run_doctor(*json); }; });
}

}  // namespace fsdp::cli
