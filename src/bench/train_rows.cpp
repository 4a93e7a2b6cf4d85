// fsdp bench train --rows: models with goals on a GPU, each trained by us (eager, and as one CUDA
// graph per step), without FSDP, and by PyTorch's FSDP2 in its best variant, one after the other on
// the same device.
#include <cmath>
#include <sstream>

#include "base/subprocess.h"
#include "bench/measured.h"
#include "bench/train.h"
#include "observe/throughput.h"
#include "train/training.h"

namespace fsdp::bench {
namespace {

constexpr double kTapeGoal = 15;  // percent that recording may add to a forward

// --- who is measured ---

std::vector<std::string> train_row_common_flags(const TrainBench& options, const BenchRow& row) {
  std::ostringstream clip;
  clip << options.clip;
  return {"--device", options.device,
          "--steps",  std::to_string(options.steps_given ? options.steps : row.steps),
          "--warmup", std::to_string(options.warmup_given ? options.warmup : row.warmup),
          "--clip",   clip.str()};
}

std::string init_of(const TrainBench& options, const BenchRow& row) {
  if (!options.init.empty()) return options.init;
  return row.draw_on_cpu ? "cpu" : "device";
}

const std::string& train_row_activations(const TrainBench& options, const BenchRow& row) {
  return options.activations.empty() ? row.activations : options.activations;
}

int keep_last_of(const TrainBench& options, const BenchRow& row) {
  return options.keep_last_given || !options.activations.empty() ? options.keep_last
                                                                 : row.keep_last;
}

Measured train_row_command(const TrainBench& options, const BenchRow& row,
                           const std::string& mode) {
  std::vector<std::string> program = {own_binary(), "train",
                                      "--worker",   mode,
                                      "--threads",  std::to_string(options.threads),
                                      "--strategy", options.strategy,
                                      "--backend",  options.backend};
  append(program, train_row_common_flags(options, row));
  append(program, flags_of(row.shape));
  if (!options.grad_dtype.empty()) append(program, {"--grad-dtype", options.grad_dtype});
  const bool sharded = mode != "plain";
  if (sharded && mode != "tape" && train_row_activations(options, row) != "none")
    append(program, {"--activations", train_row_activations(options, row)});
  if (sharded && keep_last_of(options, row) > 0)
    append(program, {"--keep-last", std::to_string(keep_last_of(options, row))});
  if (init_of(options, row) == "device") append(program, {"--init", "device"});
  return measured(mode, sharded ? "fsdp.cpp, " + mode : "no FSDP, C++ eager", program);
}

Measured train_row_peer(const TrainBench& options, const BenchRow& row, const std::string& python,
                        const std::string& title, const std::vector<std::string>& variant) {
  bool keeps = train::parse_strategy(options.strategy) == ShardingStrategy::SHARD_GRAD_OP;
  std::vector<std::string> program = {python, peer_script("peer_fsdp2.py")};
  append(program, train_row_common_flags(options, row));
  append(program, peer_flags_of(row.shape));
  if (keeps) append(program, {"--reshard", "0"});
  if (init_of(options, row) == "cpu") append(program, {"--init", "cpu"});
  append(program, variant);
  return measured("peer", title, program);
}

std::vector<Measured> train_row_contenders(const TrainBench& options, const BenchRow& row,
                                           const std::optional<std::string>& python) {
  std::vector<std::string> modes = options.modes.empty() ? row.modes : options.modes;
  std::vector<Measured> all;
  for (const std::string& mode : modes) {
    bool wanted = options.only.empty() || (options.only == "none") == (mode == "plain");
    if (wanted && options.only != "peer") all.push_back(train_row_command(options, row, mode));
  }
  if (!python || options.only == "ours" || options.only == "none") return all;
  const bool selective = train_row_activations(options, row) == "selective";
  const std::vector<std::string> again = peer_recomputes(train_row_activations(options, row));
  const std::string ac = again.empty() ? "" : selective ? " + selective ac" : " + ac";
  if (options.device == "cpu") {
    all.push_back(train_row_peer(options, row, *python, "FSDP2" + ac, again));
  } else if (row.shape.model == "mlp") {  // either may be faster
    all.push_back(train_row_peer(options, row, *python, "FSDP2", {}));
    all.push_back(train_row_peer(options, row, *python, "FSDP2 + compile", {"--compile"}));
  } else {
    const std::vector<std::string> best = {"--compile", "--attn", "cudnn"};
    auto compiled = [&](const std::string& with, const std::vector<std::string>& flags) {
      std::vector<std::string> variant = best;
      append(variant, flags);
      all.push_back(
          train_row_peer(options, row, *python, "FSDP2 + compile" + with + ", cuDNN", variant));
    };
    if (selective) compiled(" + ac", {"--ac"});  // either may be faster
    compiled(ac, again);
  }
  return all;
}

// --- tables ---

Table empty_table() {
  return Table({{"row", "model", Table::kLeft},
                {"what", "what", Table::kLeft},
                {"ranks", "ranks"},
                {"step_ms", "step ms"},
                {"goal_ms", "goal ms"},
                {"times_goal", "x goal"},
                {"times_peer", "x FSDP2"},
                {"times_plain", "x plain"},
                {"host_ms", "host ms"},
                {"tokens_s", "tokens/s"},
                {"published_tokens_s", "published"},
                {"tflops", "TFLOP/s"},
                {"mfu", "MFU %"},
                {"peak_gb", "peak GB"},
                {"planned_gb", "planned GB"},
                {"goal_gb", "goal GB"},
                {"first_loss", "first loss"},
                {"last_loss", "last loss"},
                {"apart_percent", "apart %"}});
}

void add_train_row_rows(Table& table, const RowResult& result) {
  const BenchRow& row = result.row;
  double peer_ms = result.peer() ? result.peer()->ms() : std::nan("");
  double plain_ms = result.ms_of("plain");
  for (const Measured& one : result.all) {
    if (one.who == "tape") continue;  // it has a table of its own
    std::string what = one.title;
    if (!one.failure.empty()) what += ": failed";
    if (one.who == "graph" && one.value("replayed") == 0) what += ": stayed eager";
    bool is_ours = one.who == "eager" || one.who == "graph";
    double ms = one.ms(), goal = one.who == "graph" ? goal_ms(row, peer_ms) : 0;
    double ranks = row.ranks;
    double tflops = ranks * flops_of(row.shape) / ms / 1e9;
    double peak_gb = one.value("peak_alloc_mb") / 1000;
    double goal_gb = is_ours ? row.goal_gb : 0;
    std::string gpu;
    if (!one.rounds.empty() && one.rounds.front().contains("gpu"))
      gpu = one.rounds.front()["gpu"].get<std::string>();
    // The ranks of a row share one GPU if there is only one.
    double devices = std::isnan(one.value("devices")) ? 1 : one.value("devices");
    auto share = observe::mfu(tflops / devices, observe::peak_tflops(gpu, row.shape.dtype));
    table.add(
        {text(row.title), text(what), Cell{row.ranks, std::to_string(row.ranks)},
         against(ms, goal, 2), goal > 0 ? number(goal, goal < 100 ? 1 : 0) : Cell{nullptr, ""},
         goal > 0 ? against(ms / goal, 1, 2) : Cell{nullptr, ""},
         is_ours ? maybe(ms / peer_ms, 3) : Cell{nullptr, ""},
         is_ours ? against(ms / plain_ms, one.who == "eager" ? 1.15 : 0, 2) : Cell{nullptr, ""},
         maybe(one.value("cpu_issue_ms"), 2),
         maybe(ranks * static_cast<double>(tokens_of(row.shape)) / ms * 1e3, 0),
         row.published_rate > 0 && is_ours ? number(row.published_rate, 0) : Cell{nullptr, ""},
         maybe(tflops, 1), share ? number(*share * 100, 1) : Cell{nullptr, "-"},
         against(peak_gb, goal_gb, 2),
         optional_cell(is_ours, maybe(one.value("planned_mb") / 1000, 2)),
         goal_gb > 0 ? number(goal_gb, 1) : Cell{nullptr, ""}, maybe(one.value("loss0"), 4),
         maybe(one.value("loss"), 4),
         optional_cell(one.who != "peer", maybe(apart(one, result.peer()) * 100, 2))});
  }
}

// For rows measured with --mode tape.
Table tape_table(const std::vector<RowResult>& results) {
  Table table({{"row", "forward of", Table::kLeft},
               {"forward_ms", "ms"},
               {"recorded_forward_ms", "recorded ms"},
               {"more_percent", "more %"},
               {"goal_percent", "goal %"},
               {"forward_host_ms", "host ms"},
               {"recorded_forward_host_ms", "recorded host ms"}});
  for (const RowResult& result : results)
    for (const Measured& one : result.all) {
      if (one.who != "tape") continue;
      table.add({text(result.row.title + (one.failure.empty() ? "" : ": failed")),
                 maybe(one.value("forward_ms"), 2), maybe(one.value("recorded_forward_ms"), 2),
                 against(one.value("more_percent"), kTapeGoal, 1), number(kTapeGoal, 0),
                 maybe(one.value("forward_host_ms"), 2),
                 maybe(one.value("recorded_forward_host_ms"), 2)});
    }
  return table;
}

std::vector<std::string> train_row_explanations(const TrainBench& options,
                                                const std::vector<RowResult>& results) {
  std::vector<std::string> notes;
  bool accumulates = false, shared = false, bf16 = false, published = false;
  bool recomputes = false, taped = false, plain = false, stepped = false;
  for (const RowResult& result : results) {
    notes.push_back(description(result.row.shape) + "; " + std::to_string(result.row.ranks) +
                    (result.row.ranks == 1 ? " rank." : " ranks."));
    accumulates = accumulates || result.row.shape.accumulate > 1;
    shared = shared || result.row.ranks > 1;
    bf16 = bf16 || result.row.shape.dtype == "bf16";
    published = published || result.row.published_rate > 0;
    recomputes = recomputes || train_row_activations(options, result.row) != "none";
    for (const Measured& one : result.all) {
      (one.who == "tape" ? taped : stepped) = true;
      plain = plain || one.who == "plain";
    }
  }
  if (taped)
    notes.push_back(
        "recorded: with a policy that recomputes every block; only the forward is timed, "
        "alternating with one without the policy.");
  if (!stepped) return notes;
  notes.push_back(
      "step ms: rank 0's median on the host's clock, waiting for each step; a step is forward, "
      "backward, clip" +
      std::string(options.clip > 0 ? "" : " (off)") +
      ", AdamW. host ms: until the host has launched the step. FSDP2 is timed the same way.");
  notes.push_back(
      "TFLOP/s, the same count for all: 6 per token and weight in a matrix product, and the causal "
      "half of attention. MFU is their share of the vendor's dense peak (H200: bf16 989, fp32 67). "
      "FSDP2's own count, in its raw lines, includes the embedding and all of attention.");
  notes.push_back(
      "peak GB: the allocator's peak after warm-up, MiB / 1000; for a graph, from just before its "
      "capture. planned GB: what `fsdp plan` expects for eager steps. On the CPU peak GB is the "
      "whole process, and the plan counts tensors only.");
  notes.emplace_back(kApart);
  if (bf16 && options.grad_dtype.empty())
    notes.push_back(
        std::string("gradients of bf16 rows on a GPU: bf16, as the matrix products give them, if "
                    "nothing is reduced") +
        (accumulates ? " or accumulated" : "") + "; else reduced and kept in float32" +
        (shared ? " (2 ranks)" : "") + ". FSDP2's are bf16 and then cast to float32.");
  if (recomputes)
    notes.push_back(
        "selective: products and attention are kept. feed_forward: backward recomputes the product "
        "of gate and up. full: backward recomputes whole blocks (except the last ones, if the row "
        "says so). offload: nothing is recomputed; activations wait in host memory. TFLOP/s don't "
        "count recomputation. FSDP2's ac recomputes whole blocks; its selective one keeps products "
        "and attention.");
  if (plain)
    notes.push_back(
        "plain: the same model code without FSDP, parameters in the row's dtype with float32 "
        "masters, fused AdamW. The goal for eager is 1.15 of it.");
  if (published)
    notes.push_back("published: tokens/s that llmq states for one H100, not for this machine.");
  return notes;
}

// The page's first table: goal, result and peer.
std::string summary(const std::vector<RowResult>& results) {
  std::ostringstream out;
  out << "| row | goal | reached (graph) | eager | FSDP2 in the same run | peak GB, FSDP2's |\n"
         "|---|---|---|---|---|---|\n";
  auto ms = [](double value) {
    return std::isnan(value) ? std::string("-") : number(value, value < 100 ? 2 : 1).text + " ms";
  };
  auto gb = [](double mib) {
    return std::isnan(mib) ? std::string("-") : number(mib / 1000, 2).text;
  };
  for (const RowResult& result : results) {
    const BenchRow& row = result.row;
    const Measured* peer = result.peer();
    double peer_ms = peer ? peer->ms() : std::nan("");
    std::string goal = row.goal_ms > 0 ? "<= " + number(row.goal_ms, 0).text + " ms" : "-";
    if (row.goal_times > 0) goal = "<= " + number(row.goal_times, 1).text + " x FSDP2";
    if (row.goal_gb > 0) goal += ", " + number(row.goal_gb, 1).text + " GB";
    double peak = std::nan("");
    for (const Measured& one : result.all)
      if (one.who == "graph") peak = one.value("peak_alloc_mb");
    out << "| " << row.title << " | " << goal << " | " << ms(result.ms_of("graph")) << " | "
        << ms(result.ms_of("eager")) << " | " << ms(peer_ms) << " | " << gb(peak) << ", "
        << gb(peer ? peer->value("peak_alloc_mb") : std::nan("")) << " |\n";
  }
  return out.str();
}

}  // namespace

int run_rows(const TrainBench& options) {
  train::parse_strategy(options.strategy);  // refuse before anything starts
  auto python =
      options.peer || options.only == "peer" ? python_with_torch("FSDP2 is") : std::nullopt;
  std::vector<RowResult> results;
  bool taped = false, stepped = false;
  for (BenchRow row : rows_named(options.rows, train_rows())) {
    const bool others = train_row_activations(options, row) != row.activations ||
                        keep_last_of(options, row) != row.keep_last;
    if (others)
      row.title += ", " + train_row_activations(options, row) +
                   (options.keep_last > 0 ? " but last " + std::to_string(options.keep_last) : "");
    const bool other_ranks = options.ranks_given && options.ranks != row.ranks;
    if (other_ranks) {
      row.ranks = options.ranks;
      row.title = row.title.substr(0, row.title.find(", 2 ranks")) + ", " +
                  std::to_string(row.ranks) + (row.ranks == 1 ? " rank" : " ranks");
    }
    if (others || other_ranks)
      row.goal_ms = row.goal_gb = row.goal_times = 0;  // goals are for the row's own settings
    results.push_back({row, train_row_contenders(options, row, python)});
    for (const Measured& one : results.back().all) (one.who == "tape" ? taped : stepped) = true;
  }
  Starts start = starts(options.device, options.threads, options.limit, options.keep);
  const bool well = measure(start, results, options.rounds_given ? options.rounds : 1);

  Table steps = empty_table(), tapes = tape_table(results);
  Told told = {.device = options.device,
               .heading = "Training",
               .page = options.page,
               .notes = train_row_explanations(options, results),
               .summary = stepped ? summary(results) : "",
               .json = options.json,
               .write = options.write || (options.rows == "all" && options.peer && python)};
  if (options.peer && !python) told.notes.push_back(kWithoutPeer);
  for (const RowResult& result : results) {
    add_train_row_rows(steps, result);
    compare_losses(result, told.notes);
  }
  if (stepped) told.tables.push_back(&steps);
  if (taped) told.tables.push_back(&tapes);
  tell(told, results);
  return well ? 0 : 1;
}

}  // namespace fsdp::bench
