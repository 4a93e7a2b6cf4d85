// fsdp bench offload --rows: models with goals on a GPU, without and with offload to host memory,
// and by PyTorch's FSDP2 with CPUOffloadPolicy and fused AdamW on the CPU, one after the other on
// the same device.
#include <algorithm>
#include <cmath>
#include <sstream>
#include <thread>

#include "base/subprocess.h"
#include "bench/measured.h"
#include "bench/offload.h"

namespace fsdp::bench {
namespace {

// The given options; the row's own where none were given.
OffloadBench settled(const OffloadBench& options, const BenchRow& row) {
  OffloadBench chosen = options;
  if (!options.steps_given) chosen.steps = row.steps;
  if (!options.warmup_given) chosen.warmup = row.warmup;
  if (!options.prefetch_given) chosen.prefetch = row.prefetch;
  if (!options.clip_given) chosen.clip = row.clip;
  if (options.init.empty()) chosen.init = row.draw_on_cpu ? "cpu" : "device";
  // Without a reduction, gradients are offloaded in the dtype in which they are computed.
  bool alone = options.ranks == 1 && options.device != "cpu";
  if (options.grad_dtype.empty() && row.shape.dtype == "bf16")
    chosen.grad_dtype = alone ? "bf16" : "fp32";
  return chosen;
}

Measured offload_command(const OffloadBench& chosen, const BenchRow& row,
                         const std::string& which) {
  std::vector<std::string> program = worker_flags(chosen, which);
  append(program, flags_of(row.shape));
  const char* title = which == "off"         ? "fsdp.cpp, no offload"
                      : which == "optimizer" ? "fsdp.cpp, optimizer"
                                             : "fsdp.cpp, everything";
  return measured(which, title, program);
}

Measured offload_peer(const OffloadBench& chosen, const BenchRow& row, const std::string& python) {
  std::ostringstream clip;
  clip << chosen.clip;
  std::vector<std::string> program = {python,     peer_script("peer_fsdp2.py"),
                                      "--device", chosen.device,
                                      "--steps",  std::to_string(chosen.steps),
                                      "--warmup", std::to_string(chosen.warmup),
                                      "--clip",   clip.str(),
                                      "--offload"};
  append(program, peer_flags_of(row.shape));
  append(program, {"--init", chosen.init});
  bool compiles = chosen.device == "cuda" && row.shape.model == "llama";
  if (compiles) append(program, {"--compile", "--attn", "cudnn"});
  return measured(
      "peer", compiles ? "FSDP2 + compile, CPUOffloadPolicy" : "FSDP2, CPUOffloadPolicy", program);
}

// With --clip, the rows of a name that clip accordingly; if there are none, the row without its
// goal.
std::vector<BenchRow> offload_rows_of(const OffloadBench& options) {
  const std::vector<BenchRow> named = rows_named(options.rows, offload_rows());
  const auto fits = [&](const BenchRow& row) {
    return !options.clip_given || (row.clip > 0) == (options.clip > 0);
  };
  std::vector<BenchRow> chosen;
  for (BenchRow row : named) {
    const bool another = std::any_of(named.begin(), named.end(), [&](const BenchRow& other) {
      return other.name == row.name && fits(other);
    });
    if (!fits(row) && another) continue;
    if (!fits(row)) {
      row.title =
          row.title.substr(0, row.title.rfind(',')) + (options.clip > 0 ? ", clip" : ", no clip");
      row.goal_ms = 0;
    }
    row.ranks = options.ranks;
    chosen.push_back(row);
  }
  return chosen;
}

std::vector<Measured> offload_contenders(const OffloadBench& options, const BenchRow& row,
                                         const std::optional<std::string>& python) {
  const OffloadBench chosen = settled(options, row);
  std::vector<Measured> all;
  if (options.only != "peer")
    for (const std::string& which : options.which)
      all.push_back(offload_command(chosen, row, which));
  if (python && options.only != "ours") all.push_back(offload_peer(chosen, row, *python));
  return all;
}

Table steps_table() {
  return Table({{"row", "model", Table::kLeft},
                {"what", "what", Table::kLeft},
                {"ranks", "ranks"},
                {"step_ms", "step ms"},
                {"goal_ms", "goal ms"},
                {"times_goal", "x goal"},
                {"times_peer", "x FSDP2"},
                {"times_off", "x no offload"},
                {"mean_ms", "mean ms"},
                {"tokens_s", "tokens/s"},
                {"peak_gb", "peak GB"},
                {"planned_gb", "planned GB"},
                {"goal_gb", "goal GB"},
                {"host_gb", "host GB"},
                {"first_loss", "first loss"},
                {"last_loss", "last loss"},
                {"apart_percent", "apart %"}});
}

void add_offload_rows(Table& table, Table& parts, const RowResult& result) {
  const BenchRow& row = result.row;
  const double peer_ms = result.peer() ? result.peer()->ms() : std::nan("");
  for (const Measured& one : result.all) {
    const bool ours = one.who != "peer", all_of_it = one.who == "everything";
    const double ms = one.ms(), goal = all_of_it ? row.goal_ms : 0;
    const double goal_gb = all_of_it ? row.goal_gb : 0;
    double peak = one.value("peak_alloc_mb") / 1000;
    if (std::isnan(peak)) peak = one.value("device_bytes") / (1 << 20) / 1000;  // on the CPU
    const double tokens = static_cast<double>(tokens_of(row.shape)) * row.ranks;
    table.add({text(row.title), text(one.title + (one.failure.empty() ? "" : ": failed")),
               Cell{row.ranks, std::to_string(row.ranks)}, against(ms, goal, 1),
               optional_cell(goal > 0, number(goal, 0)),
               optional_cell(goal > 0, against(ms / goal, 1, 2)),
               optional_cell(ours, maybe(ms / peer_ms, 3)),
               optional_cell(ours, maybe(ms / result.ms_of("off"), 2)),
               optional_cell(ours, maybe(one.value("mean_ms"), 1)), maybe(tokens / ms * 1e3, 0),
               against(peak, goal_gb, 2),
               optional_cell(ours, maybe(one.value("planned_mb") / 1000, 2)),
               optional_cell(goal_gb > 0, number(goal_gb, 1)),
               maybe(one.value("host_bytes") / (1 << 20) / 1000, 2), maybe(one.value("loss0"), 4),
               maybe(one.value("loss"), 4),
               optional_cell(ours, maybe(apart(one, result.peer()) * 100, 2))});
    if (ours && !one.rounds.empty()) add_parts(parts, row.title, one.who, one.rounds.front());
  }
}

std::vector<std::string> offload_explanations(const OffloadBench& options,
                                              const std::vector<RowResult>& results) {
  std::vector<std::string> notes;
  for (const RowResult& result : results) {
    const OffloadBench chosen = settled(options, result.row);
    std::string note = description(result.row.shape) + "; " + std::to_string(chosen.ranks) +
                       (chosen.ranks == 1 ? " rank x " : " ranks x ") +
                       std::to_string(chosen.threads) + " threads, " +
                       std::to_string(chosen.steps) + " steps after " +
                       std::to_string(chosen.warmup) + ", " + std::to_string(chosen.prefetch) +
                       (chosen.prefetch == 1 ? " unit" : " units") + " gathered ahead";
    if (!chosen.grad_dtype.empty()) note += ", gradients in " + chosen.grad_dtype;
    notes.push_back(note + ".");
  }
  notes.push_back(
      "step ms: rank 0's median on the host's clock, waiting for the device. Updates on the CPU "
      "continue during the next step, which waits for them. mean ms: over all steps, until the "
      "last update is done. FSDP2's step ends with its update.");
  notes.push_back(
      options.device == "cpu"
          ? "peak GB: what the engine holds on the device after backward, MiB / 1000; unknown for "
            "FSDP2 on the CPU."
          : "peak GB: the allocator's peak, MiB / 1000; ours with the warm-up, FSDP2's without. "
            "planned GB: what `fsdp plan` expects. host GB: what the engine holds in host memory.");
  notes.emplace_back(kApart);
  notes.push_back(
      "The parts are from the same number of further steps under the profiler, which costs time "
      "itself. Each instant counts for the first part that was active.");
  return notes;
}

}  // namespace

int run_offload_rows(const OffloadBench& given) {
  OffloadBench options = given;
  if (!options.threads_given)
    options.threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  auto python =
      options.peer || options.only == "peer" ? python_with_torch("FSDP2 is") : std::nullopt;
  std::vector<RowResult> results;
  for (const BenchRow& row : offload_rows_of(options))
    results.push_back({row, offload_contenders(options, row, python)});
  Starts start = starts(options.device, options.threads, options.limit, options.keep);
  const bool well = measure(start, results, /*rounds=*/1);

  Table steps = steps_table(), parts = parts_table("model");
  Told told = {.device = options.device,
               .heading = "Offload to host memory",
               .page = options.page,
               .suffix = "-offload",
               .tables = {&steps, &parts},
               .notes = offload_explanations(options, results),
               .json = options.json,
               .write = options.write};
  if (options.peer && !python) told.notes.push_back(kWithoutPeer);
  for (const RowResult& result : results) {
    add_offload_rows(steps, parts, result);
    compare_losses(result, told.notes);
  }
  tell(told, results);
  return well ? 0 : 1;
}

}  // namespace fsdp::bench
