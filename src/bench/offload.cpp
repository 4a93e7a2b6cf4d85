// fsdp bench offload: the time that offload costs and the memory it saves, on one model: without
// it, with optimizer state in host memory, and with everything there. Steps are timed first; then
// LibTorch's profiler splits more steps into parts.
//
// Named rows (--rows) have goals on a GPU and stand beside FSDP2 with CPUOffloadPolicy and fused
// AdamW on the CPU.
#include <algorithm>
#include <cmath>
#include <thread>

#include "bench/harness.h"
#include "observe/step_split.h"

namespace fsdp::bench {
namespace {

const std::string kPartsNote =
    "The parts are from the same number of further steps under the profiler, which costs time "
    "itself.";

// How the time of a step splits into parts, one line per part. `title`: of the row column; empty:
// there is only one row.
Table parts_table(const std::string& title, const Results& results) {
  Lines lines;
  for (const Result& result : results)
    for (const Contender& one : result.all) {
      // Without parts, the profiler failed and logged why.
      if (one.rounds.empty() || !one.rounds.front().contains("parts")) continue;
      const auto ns = one.rounds.front()["parts"].get<std::array<int64_t, observe::kParts>>();
      const auto share = observe::shares(ns);
      for (size_t i = 0; i < observe::kParts; ++i)
        lines.push_back({{"row", result.row.title},
                         {"offload", one.who},
                         {"part", observe::part_name(i)},
                         {"us", static_cast<double>(ns[i]) / 1e3},
                         {"percent", static_cast<double>(share[i]) / 100}});
    }
  return table_of("row=" + title + "; offload; part=of a step; us .0; percent=% .2", lines);
}

// On a model given by flags.
Report unnamed_offload_report(const Options& options, const Results& results) {
  Lines lines;
  for (const Contender& one : results.front().all) {
    lines.push_back(one.rounds.front());
    lines.back()["offload"] = one.who;
  }
  const char* memory = options.row.on.device == "cpu"
                           ? "what the engine holds on rank 0 after backward."
                           : "the allocator's peak on rank 0's device, and what is on the host.";
  const Table steps =
      table_of("offload; device_bytes=device B; host_bytes=host B; step_ms .1; loss .6", lines);
  Report report{{steps, parts_table("", results)}, notes_of(options.row, memory)};
  report.notes.push_back(kPartsNote);
  return report;
}

// With --clip, the rows of a name that clip accordingly; if there are none, the row without its
// goal.
std::vector<Row> named_offload_rows(const Options& options) {
  const std::vector<Row> known = rows_named(options.rows, "offload");
  const bool clips = options.row.clip > 0;
  const auto fits = [&](const Row& row) {
    return !given(options, "--clip") || (row.clip > 0) == clips;
  };
  std::vector<Row> chosen;
  for (const Row& own : known) {
    const bool another = std::ranges::any_of(
        known, [&](const Row& other) { return other.name == own.name && fits(other); });
    if (!fits(own) && another) continue;
    Row& row = chosen.emplace_back(with_flags(own, options));
    if (fits(own)) continue;
    row.title = row.title.substr(0, row.title.rfind(',')) + (clips ? ", clip" : ", no clip");
    row.goal_ms = 0;
  }
  return chosen;
}

Contenders offload_contenders(const Options& options, Row row, const Python& python) {
  Contenders all;
  row.memory = row.plan = true;
  for (const std::string& mode : options.wants("ours") ? options.modes : Strings()) {
    row.mode = mode;
    all.push_back(ours("offload", row, "fsdp.cpp, " + (mode == "off" ? "no offload" : mode)));
  }
  if (!python || !options.wants("peer")) return all;
  row.mode = "everything";
  const bool compiles = row.on.device == "cuda" && row.model == "llama";
  all.push_back(theirs(python, row,
                       compiles ? "FSDP2 + compile, CPUOffloadPolicy" : "FSDP2, CPUOffloadPolicy",
                       compiles ? "--compile --attn cudnn" : ""));
  return all;
}

Json offload_line(const Result& result, const Contender& one) {
  const bool everything = one.who == "everything";
  const double goal_gb = everything ? result.row.goal_gb : 0;
  Json line = line_of(result, one, everything ? result.row.goal_ms : 0, goal_gb);
  line["host_gb"] = one.value("host_bytes") / (1 << 20) / 1000;
  if (one.python) return line;
  set(line, "peak_gb", one.value("device_bytes") / (1 << 20) / 1000, goal_gb);
  line["times_off"] = one.ms() / result.fastest("off").ms();
  line["mean_ms"] = one.value("mean_ms");
  return line;
}

Report named_offload_report(const Options& options, const Results& results) {
  Report report{.heading = "Offload to host memory", .suffix = "-offload"};
  Lines lines;
  for (const Result& result : results) {
    const Row& row = result.row;
    for (const Contender& one : result.all) lines.push_back(offload_line(result, one));
    report.notes.push_back(
        formatted("{}; {} x {} threads, {} steps after {}, {} gathered ahead{}.", description(row),
                  count_of(row.on.ranks, "rank"), row.on.threads, row.steps, row.warmup,
                  count_of(row.prefetch, "unit"),
                  row.dtype == "bf16" ? ", gradients in " + row.grad_dtype : ""));
  }
  report.tables = {
      table_of(
          "row=model; what; ranks .0; step_ms .1; goal_ms .0; times_goal=x goal .2; "
          "times_peer=x FSDP2 .3; times_off=x no offload .2; mean_ms .1; tokens_s=tokens/s .0; "
          "peak_gb=peak GB .2; planned_gb=planned GB .2; goal_gb=goal GB .1; "
          "host_gb=host GB .2; first_loss .4; last_loss .4; apart_percent=apart % .2",
          lines),
      parts_table("model", results)};
  append<std::string>(
      report.notes,
      {"step ms: rank 0's median on the host's clock, waiting for the device. Updates on the CPU "
       "continue during the next step, which waits for them. mean ms: over all steps, until the "
       "last update is done. FSDP2's step ends with its update.",
       options.row.on.device == "cpu"
           ? "peak GB: what the engine holds on the device after backward, MiB / 1000; unknown for "
             "FSDP2 on the CPU."
           : "peak GB: the allocator's peak, MiB / 1000; ours with the warm-up, FSDP2's without. "
             "planned GB: what `fsdp plan` expects. host GB: what the engine holds in host memory.",
       kApart, kPartsNote + " Each instant counts for the first part that was active."});
  return report;
}

int run_offload(Options options) {
  require_rows(options);
  const bool named = !options.rows.empty();
  if (named && !given(options, "--threads"))
    options.row.on.threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return run_rows(options, named ? named_offload_rows(options) : std::vector<Row>{options.row},
                  options.beside_peer() ? python_with_torch("FSDP2 is") : Python(),
                  offload_contenders, named ? named_offload_report : unnamed_offload_report);
}

}  // namespace

void add_offload(CLI::App& bench, cli::Action& action) {
  auto options = std::make_shared<Options>();
  Row& row = options->row;
  row = kSmallRow;
  options->modes = {"off", "optimizer", "everything"};
  Flags flags(bench, "offload",
              "Time and memory of training steps, without and with offload to host memory",
              options->json, R"(  fsdp bench offload
  fsdp bench offload --device cuda --threads 16 --dtype bf16
  fsdp bench offload --model mlp --width 1024 --clip 0 --json
  fsdp bench offload --device cuda --rows 953m,mlp --peer --write
The peer needs a python3 with torch 2.11 (or FSDP_TEST_PYTHON=PYTHON); without one it is left out.)");
  add_row_flags(flags, *options);
  flags.command.get_option("--threads")
      ->description("Threads per rank; they update what is offloaded");
  flags.number("--prefetch", row.prefetch, "Units to gather ahead; each takes memory", 0);
  flags.number("--fraction", row.fraction, "Share of the model to offload", 0, 1, "FLOAT");
  flags.choice("--which", options->modes, options->modes,
               "Variants to measure: off, optimizer (masters, gradients and states in host "
               "memory), everything");
  flags.choice("--grad-dtype", row.grad_dtype, {"bf16", "fp32"},
               "Dtype of gradients until the update: bf16 or fp32; default: fp32, or the row's "
               "own");
  add_named_flags(flags, *options,
                  "Also measure FSDP2 with CPUOffloadPolicy and fused AdamW on the CPU");
  flags.any("--rows", options->rows,
            "Models with goals on a GPU, each with its own settings: all, or some of 953m (with "
            "and without clipping), mlp",
            "NAMES");
  flags.choice("--only", options->only, {"ours", "peer"},
               "Measure only ours, or only the peer (FSDP2)");
  flags.runs(action, options, run_offload, train_row);
}

}  // namespace fsdp::bench
