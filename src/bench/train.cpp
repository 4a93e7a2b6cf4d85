// fsdp bench train: the time of a training step, sharded by us, by PyTorch's FSDP2, and not
// sharded: as many independent processes side by side, in C++ (the same model code) and in Python.
//
// All run in one invocation, in alternating rounds, so that a slow period of the machine affects
// each. Named rows (--rows) have goals on a GPU: eager, and as one CUDA graph per step, beside
// FSDP2 in its best variant.
#include <algorithm>
#include <cmath>
#include <utility>

#include "base/log.h"
#include "bench/harness.h"
#include "observe/throughput.h"
#include "train/training.h"

namespace fsdp::bench {
namespace {

constexpr double kTapeGoal = 15;  // percent that recording may add to a forward

Contenders train_contenders(const Options& options, Row row, const Python& python) {
  const bool named = !row.stages;
  const ShardingStrategy strategy = train::parse_strategy(row.strategy);
  Contenders all;
  for (const std::string& mode : options.modes.empty() ? row.modes : options.modes) {
    const std::string title = named ? mode : name(strategy), none = named ? " eager" : "";
    row.mode = mode;
    row.memory = named && mode == "eager";
    const bool plain = mode == "plain";
    if (plain && row.optim != "adamw") continue;  // it has no other
    if (options.wants(plain ? "none" : "ours"))
      all.push_back(ours("train", row, plain ? "no FSDP, C++" + none : "fsdp.cpp, " + title));
  }
  const auto add = [&](const std::string& title, const std::string& variant) {
    all.push_back(theirs(python, row, title, variant));
  };
  if (python && !named && options.wants("none")) {
    add("no FSDP, Python", "--mode none");
    all.back().who = "plain";
  }
  if (!python || !options.wants("peer")) return all;
  const bool selective = row.activations == "selective", recomputes = row.activations != "none";
  const std::string again = selective ? "--ac=selective" : recomputes ? "--ac" : "";
  const std::string ac = selective ? " + selective ac" : recomputes ? " + ac" : "";
  const std::string best = "--compile --attn cudnn ";
  if (!named && strategy == ShardingStrategy::NO_SHARD) {
    add("PyTorch's DDP", "--mode ddp " + again);
  } else if (!named && strategy == ShardingStrategy::HYBRID_SHARD) {
    log::info("FSDP2 is left out: the peer script has no HYBRID_SHARD.");
  } else if (!named) {
    add("PyTorch's FSDP2", "--mode fsdp2 " + again);
  } else if (row.on.device == "cpu") {
    add("FSDP2" + ac, again);
  } else if (row.model == "mlp") {  // either may be faster
    add("FSDP2", "");
    add("FSDP2 + compile", "--compile");
  } else {
    if (selective) add("FSDP2 + compile + ac, cuDNN", best + "--ac");  // either may be faster
    add("FSDP2 + compile" + ac + ", cuDNN", best + again);
  }
  return all;
}

// A model given by flags, or the rows of the CPU.
std::vector<Row> unnamed_rows(const Options& options, bool goals) {
  std::vector<Row> rows = goals ? rows_of("cpu") : std::vector<Row>{options.row};
  for (Row& row : rows) {
    row = with_flags(row, options);
    row.title = title_of(row);
    row.modes = {"eager", "plain"};
    row.stages = true;
  }
  return rows;
}

Json unnamed_line(const Result& result, const Contender& one) {
  const Row& row = result.row;
  Json line = line_of(result, one);
  line.update({{"model", row.title},
               {"ranks_text", formatted("{} x {}", row.on.ranks, row.on.threads)},
               {"threads", row.on.threads},
               {"peak_rss_mb", one.value("maxrss_mb")}});
  for (const char* part : {"forward_ms", "backward_ms", "clip_ms", "update_ms"})
    line[part] = one.value(part);
  std::vector<double> ms;
  for (const Json& round : one.rounds) ms.push_back(round["step_ms"]);
  line["range"] = formatted("{:.1f}-{:.1f}", std::ranges::min(ms), std::ranges::max(ms));
  const double goal = one.who == "eager" ? row.goal_times : 0;
  set(line, "times_none", one.ms() / result.fastest("plain").ms(), goal);
  if (goal > 0) line.update({{"goal", goal}, {"goal_text", formatted("<= {:.1f}", goal)}});
  return line;
}

Report unnamed_report(const Options& options, const Results& results) {
  const Row& row = options.row;
  const bool whole = options.only.empty(), cpu = row.on.device == "cpu";
  const bool goals = results.front().row.goal_times > 0;
  Report report;
  Lines lines;
  for (const Result& result : results) {
    report.notes.push_back(description(result.row));
    for (const Contender& one : result.all) lines.push_back(unnamed_line(result, one));
  }
  report.tables = {table_of(
      formatted(
          "model; what; ranks=ranks x threads .0; threads= .0; step_ms .1; range=over rounds; "
          "times_none={} .3; goal={}; forward_ms=forward .1; backward_ms=backward .1; "
          "clip_ms=clip .1; update_ms=update .1; first_loss .4; last_loss .4; "
          "peak_rss_mb={} .0",
          whole ? "x no FSDP" : "", whole && goals ? "goal" : "", cpu ? "peak MiB" : ""),
      lines)};
  append<std::string>(
      report.notes,
      {formatted("step ms: rank 0's median of {} steps after {} for warm-up, then the median of {} "
                 "rounds; the same for the other columns.",
                 row.steps, row.warmup, options.rounds),
       formatted("no FSDP: {} independent processes side by side; ratios are to the faster of the "
                 "two.",
                 row.on.ranks),
       formatted("A step: forward, backward, clip{}, {}, zero_grad{}", row.clip > 0 ? "" : " (off)",
                 row.optim == "muon" ? "Muon" : "AdamW",
                 cpu ? "." : "; the parts are host time, the step includes the device's time.")});
  return report;
}

// A row with other settings than its own has no goals.
std::vector<Row> named_rows(const Options& options) {
  std::vector<Row> rows = rows_named(options.rows, "train");
  for (Row& row : rows) {
    const Row own = std::exchange(row, with_flags(row, options));
    const bool others = row.activations != own.activations || row.keep_last != own.keep_last;
    const bool other_ranks = row.on.ranks != own.on.ranks, other_optim = row.optim != own.optim;
    if (other_optim) row.title += ", " + row.optim;
    if (others)
      row.title += ", " + row.activations +
                   (row.keep_last > 0 ? formatted(" but last {}", row.keep_last) : "");
    if (other_ranks)
      row.title =
          row.title.substr(0, row.title.find(", 2 ranks")) + ", " + count_of(row.on.ranks, "rank");
    if (others || other_ranks || other_optim) row.goal_ms = row.goal_gb = row.goal_times = 0;
  }
  return rows;
}

Json step_line(const Result& result, const Contender& one) {
  const Row& row = result.row;
  const bool graph = one.who == "graph", eager = one.who == "eager", ours = graph || eager;
  const double goal_ms =
      row.goal_times > 0 ? row.goal_times * result.fastest("peer").ms() : row.goal_ms;
  Json line = line_of(result, one, graph ? goal_ms : 0, ours ? row.goal_gb : 0);
  line["host_ms"] = one.value("cpu_issue_ms");
  if (ours) set(line, "times_plain", one.ms() / result.fastest("plain").ms(), eager ? 1.15 : 0);
  if (ours && row.published_rate > 0) line["published_tokens_s"] = row.published_rate;
  const double tflops = row.on.ranks * row.flops() / one.ms() / 1e9;
  const std::string gpu = one.rounds.empty() ? "" : one.rounds.front().value("gpu", "");
  // The ranks of a row share one GPU if there is only one.
  const double devices = std::isnan(one.value("devices")) ? 1 : one.value("devices");
  const auto share = observe::mfu(tflops / devices, observe::peak_tflops(gpu, row.dtype));
  line["tflops"] = tflops;
  line["mfu"] = share ? *share * 100 : std::nan("");
  return line;
}

Json tape_line(const Result& result, const Contender& one) {
  Json line = {{"row", result.row.title + (one.failure.empty() ? "" : ": failed")},
               {"goal_percent", kTapeGoal}};
  for (const char* time :
       {"forward_ms", "recorded_forward_ms", "forward_host_ms", "recorded_forward_host_ms"})
    line[time] = one.value(time);
  set(line, "more_percent", one.value("more_percent"), kTapeGoal);
  return line;
}

// What the columns of the steps mean.
Strings step_notes(const Options& options, const Results& results) {
  const auto any = [&](const auto& holds) {
    return std::ranges::any_of(results, [&](const Result& result) { return holds(result.row); });
  };
  Strings notes = {
      formatted("step ms: rank 0's median on the host's clock, waiting for each step; a step is "
                "forward, backward, clip{}, {}. host ms: until the host has launched the step. "
                "FSDP2 is timed the same way, with AdamW.",
                options.row.clip > 0 ? "" : " (off)",
                options.row.optim == "muon" ? "Muon" : "AdamW"),
      "TFLOP/s, the same count for all: 6 per token and weight in a matrix product, and the causal "
      "half of attention. MFU is their share of the vendor's dense peak (H200: bf16 989, fp32 67). "
      "FSDP2's own count, in its raw lines, includes the embedding and all of attention.",
      "peak GB: the allocator's peak after warm-up, MiB / 1000; for a graph, from just before its "
      "capture. planned GB: what `fsdp plan` expects for eager steps. On the CPU peak GB is the "
      "whole process, and the plan counts tensors only.",
      kApart};
  if (options.row.grad_dtype.empty() && any([](const Row& row) { return row.dtype != "fp32"; }))
    notes.push_back(formatted(
        "gradients of bf16 and fp8 rows on a GPU: bf16, as the matrix products give them, if "
        "nothing is "
        "reduced{}; else reduced and kept in float32{}. FSDP2's are bf16 and then cast to float32.",
        any([](const Row& row) { return row.accumulate > 1; }) ? " or accumulated" : "",
        any([](const Row& row) { return row.on.ranks > 1; }) ? " (2 ranks)" : ""));
  if (any([](const Row& row) { return row.activations != "none"; }))
    notes.push_back(
        "selective: products and attention are kept. feed_forward: backward recomputes the product "
        "of gate and up. full: backward recomputes whole blocks (except the last ones, if the row "
        "says so). offload: nothing is recomputed; activations wait in host memory. long: full, "
        "from inputs in host memory, with feed-forwards in tiles. TFLOP/s don't count "
        "recomputation. FSDP2's ac recomputes whole blocks; its selective one keeps products "
        "and attention.");
  if (std::ranges::any_of(results, [](const Result& one) { return one.fastest("plain").ran(); }))
    notes.push_back(
        "plain: the same model code without FSDP, parameters in the row's dtype with float32 "
        "masters, fused AdamW. The goal for eager is 1.15 of it.");
  if (any([](const Row& row) { return row.published_rate > 0; }))
    notes.push_back("published: tokens/s that llmq states for one H100, not for this machine.");
  return notes;
}

// The page's first table: goal, result and peer.
std::string summary(const Results& results) {
  std::string text =
      "| row | goal | reached (graph) | eager | FSDP2 in the same run | peak GB, FSDP2's |\n"
      "|---|---|---|---|---|---|\n";
  const auto shown = [](double value, int digits, const char* unit = "") {
    return std::isnan(value) ? "-" : formatted("{:.{}f}{}", value, digits, unit);
  };
  const auto ms = [&](const Contender& of) { return shown(of.ms(), of.ms() < 100 ? 2 : 1, " ms"); };
  const auto gb = [&](const Contender& of) { return shown(of.value("peak_alloc_mb") / 1e3, 2); };
  for (const Result& result : results) {
    const Row& row = result.row;
    std::string goal = row.goal_ms > 0 ? formatted("<= {:.0f} ms", row.goal_ms) : "-";
    if (row.goal_times > 0) goal = formatted("<= {:.1f} x FSDP2", row.goal_times);
    if (row.goal_gb > 0) goal += formatted(", {:.1f} GB", row.goal_gb);
    const Contender graph = result.fastest("graph"), peer = result.fastest("peer");
    text += formatted("| {} | {} | {} | {} | {} | {}, {} |\n", row.title, goal, ms(graph),
                      ms(result.fastest("eager")), ms(peer), gb(graph), gb(peer));
  }
  return text;
}

Report named_report(const Options& options, const Results& results) {
  Report report{.heading = "Training"};
  Lines steps, tapes;
  for (const Result& result : results) {
    report.notes.push_back(
        formatted("{}; {}.", description(result.row), count_of(result.row.on.ranks, "rank")));
    for (const Contender& one : result.all)
      if (one.who == "tape")
        tapes.push_back(tape_line(result, one));
      else
        steps.push_back(step_line(result, one));
  }
  if (!steps.empty())
    report.tables.push_back(table_of(
        "row=model; what; ranks .0; step_ms .2; goal_ms .0; times_goal=x goal .2; "
        "times_peer=x FSDP2 .3; times_plain=x plain .2; host_ms .2; tokens_s=tokens/s .0; "
        "published_tokens_s=published .0; tflops=TFLOP/s .1; mfu=MFU % .1; peak_gb=peak GB .2; "
        "planned_gb=planned GB .2; goal_gb=goal GB .1; first_loss .4; last_loss .4; "
        "apart_percent=apart % .2",
        steps));
  if (!tapes.empty()) {
    report.tables.push_back(
        table_of("row=forward of; forward_ms=ms .2; recorded_forward_ms=recorded ms .2; "
                 "more_percent=more % .1; goal_percent=goal % .0; forward_host_ms=host ms .2; "
                 "recorded_forward_host_ms=recorded host ms .2",
                 tapes));
    report.notes.push_back(
        "recorded: with a policy that recomputes every block; only the forward is timed, "
        "alternating with one without the policy.");
  }
  if (steps.empty()) return report;
  append(report.notes, step_notes(options, results));
  report.summary = summary(results);
  return report;
}

int run_train(Options options) {
  train::parse_strategy(options.row.strategy);  // refuse before anything starts
  const bool by_default = options.row.on.device == "cpu" && !given_in(options, kModel);
  const bool goals = options.rows == "cpu" || (options.rows.empty() && by_default);
  if (goals) options.rows.clear();
  require_rows(options);
  const bool named = !options.rows.empty();
  if (named && !given(options, "--rounds")) options.rounds = 1;
  Python python;
  if (!named && options.only != "ours")
    python = python_with_torch("FSDP2 and no FSDP in Python are");
  else if (options.beside_peer())
    python = python_with_torch("FSDP2 is");
  return run_rows(options, named ? named_rows(options) : unnamed_rows(options, goals), python,
                  train_contenders, named ? named_report : unnamed_report);
}

}  // namespace

void add_train(CLI::App& bench, cli::Action& action) {
  auto options = std::make_shared<Options>();
  Row& row = options->row;
  row.on.ranks = 2;
  options->rounds = 3;
  Flags flags(bench, "train", "Time training steps beside PyTorch's FSDP2, and beside no sharding",
              options->json,
              R"(  fsdp bench train
  fsdp bench train --ranks 4 --threads 4
  fsdp bench train --model mlp --width 4096 --batch 8 --only ours --rounds 1
  fsdp bench train --device cuda --ranks 1 --model llama --layers 24 --dim 768 --heads 12 \
    --seq 256 --batch 1 --vocab 8192 --dtype bf16
  fsdp bench train --device cuda --rows all --peer --write
  fsdp bench train --device cuda --rows 182m,953m --mode graph
  fsdp bench train --device cuda --rows 3.6b-selective,3.6b-full --peer
FSDP2 needs a python3 with torch 2.11 (or FSDP_TEST_PYTHON=PYTHON); without one it is left out.)");
  flags.any("--rows", options->rows,
            "cpu: a Llama of 13.8M and an MLP of 8 x 2048, which have goals on the CPU (the "
            "default if no flag of the model is given); all: every row with a goal on a GPU; or "
            "some of these: 182m, 953m, mlp, 117m, qwen0.5b, qwen1.5b, qwen3b, 3.6b, "
            "3.6b-selective, 3.6b-feed_forward, 3.6b-full, 3.6b-keep8, 3.6b-offload, 8b; in fp8: "
            "953m-fp8, 953m-fp8-rowwise, 953m-fp8-rowwise_bf16_grad, qwen0.5b-fp8, qwen1.5b-fp8, "
            "qwen3b-fp8",
            "NAMES");
  flags.any("--strategy", row.strategy,
            "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD (compared with DDP) or HYBRID_SHARD");
  add_row_flags(flags, *options);
  flags.command.get_option("--ranks")->description("Ranks on this host; a named row has its own");
  flags.number("--rounds", options->rounds, "Rounds; each runs everything once");
  flags.choice("--activations", row.activations,
               {"none", "selective", "feed_forward", "full", "offload", "long"},
               "Recomputation, as activations.mode of fsdp train: none, selective, feed_forward, "
               "full, offload or long; default: none, or the row's own");
  flags.command.get_option("--activations")->default_str("");
  flags.choice("--optim", row.optim, {"adamw", "muon"},
               "What updates our parameters: adamw or muon; FSDP2 and plain have AdamW");
  flags.number("--keep-last", row.keep_last,
               "Blocks at the end that --activations doesn't recompute", 0);
  flags.choice("--only", options->only, {"ours", "none", "peer"},
               "Measure only ours, only none (no FSDP), or only the peer (FSDP2)");
  add_named_flags(flags, *options, "Also measure FSDP2, in its best variant");
  flags.choice("--mode", options->modes, {"eager", "graph", "plain", "tape"},
               "How we train: eager, graph (one CUDA graph per step), plain (no FSDP), tape (the "
               "cost of recording a forward for recomputation); default: the row's own");
  flags.choice("--grad-dtype", row.grad_dtype, {"bf16", "fp32"},
               "Dtype of gradients until the update: bf16 or fp32; default: the row's own");
  flags.runs(action, options, run_train, train_row);
}

}  // namespace fsdp::bench
