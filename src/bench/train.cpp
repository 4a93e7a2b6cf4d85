// fsdp bench train: the time of a training step, sharded by us, by PyTorch's FSDP2, and not
// sharded: as many independent processes side by side, in C++ (the same model code) and in Python.
//
// All run in one invocation, in alternating rounds, so that a slow period of the machine affects
// each. Named rows (--rows) have goals on a GPU: eager, and as one CUDA graph per step, beside
// FSDP2 in its best variant.
#include <algorithm>
#include <cmath>

#include "base/format.h"
#include "base/log.h"
#include "bench/benchmarks.h"
#include "bench/flags.h"
#include "fsdp/error.h"
#include "observe/throughput.h"
#include "train/training.h"

namespace fsdp::bench {
namespace {

constexpr double kTapeGoal = 15;  // percent that recording may add to a forward

// --- a model given by flags, or the rows of the CPU ---

// In the order in which they run within a round.
std::vector<Contender> unnamed_contenders(const Options& options, const Row& row,
                                          const std::optional<std::string>& python) {
  const auto wanted = [&](const char* kind) {
    return options.only.empty() || options.only == kind;
  };
  const ShardingStrategy strategy = train::parse_strategy(row.strategy);
  Row plain = row;
  plain.mode = "plain";
  std::vector<Contender> all;
  if (wanted("ours")) all.push_back(ours("train", row, std::string("fsdp.cpp, ") + name(strategy)));
  if (wanted("none")) all.push_back(ours("train", plain, "no FSDP, C++"));
  if (!python) return all;
  if (wanted("none")) {
    all.push_back(theirs(*python, plain, "no FSDP, Python", {"--mode", "none"}));
    all.back().who = "plain";
  }
  if (!wanted("peer") || strategy == ShardingStrategy::HYBRID_SHARD) return all;
  const bool ddp = strategy == ShardingStrategy::NO_SHARD;
  std::vector<std::string> variant = {"--mode", ddp ? "ddp" : "fsdp2"};
  append(variant, peer_recomputes(row));
  all.push_back(theirs(*python, row, ddp ? "PyTorch's DDP" : "PyTorch's FSDP2", variant));
  return all;
}

// The faster of C++ and Python; NaN if neither ran.
double without_fsdp(const Result& result) {
  double best = std::nan("");
  for (const Contender& one : result.all)
    if (one.who == "plain") best = std::fmin(best, one.ms());
  return best;
}

Json unnamed_line(const Result& result, const Contender& one) {
  const Row& row = result.row;
  const Place& on = row.on;
  Json line = {{"model", row.title},
               {"what", one.title},
               {"ranks", on.ranks},
               {"ranks_text", formatted("{} x {}", on.ranks, on.threads)},
               {"threads", on.threads},
               {"first_loss", one.value("loss0")},
               {"last_loss", one.value("loss")},
               {"peak_rss_mb", one.value("maxrss_mb")}};
  for (const char* part : {"step_ms", "forward_ms", "backward_ms", "clip_ms", "update_ms"})
    line[part] = one.value(part);
  std::vector<double> ms;
  for (const Json& round : one.rounds) ms.push_back(round["step_ms"]);
  const auto [low, high] = std::minmax_element(ms.begin(), ms.end());
  line["range"] = formatted("{:.1f}-{:.1f}", *low, *high);
  const double goal = one.who == "eager" ? row.goal_times : 0;
  set(line, "times_none", one.ms() / without_fsdp(result), goal);
  if (goal > 0) line.update({{"goal", goal}, {"goal_text", formatted("<= {:.1f}", goal)}});
  return line;
}

Report unnamed_report(const Options& options, bool goals, const std::vector<Result>& results) {
  const Row& given = options.given;
  const bool whole = options.only.empty(), cpu = given.on.device == "cpu";
  Report report;
  std::vector<Json> lines;
  for (const Result& result : results) {
    report.notes.push_back(description(result.row));
    for (const Contender& one : result.all) lines.push_back(unnamed_line(result, one));
  }
  report.tables = {table_of({{"model", "model", kWords},
                             {"what", "what", kWords},
                             {"ranks", "ranks x threads", 0},
                             {"threads", "", 0},
                             {"step_ms", "step ms", 1},
                             {"range", "over rounds", kWords},
                             {"times_none", whole ? "x no FSDP" : "", 3},
                             {"goal", whole && goals ? "goal" : "", kWords},
                             {"forward_ms", "forward", 1},
                             {"backward_ms", "backward", 1},
                             {"clip_ms", "clip", 1},
                             {"update_ms", "update", 1},
                             {"first_loss", "first loss", 4},
                             {"last_loss", "last loss", 4},
                             {"peak_rss_mb", cpu ? "peak MiB" : "", 0}},
                            lines)};
  append<std::string>(
      report.notes,
      {formatted("step ms: rank 0's median of {} steps after {} for warm-up, then the median of {} "
                 "rounds; the same for the other columns.",
                 given.steps, given.warmup, options.rounds),
       formatted("no FSDP: {} independent processes side by side; ratios are to the faster of the "
                 "two.",
                 given.on.ranks),
       formatted("A step: forward, backward, clip{}, AdamW, zero_grad{}",
                 given.clip > 0 ? "" : " (off)",
                 cpu ? "." : "; the parts are host time, the step includes the device's time.")});
  return report;
}

int run_unnamed(const Options& options, bool cpu_goals) {
  const bool hybrid =
      train::parse_strategy(options.given.strategy) == ShardingStrategy::HYBRID_SHARD;
  if (hybrid && (options.only.empty() || options.only == "peer"))
    log::info("FSDP2 is left out: the peer script has no HYBRID_SHARD.");
  const auto python =
      options.only != "ours" ? python_with_torch("FSDP2 and no FSDP in Python are") : std::nullopt;
  std::vector<Result> results;
  for (const Row& model : cpu_goals ? cpu_rows() : std::vector<Row>{options.given}) {
    Row row = with_flags(model, options);
    row.on = options.given.on;
    row.title = title_of(row);
    results.push_back({row, unnamed_contenders(options, row, python)});
    if (results.back().all.empty())
      throw Error("there is nothing to measure.", "leave out --only.");
  }
  return run_rows(options, results, [&](const auto& measured) {
    return unnamed_report(options, cpu_goals, measured);
  });
}

// --- named rows ---

// A row with other settings than its own has no goals.
std::vector<Row> named_rows(const Options& options) {
  const std::vector<Row> known = rows_named(options.rows, train_rows());
  std::vector<Row> rows = chosen_rows(options, train_rows());
  for (size_t i = 0; i < rows.size(); ++i) {
    Row& row = rows[i];
    const bool others =
        row.activations != known[i].activations || row.keep_last != known[i].keep_last;
    const bool other_ranks = row.on.ranks != known[i].on.ranks;
    if (others)
      row.title += ", " + row.activations +
                   (row.keep_last > 0 ? formatted(" but last {}", row.keep_last) : "");
    if (other_ranks)
      row.title =
          row.title.substr(0, row.title.find(", 2 ranks")) + ", " + counted(row.on.ranks, "rank");
    if (others || other_ranks) row.goal_ms = row.goal_gb = row.goal_times = 0;
  }
  return rows;
}

std::vector<Contender> named_contenders(const Options& options, const Row& row,
                                        const std::optional<std::string>& python) {
  std::vector<Contender> all;
  for (const std::string& mode : options.modes.empty() ? row.modes : options.modes) {
    const bool plain = mode == "plain";
    if (!options.only.empty() && (options.only == "none") != plain) continue;
    if (options.only == "peer") continue;
    Row one = row;
    one.mode = mode;
    one.memory = mode == "eager";
    all.push_back(ours("train", one, plain ? "no FSDP, C++ eager" : "fsdp.cpp, " + mode));
  }
  if (!python || options.only == "ours" || options.only == "none") return all;
  const bool selective = row.activations == "selective";
  const std::vector<std::string> again = peer_recomputes(row);
  const std::string ac = again.empty() ? "" : selective ? " + selective ac" : " + ac";
  const auto add = [&](const std::string& title, std::vector<std::string> variant,
                       const std::vector<std::string>& more = {}) {
    append(variant, more);
    all.push_back(theirs(*python, row, "FSDP2" + title, variant));
  };
  if (row.on.device == "cpu") {
    add(ac, again);
  } else if (row.model == "mlp") {  // either may be faster
    add("", {});
    add(" + compile", {"--compile"});
  } else {
    const std::vector<std::string> best = {"--compile", "--attn", "cudnn"};
    if (selective) add(" + compile + ac, cuDNN", best, {"--ac"});  // either may be faster
    add(" + compile" + ac + ", cuDNN", best, again);
  }
  return all;
}

Json step_line(const Result& result, const Contender& one) {
  const Row& row = result.row;
  const bool graph = one.who == "graph", eager = one.who == "eager", ours = graph || eager;
  const double goal_ms = row.goal_times > 0 ? row.goal_times * result.peer_ms() : row.goal_ms;
  Json line = named_line(result, one, ours, graph ? goal_ms : 0, one.value("peak_alloc_mb") / 1000,
                         ours ? row.goal_gb : 0);
  line["host_ms"] = one.value("cpu_issue_ms");
  if (ours) set(line, "times_plain", one.ms() / result.ms_of("plain"), eager ? 1.15 : 0);
  if (ours && row.published_rate > 0) line["published_tokens_s"] = row.published_rate;
  const double tflops = row.on.ranks * flops_of(row) / one.ms() / 1e9;
  std::string gpu;
  if (!one.rounds.empty()) gpu = one.rounds.front().value("gpu", "");
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
std::vector<std::string> step_notes(const Options& options, const std::vector<Result>& results) {
  const auto any = [&](const std::function<bool(const Row&)>& holds) {
    return std::any_of(results.begin(), results.end(),
                       [&](const Result& result) { return holds(result.row); });
  };
  std::vector<std::string> notes = {
      formatted("step ms: rank 0's median on the host's clock, waiting for each step; a step is "
                "forward, backward, clip{}, AdamW. host ms: until the host has launched the step. "
                "FSDP2 is timed the same way.",
                options.given.clip > 0 ? "" : " (off)"),
      "TFLOP/s, the same count for all: 6 per token and weight in a matrix product, and the causal "
      "half of attention. MFU is their share of the vendor's dense peak (H200: bf16 989, fp32 67). "
      "FSDP2's own count, in its raw lines, includes the embedding and all of attention.",
      "peak GB: the allocator's peak after warm-up, MiB / 1000; for a graph, from just before its "
      "capture. planned GB: what `fsdp plan` expects for eager steps. On the CPU peak GB is the "
      "whole process, and the plan counts tensors only.",
      kApart};
  const bool accumulates = any([](const Row& row) { return row.accumulate > 1; });
  const bool shared = any([](const Row& row) { return row.on.ranks > 1; });
  if (options.given.grad_dtype.empty() && any([](const Row& row) { return row.dtype == "bf16"; }))
    notes.push_back(formatted(
        "gradients of bf16 rows on a GPU: bf16, as the matrix products give them, if nothing is "
        "reduced{}; else reduced and kept in float32{}. FSDP2's are bf16 and then cast to float32.",
        accumulates ? " or accumulated" : "", shared ? " (2 ranks)" : ""));
  if (any([](const Row& row) { return row.activations != "none"; }))
    notes.push_back(
        "selective: products and attention are kept. feed_forward: backward recomputes the product "
        "of gate and up. full: backward recomputes whole blocks (except the last ones, if the row "
        "says so). offload: nothing is recomputed; activations wait in host memory. TFLOP/s don't "
        "count recomputation. FSDP2's ac recomputes whole blocks; its selective one keeps products "
        "and attention.");
  if (std::any_of(results.begin(), results.end(),
                  [](const Result& result) { return result.find("plain"); }))
    notes.push_back(
        "plain: the same model code without FSDP, parameters in the row's dtype with float32 "
        "masters, fused AdamW. The goal for eager is 1.15 of it.");
  if (any([](const Row& row) { return row.published_rate > 0; }))
    notes.push_back("published: tokens/s that llmq states for one H100, not for this machine.");
  return notes;
}

// The page's first table: goal, result and peer.
std::string summary(const std::vector<Result>& results) {
  std::string text =
      "| row | goal | reached (graph) | eager | FSDP2 in the same run | peak GB, FSDP2's |\n"
      "|---|---|---|---|---|---|\n";
  const auto ms = [](double value) {
    return std::isnan(value) ? "-" : formatted("{:.{}f} ms", value, value < 100 ? 2 : 1);
  };
  const auto gb = [](const Contender* one) {
    const double mb = one ? one->value("peak_alloc_mb") : std::nan("");
    return std::isnan(mb) ? "-" : formatted("{:.2f}", mb / 1000);
  };
  for (const Result& result : results) {
    const Row& row = result.row;
    std::string goal = row.goal_ms > 0 ? formatted("<= {:.0f} ms", row.goal_ms) : "-";
    if (row.goal_times > 0) goal = formatted("<= {:.1f} x FSDP2", row.goal_times);
    if (row.goal_gb > 0) goal += formatted(", {:.1f} GB", row.goal_gb);
    text += formatted("| {} | {} | {} | {} | {} | {}, {} |\n", row.title, goal,
                      ms(result.ms_of("graph")), ms(result.ms_of("eager")), ms(result.peer_ms()),
                      gb(result.find("graph")), gb(result.peer()));
  }
  return text;
}

Report report_on(const Options& options, const std::vector<Result>& results) {
  Report report{.heading = "Training"};
  std::vector<Json> steps, tapes;
  for (const Result& result : results) {
    report.notes.push_back(
        formatted("{}; {}.", description(result.row), counted(result.row.on.ranks, "rank")));
    for (const Contender& one : result.all)
      if (one.who == "tape")
        tapes.push_back(tape_line(result, one));
      else
        steps.push_back(step_line(result, one));
  }
  if (!steps.empty())
    report.tables.push_back(table_of(
        named_columns(
            /*digits=*/2, {{"times_plain", "x plain", 2}, {"host_ms", "host ms", 2}},
            {{"published_tokens_s", "published", 0}, {"tflops", "TFLOP/s", 1}, {"mfu", "MFU %", 1}},
            {}),
        steps));
  if (!tapes.empty()) {
    report.tables.push_back(table_of({{"row", "forward of", kWords},
                                      {"forward_ms", "ms", 2},
                                      {"recorded_forward_ms", "recorded ms", 2},
                                      {"more_percent", "more %", 1},
                                      {"goal_percent", "goal %", 0},
                                      {"forward_host_ms", "host ms", 2},
                                      {"recorded_forward_host_ms", "recorded host ms", 2}},
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
  train::parse_strategy(options.given.strategy);  // refuse before anything starts
  const bool cpu = options.rows == "cpu";
  if (cpu) options.rows.clear();
  require_rows(options);
  if (options.rows.empty())
    return run_unnamed(options, cpu || (!model_given(options) && options.given.on.device == "cpu"));
  if (!given(options, "--rounds")) options.rounds = 1;
  const auto python = python_for_peer(options);
  std::vector<Result> results;
  for (const Row& row : named_rows(options))
    results.push_back({row, named_contenders(options, row, python)});
  return run_rows(options, results,
                  [&](const auto& measured) { return report_on(options, measured); });
}

}  // namespace

void add_train(CLI::App& bench, Action& action) {
  auto options = std::make_shared<Options>();
  Row& row = options->given;
  row.on.ranks = 2;
  options->rounds = 3;
  options->write_all = true;
  CLI::App* command = bench.add_subcommand(
      "train", "Time training steps beside PyTorch's FSDP2, and beside no sharding");
  command
      ->add_option(
          "--rows", options->rows,
          "cpu: a Llama of 13.8M and an MLP of 8 x 2048, which have goals on the CPU (the default "
          "if no flag of the model is given); all: every row with a goal on a GPU; or some of "
          "these: 182m, 953m, mlp, 117m, qwen0.5b, qwen1.5b, qwen3b, 3.6b, "
          "3.6b-selective, 3.6b-feed_forward, 3.6b-full, 3.6b-keep8, 3.6b-offload")
      ->type_name("NAMES");
  command
      ->add_option("--strategy", row.strategy,
                   "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD (compared with DDP) or HYBRID_SHARD")
      ->capture_default_str();
  add_row_flags(*command, *options);
  command->get_option("--ranks")->description("Ranks on this host; a named row has its own");
  add_count(*command, "--rounds", options->rounds, "Rounds; each runs everything once");
  add_choice(*command, "--activations", row.activations,
             {"none", "selective", "feed_forward", "full", "offload"},
             "Recomputation, as activations.mode of fsdp train: none, selective, feed_forward, "
             "full or offload; default: none, or the row's own");
  add_count(*command, "--keep-last", row.keep_last,
            "Blocks at the end that --activations doesn't recompute", 0);
  add_choice(*command, "--only", options->only, {"ours", "none", "peer"},
             "Measure only ours, only none (no FSDP), or only the peer (FSDP2)");
  add_named_flags(*command, *options, "Also measure FSDP2, in its best variant", [&] {
    add_choice(*command, "--mode", options->modes, {"eager", "graph", "plain", "tape"},
               "How we train: eager, graph (one CUDA graph per step), plain (no FSDP), tape (the "
               "cost of recording a forward for recomputation); default: the row's own")
        ->delimiter(',');
    add_choice(*command, "--grad-dtype", row.grad_dtype, {"bf16", "fp32"},
               "Dtype of gradients until the update: bf16 or fp32; default: the row's own");
  });
  command->footer(
      "Examples:\n  fsdp bench train\n  fsdp bench train --ranks 4 --threads 4\n"
      "  fsdp bench train --model mlp --width 4096 --batch 8 --only ours --rounds 1\n"
      "  fsdp bench train --device cuda --ranks 1 --model llama --layers 24 --dim 768 --heads 12 "
      "\\\n"
      "    --seq 256 --batch 1 --vocab 8192 --dtype bf16\n"
      "  fsdp bench train --device cuda --rows all --peer --write\n"
      "  fsdp bench train --device cuda --rows 182m,953m --mode graph\n"
      "  fsdp bench train --device cuda --rows 3.6b-selective,3.6b-full --peer\n"
      "FSDP2 needs a python3 with torch 2.11 (or FSDP_TEST_PYTHON=PYTHON); without one it is left "
      "out.");
  set_action<Row>(
      *command, action, row.on, [options] { return run_train(*options); }, train_row);
}

}  // namespace fsdp::bench
