// fsdp hang: who hangs where and why, in about five lines.
#include <CLI/CLI.hpp>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>

#include "base/format.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/hang_files.h"
#include "cli/hang_story.h"

namespace fsdp::cli {
namespace {

constexpr const char* kHangExamples = R"(Examples:
  A run that failed in a collective, or that hangs now:
    fsdp hang runs/demo
  A program of yours: the folder that its error message named (FSDP_FLIGHT_DIR):
    fsdp hang fsdp-flight

If the run is still under way, its ranks on this host are asked first (SIGUSR2), which doesn't disturb
them. The files are in the format of PyTorch's flight recorder: torchfrtrace reads them as well.
docs/hangs.md explains the lines.)";

struct HangFlags {
  std::string where;
  bool json = false;
};

int run_hang(HangFlags flags) {
  const std::filesystem::path where = flags.where;
  std::vector<std::string> silent;
  const std::vector<RankProcess> running = running_ranks(where);
  if (!running.empty()) silent = ask(running, where / "flight");
  RunRanks ranks = read_ranks(where);
  ranks.notes.insert(ranks.notes.end(), silent.begin(), silent.end());
  const HangStory story = tell(ranks);
  std::vector<int> missing;
  for (int rank = 0; rank < ranks.world; ++rank)
    if (!ranks.files.contains(rank)) missing.push_back(rank);
  if (flags.json) {
    nlohmann::ordered_json json = to_json(story);
    json["world"] = ranks.world;
    json["folder"] = ranks.folder.string();
    json["without_file"] = missing;
    json["notes"] = ranks.notes;
    std::cout << json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace)
              << "\n";
    return 0;
  }
  std::cout << formatted("{}: {} of {} ranks\n", ranks.folder, ranks.files.size(), ranks.world)
            << describe(story);
  if (!missing.empty() && missing.size() < static_cast<size_t>(ranks.world))
    std::cout << formatted("{:<9}{}\n", "no file", rank_list(missing));
  for (const std::string& note : ranks.notes) std::cout << formatted("{:<9}{}\n", "note", note);
  return 0;
}

}  // namespace

void add_hang(CLI::App& app, Action& action) {
  auto given = std::make_shared<HangFlags>();
  Flags flags(app, "hang", "Say which rank hangs where, and why", kHangExamples);
  flags.command
      .add_option("where", given->where, "Directory of a run, or folder of the recorder's files")
      ->required()
      ->type_name("DIR");
  flags.flag("--json", given->json, "One JSON object");
  flags.runs(action, given, run_hang);
}

}  // namespace fsdp::cli
