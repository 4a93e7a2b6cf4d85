// fsdp report: one HTML file about a run, or about several on top of each other.
#include <CLI/CLI.hpp>
#include <filesystem>
#include <iostream>
#include <memory>

#include "base/format.h"
#include "base/table.h"
#include "checkpoint/summary.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "fsdp/error.h"
#include "observe/memory_record.h"
#include "report/run_page.h"
#include "train/config_resolve.h"
#include "train/plan_config.h"

namespace fsdp::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kReportExamples = R"(Examples:
  The page of one run, as runs/demo/report.html:
    fsdp report runs/demo
  Two runs on top of each other, with what differs in their configs:
    fsdp report runs/demo runs/demo-2 -o both.html

The page needs no network and no server: open the file in a browser. It can be written while the run
is under way. docs/report.md says what each section shows.)";

struct ReportFlags {
  std::vector<std::string> runs;
  std::string out;
};

std::string holds(const fs::path& checkpoint) {
  try {
    std::string text;
    for (const auto& [name, kind] : checkpoint::summarize(checkpoint).kinds)
      if (kind.tensors > 0)
        text += formatted("{}{}: {}, {}", text.empty() ? "" : "; ", name,
                          count_of(kind.tensors, "tensor"),
                          human_bytes(static_cast<double>(kind.bytes)));
    return text;
  } catch (const std::exception&) {  // what is wrong with it is a question for fsdp ckpt verify
    return "";
  }
}

train::Config config_of(const fs::path& file) {
  train::Config config;
  train::apply_toml(config, train::read_config_file(file), file.string());
  return config;
}

// Memory that the run recorded, beside the plan that it recorded or that its config gives.
void add_memory(report::ReportedRun& run) {
  const report::Json* event = run.files.last_event("memory");
  if (!event) {
    run.no_memory = "Memory by kind wasn't recorded: it is after the third step of a run.";
    return;
  }
  observe::MemoryRecord record = observe::memory_from_json(*event);
  if (!record.planned) {
    try {
      const train::Config config = config_of(run.files.root / "config.toml");
      const int ranks = event->value("world", 1);
      train::ConfigPlan of = train::plan_of(config, ranks, {}, ranks);
      record.planned = plan(of.model, of.options).memory;
    } catch (const std::exception& problem) {
      run.files.notes.push_back(formatted("There is no memory plan: {}", problem.what()));
    }
  }
  for (const observe::ComparedKind& kind : observe::compared_kinds(record))
    run.memory.push_back({kind.name, kind.planned, kind.measured, kind.sum});
}

int run_report(const ReportFlags& flags) {
  std::vector<report::ReportedRun> runs;
  for (const std::string& root : flags.runs) {
    report::ReportedRun run{.files = report::read_run(root)};
    for (report::CheckpointFiles& one : run.files.checkpoints)
      if (one.complete) one.holds = holds(run.files.root / "checkpoints" / one.name);
    add_memory(run);
    runs.push_back(std::move(run));
  }
  const fs::path out =
      flags.out.empty() ? runs.front().files.root / "report.html" : fs::path(flags.out);
  write_page(report::run_page(runs), out);
  std::cout << out.string() << "\n";
  return 0;
}

}  // namespace

void add_report(CLI::App& app, Action& action) {
  auto given = std::make_shared<ReportFlags>();
  Flags flags(app, "report", "Write an HTML page about a run, or about several side by side",
              kReportExamples);
  flags.command.add_option("run", given->runs, "Directories of runs (runs/NAME)")
      ->required()
      ->type_name("RUN");
  flags.command
      .add_option("-o,--out", given->out, "File to write; default: report.html in the first run")
      ->type_name("FILE");
  flags.command.callback([given, &action] { action = [given] { return run_report(*given); }; });
}

}  // namespace fsdp::cli
