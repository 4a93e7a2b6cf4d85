// fsdp bench offload: the time that offload costs and the memory it saves, on one model: without
// it, with optimizer state in host memory, and with everything there. Steps are timed first; then
// LibTorch's profiler splits more steps into parts.
//
// Named rows (--rows) have goals on a GPU and stand beside FSDP2 with CPUOffloadPolicy and fused
// AdamW on the CPU.
#include <algorithm>
#include <cmath>
#include <thread>

#include "base/format.h"
#include "bench/benchmarks.h"
#include "bench/flags.h"
#include "observe/step_split.h"

namespace fsdp::bench {
namespace {

// How the time of a step splits into parts, one line per part. `title`: of the row column; empty:
// there is only one row.
Table parts_table(const std::string& title, const std::vector<Result>& results) {
  std::vector<Json> lines;
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
  return table_of({{"row", title, kWords},
                   {"offload", "offload", kWords},
                   {"part", "of a step", kWords},
                   {"us", "us", 0},
                   {"percent", "%", 2}},
                  lines);
}

Contender with_offload(Row row, const std::string& which) {
  row.mode = which;
  row.memory = row.plan = true;
  return ours("offload", row, "fsdp.cpp, " + (which == "off" ? "no offload" : which));
}

Report unnamed_offload_report(const Row& row, const std::vector<Result>& results) {
  std::vector<Json> lines;
  for (const Contender& one : results.front().all) {
    lines.push_back(one.rounds.front());
    lines.back()["offload"] = one.who;
  }
  return {
      .tables = {table_of({{"offload", "offload", kWords},
                           {"device_bytes", "device", kBytes},
                           {"host_bytes", "host", kBytes},
                           {"step_ms", "step ms", 1},
                           {"loss", "loss", 6}},
                          lines),
                 parts_table("", results)},
      .notes = {place_note(row),
                formatted("Memory: {}. {}",
                          row.on.device == "cpu"
                              ? "what the engine holds on rank 0 after backward"
                              : "the allocator's peak on rank 0's device, and what is on the host",
                          time_note(row)),
                "The parts are from the same number of further steps under the profiler, which "
                "costs time itself."}};
}

// --- named rows ---

// With --clip, the rows of a name that clip accordingly; if there are none, the row without its
// goal.
std::vector<Row> named_offload_rows(const Options& options) {
  const std::vector<Row> known = rows_named(options.rows, offload_rows());
  const std::vector<Row> rows = chosen_rows(options, offload_rows());
  const bool clips = options.given.clip > 0;
  const auto fits = [&](const Row& row) {
    return !given(options, "--clip") || (row.clip > 0) == clips;
  };
  std::vector<Row> chosen;
  for (size_t i = 0; i < rows.size(); ++i) {
    const bool another = std::any_of(known.begin(), known.end(), [&](const Row& other) {
      return other.name == rows[i].name && fits(other);
    });
    if (!fits(known[i]) && another) continue;
    chosen.push_back(rows[i]);
    if (fits(known[i])) continue;
    std::string& title = chosen.back().title;
    title = title.substr(0, title.rfind(',')) + (clips ? ", clip" : ", no clip");
    chosen.back().goal_ms = 0;
  }
  return chosen;
}

std::vector<Contender> offload_contenders(const Options& options, Row row,
                                          const std::optional<std::string>& python) {
  std::vector<Contender> all;
  if (options.only != "peer")
    for (const std::string& which : options.modes) all.push_back(with_offload(row, which));
  if (!python || options.only == "ours") return all;
  row.mode = "everything";
  const bool compiles = row.on.device == "cuda" && row.model == "llama";
  std::vector<std::string> variant;
  if (compiles) variant = {"--compile", "--attn", "cudnn"};
  all.push_back(theirs(*python, row,
                       compiles ? "FSDP2 + compile, CPUOffloadPolicy" : "FSDP2, CPUOffloadPolicy",
                       variant));
  return all;
}

Json offload_line(const Result& result, const Contender& one) {
  const bool everything = one.who == "everything";
  const double held = one.value("device_bytes") / (1 << 20);  // of ours
  const double peak_mb = std::isnan(held) ? one.value("peak_alloc_mb") : held;
  Json line = named_line(result, one, !one.python, everything ? result.row.goal_ms : 0,
                         peak_mb / 1000, everything ? result.row.goal_gb : 0);
  if (!one.python) line["times_off"] = one.ms() / result.ms_of("off");
  if (!one.python) line["mean_ms"] = one.value("mean_ms");
  line["host_gb"] = one.value("host_bytes") / (1 << 20) / 1000;
  return line;
}

Report offload_report(const Options& options, const std::vector<Result>& results) {
  Report report{.heading = "Offload to host memory", .suffix = "-offload"};
  std::vector<Json> lines;
  for (const Result& result : results) {
    const Row& row = result.row;
    for (const Contender& one : result.all) lines.push_back(offload_line(result, one));
    report.notes.push_back(
        formatted("{}; {} x {} threads, {} steps after {}, {} gathered ahead{}.", description(row),
                  counted(row.on.ranks, "rank"), row.on.threads, row.steps, row.warmup,
                  counted(row.prefetch, "unit"),
                  row.dtype == "bf16" ? ", gradients in " + row.grad_dtype : ""));
  }
  report.tables = {
      table_of(
          named_columns(/*digits=*/1, {{"times_off", "x no offload", 2}, {"mean_ms", "mean ms", 1}},
                        {}, {{"host_gb", "host GB", 2}}),
          lines),
      parts_table("model", results)};
  append<std::string>(
      report.notes,
      {"step ms: rank 0's median on the host's clock, waiting for the device. Updates on the CPU "
       "continue during the next step, which waits for them. mean ms: over all steps, until the "
       "last update is done. FSDP2's step ends with its update.",
       options.given.on.device == "cpu"
           ? "peak GB: what the engine holds on the device after backward, MiB / 1000; unknown for "
             "FSDP2 on the CPU."
           : "peak GB: the allocator's peak, MiB / 1000; ours with the warm-up, FSDP2's without. "
             "planned GB: what `fsdp plan` expects. host GB: what the engine holds in host memory.",
       kApart,
       "The parts are from the same number of further steps under the profiler, which costs time "
       "itself. Each instant counts for the first part that was active."});
  return report;
}

int run_offload(Options options) {
  require_rows(options);
  const bool named = !options.rows.empty();
  if (named && !given(options, "--threads"))
    options.given.on.threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const auto python = python_for_peer(options);
  std::vector<Result> results;
  for (const Row& row : named ? named_offload_rows(options) : std::vector<Row>{options.given})
    results.push_back({row, offload_contenders(options, row, python)});
  return run_rows(options, results, [&](const auto& measured) {
    return named ? offload_report(options, measured)
                 : unnamed_offload_report(options.given, measured);
  });
}

}  // namespace

void add_offload(CLI::App& bench, Action& action) {
  auto options = std::make_shared<Options>();
  Row& row = options->given;
  row = small_row();
  options->modes = {"off", "optimizer", "everything"};
  CLI::App* command = bench.add_subcommand(
      "offload", "Time and memory of training steps, without and with offload to host memory");
  add_row_flags(*command, *options);
  command->get_option("--threads")->description("Threads per rank; they update what is offloaded");
  add_count(*command, "--prefetch", row.prefetch, "Units to gather ahead; each takes memory", 0);
  command->add_option("--fraction", row.fraction, "Share of the model to offload")
      ->check(CLI::Range(0.0, 1.0).description(""))
      ->capture_default_str();
  add_choice(*command, "--which", options->modes, options->modes,
             "Variants to measure: off, optimizer (masters, gradients and states in host memory), "
             "everything")
      ->delimiter(',')
      ->capture_default_str();
  add_choice(*command, "--grad-dtype", row.grad_dtype, {"bf16", "fp32"},
             "Dtype of gradients until the update: bf16 or fp32; default: fp32, or the row's own");
  add_named_flags(
      *command, *options, "Also measure FSDP2 with CPUOffloadPolicy and fused AdamW on the CPU",
      [&] {
        command
            ->add_option("--rows", options->rows,
                         "Models with goals on a GPU, each with its own settings: all, or some of "
                         "953m (with and without clipping), mlp")
            ->type_name("NAMES");
        add_choice(*command, "--only", options->only, {"ours", "peer"},
                   "Measure only ours, or only the peer (FSDP2)");
      });
  command->footer(
      "Examples:\n  fsdp bench offload\n  fsdp bench offload --device cuda --threads 16 --dtype "
      "bf16\n  fsdp bench offload --model mlp --width 1024 --clip 0 --json\n"
      "  fsdp bench offload --device cuda --rows 953m,mlp --peer --write\n"
      "The peer needs a python3 with torch 2.11 (or FSDP_TEST_PYTHON=PYTHON); without one it is "
      "left out.");
  set_action<Row>(
      *command, action, row.on, [options] { return run_offload(*options); }, train_row);
}

}  // namespace fsdp::bench
