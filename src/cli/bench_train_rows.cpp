// fsdp bench train --rows: models that have goals on a GPU, each as we train it (eager, and as one
// CUDA graph a step), without FSDP, and by PyTorch's FSDP2 in its best variant, one after the other
// on the same device.
//
// One start that fails or takes too long costs its own line of the table, not the table. --keep
// holds what was measured in a file, so that a run that was cut short goes on where it ended.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <regex>
#include <sstream>

#include "base/log.h"
#include "base/subprocess.h"
#include "base/table.h"
#include "cli/bench_train_page.h"
#include "fsdp/error.h"
#include "observe/throughput.h"
#include "train/training.h"

namespace fsdp::cli {
namespace {

using Kept = std::map<std::string, Json>;  // by key_of

void append(std::vector<std::string>& to, const std::vector<std::string>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

// --- who is measured ---

std::vector<std::string> common_flags(const TrainBench& options, const BenchRow& row) {
  std::ostringstream clip;
  clip << options.clip;
  return {"--device", options.device,
          "--steps",  std::to_string(options.steps_given ? options.steps : row.steps),
          "--warmup", std::to_string(options.warmup_given ? options.warmup : row.warmup),
          "--clip",   clip.str()};
}

// The words that a page shows: programs by their names.
std::string shown(const std::vector<std::string>& program) {
  std::string all;
  for (const std::string& word : program) {
    bool path = word.find('/') != std::string::npos;
    std::string name = path ? std::filesystem::path(word).filename().string() : word;
    if (all.empty() && name.starts_with("python")) name = "python3";
    if (name.ends_with(".py")) name = "bench/peers/" + name;
    all += (all.empty() ? "" : " ") + name;
  }
  return all;
}

Measured ours(const TrainBench& options, const BenchRow& row, const std::string& mode) {
  std::vector<std::string> program = {own_binary(),
                                      "bench",
                                      "train",
                                      "--worker",
                                      mode,
                                      "--threads",
                                      std::to_string(options.threads),
                                      "--strategy",
                                      options.strategy,
                                      "--backend",
                                      options.backend};
  append(program, common_flags(options, row));
  append(program, flags_of(row.shape));
  if (!options.grad_dtype.empty()) append(program, {"--grad-dtype", options.grad_dtype});
  std::string title = mode == "plain" ? "no FSDP, C++ eager" : "fsdp.cpp, " + mode;
  return {.who = mode, .title = title, .command = shown(program), .program = program};
}

Measured peer(const TrainBench& options, const BenchRow& row, const std::string& python,
              const std::string& title, const std::vector<std::string>& variant) {
  bool keeps = train::parse_strategy(options.strategy) == ShardingStrategy::SHARD_GRAD_OP;
  std::vector<std::string> program = {python, peer_script("peer_fsdp2.py")};
  append(program, common_flags(options, row));
  append(program, peer_flags_of(row.shape));
  if (keeps) append(program, {"--reshard", "0"});
  if (row.same_weights) append(program, {"--init", "cpu"});
  append(program, variant);
  return {.who = "peer", .title = title, .command = shown(program), .program = program};
}

std::vector<Measured> everybody(const TrainBench& options, const BenchRow& row,
                                const std::optional<std::string>& python) {
  std::vector<std::string> modes = options.modes.empty() ? row.modes : options.modes;
  std::vector<Measured> all;
  for (const std::string& mode : modes) {
    bool wanted = options.only.empty() || (options.only == "none") == (mode == "plain");
    if (wanted && options.only != "peer") all.push_back(ours(options, row, mode));
  }
  if (!python) return all;
  if (options.device == "cpu") {
    all.push_back(peer(options, row, *python, "FSDP2", {}));
  } else if (row.shape.model == "mlp") {  // nobody knows before which is faster
    all.push_back(peer(options, row, *python, "FSDP2", {}));
    all.push_back(peer(options, row, *python, "FSDP2 + compile", {"--compile"}));
  } else {
    all.push_back(
        peer(options, row, *python, "FSDP2 + compile, cuDNN", {"--compile", "--attn", "cudnn"}));
  }
  return all;
}

// --- measuring ---

std::string key_of(const BenchRow& row, const Measured& one, int round) {
  return std::to_string(row.ranks) + " ranks, round " + std::to_string(round) + ": " + one.command;
}

Kept read_kept(const std::string& path) {
  Kept kept;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    Json entry = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (entry.is_object() && entry.contains("of") && entry.contains("line"))
      kept[entry["of"].get<std::string>()] = entry["line"];
  }
  return kept;
}

void keep(const std::string& path, const std::string& key, const Json& line) {
  if (path.empty()) return;
  std::ofstream file(path, std::ios::app);
  file << Json{{"of", key}, {"line", line}}.dump() << std::endl;
  if (!file)
    throw Error("cannot write to " + path + ".", "--keep names a file in a folder that exists.");
}

void measure(const TrainBench& options, const BenchRow& row, Measured& one, int round, Kept& kept) {
  std::string key = key_of(row, one, round);
  if (auto known = kept.find(key); known != kept.end()) {
    one.rounds.push_back(known->second);
    return;
  }
  Ranks ranks = {.count = row.ranks,
                 .threads = options.threads,
                 .program = one.program,
                 .what = row.title + ", " + one.title,
                 .limit_s = options.limit};
  bool share = one.who == "peer" && options.device == "cuda" && row.ranks > 1;
  try {
    Json line = (share ? run_peers_on_gpu(ranks) : run_ranks(ranks)).front();
    if (!line.contains("step_ms")) throw Error("it printed no step_ms.", "");
    one.rounds.push_back(line);
    keep(options.keep, key, line);
    log::info(ranks.what + ": " + number(line["step_ms"].get<double>(), 2).text + " ms");
  } catch (const Error& error) {
    one.failure = error.what();
    log::warn(ranks.what + ": " + one.failure);
  }
}

// --- telling ---

Cell maybe(double value, int digits) {
  return std::isfinite(value) ? number(value, digits) : Cell{nullptr, "-"};
}

Cell against(double value, double goal, int digits) {
  Cell cell = maybe(value, digits);
  if (goal > 0 && std::isfinite(value)) cell.colour = value <= goal ? "32" : "31";
  return cell;
}

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
                {"goal_gb", "goal GB"},
                {"first_loss", "first loss"},
                {"last_loss", "last loss"}});
}

void add_rows(Table& table, const RowResult& result) {
  const BenchRow& row = result.row;
  double peer_ms = result.peer() ? result.peer()->ms() : std::nan("");
  double plain_ms = result.ms_of("plain");
  for (const Measured& one : result.all) {
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
    // Ranks of a row share one GPU where there is no other.
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
         against(peak_gb, goal_gb, 2), goal_gb > 0 ? number(goal_gb, 1) : Cell{nullptr, ""},
         maybe(one.value("loss0"), 4), maybe(one.value("loss"), 4)});
  }
}

// More than 1 % apart from the peer, at the beginning or at the end.
void compare_losses(const RowResult& result, std::vector<std::string>& notes) {
  const Measured* peer = result.peer();
  if (!peer) return;
  for (const Measured& one : result.all)
    for (const char* field : {"loss0", "loss"}) {
      double mine = one.value(field), theirs = peer->value(field);
      bool apart = one.who != "peer" && !one.rounds.empty() &&
                   !(std::abs(mine - theirs) <= 0.01 * std::abs(theirs));
      if (!apart) continue;
      notes.push_back(result.row.title + ", " + one.title + ": the " +
                      (std::string(field) == "loss0" ? "first" : "last") + " loss is " +
                      number(mine, 4).text + ", FSDP2's " + number(theirs, 4).text + ".");
      log::warn(notes.back());
    }
}

std::vector<std::string> explanations(const TrainBench& options,
                                      const std::vector<RowResult>& results) {
  std::vector<std::string> notes;
  bool accumulates = false, shared = false, bf16 = false, published = false;
  for (const RowResult& result : results) {
    notes.push_back(description(result.row.shape) + "; " + std::to_string(result.row.ranks) +
                    (result.row.ranks == 1 ? " rank." : " ranks."));
    accumulates = accumulates || result.row.shape.accumulate > 1;
    shared = shared || result.row.ranks > 1;
    bf16 = bf16 || result.row.shape.dtype == "bf16";
    published = published || result.row.published_rate > 0;
  }
  notes.push_back(
      "step ms: rank 0's median, on the host's clock, each step waited for; a step is forward, "
      "backward, clip" +
      std::string(options.clip > 0 ? "" : " (off)") +
      ", AdamW. host ms: until the host has given its orders. FSDP2 is timed the same way.");
  notes.push_back(
      "TFLOP/s, for everybody: 6 for each token and weight in a matrix product, and the causal "
      "half "
      "of attention; MFU is their share of the dense "
      "peak that the GPU's vendor states (H200: bf16 989, fp32 67). FSDP2's own "
      "count, in its raw lines, has the embedding and all of attention in it.");
  notes.push_back(
      "peak GB: the most that the allocator had given out, after warm-up, MiB / 1000; of a graph, "
      "from just before it is captured.");
  if (bf16 && options.grad_dtype.empty())
    notes.push_back(
        std::string("gradients of bf16 rows on a GPU: bf16 as the matrix products give them where "
                    "nothing is reduced") +
        (accumulates ? " or accumulated" : "") + "; else reduced and kept in float32" +
        (shared ? " (2 ranks)" : "") + ". FSDP2's are bf16 and then cast to float32.");
  notes.push_back(
      "plain: the same model code without FSDP, parameters in the row's dtype with float32 "
      "masters, "
      "fused AdamW; eager is to be within 1.15 of it.");
  if (published)
    notes.push_back(
        "published: tokens/s that llmq states for one H100, another machine than this.");
  return notes;
}

// A table is coloured for a terminal; a page is none.
std::string without_colours(const std::string& text) {
  static const std::regex colour("\033\\[[0-9;]*m");
  return std::regex_replace(text, colour, "");
}

void write_page(const TrainBench& options, const std::vector<RowResult>& results,
                const std::string& table, const std::vector<std::string>& notes) {
  std::string path = options.page.empty() ? page_path(results) : options.page;
  std::ofstream file(path);
  file << page_of(options, results, table, notes) << std::flush;
  if (!file)
    throw Error("cannot write to " + path + ".",
                "call it from the root of the checkout, or name a file: --write FILE.");
  log::info("wrote " + path);
}

}  // namespace

int run_rows(const TrainBench& options) {
  train::parse_strategy(options.strategy);  // complain before anything starts
  std::vector<BenchRow> rows = rows_named(options.rows);
  auto python =
      options.peer || options.only == "peer" ? python_with_torch("FSDP2 is") : std::nullopt;
  Kept kept = options.keep.empty() ? Kept{} : read_kept(options.keep);
  std::vector<RowResult> results;
  bool failed = false;
  for (const BenchRow& row : rows) {
    RowResult& result = results.emplace_back(RowResult{row, everybody(options, row, python)});
    for (int round = 1; round <= (options.rounds_given ? options.rounds : 1); ++round)
      for (Measured& one : result.all)
        if (one.failure.empty()) measure(options, row, one, round, kept);
    for (const Measured& one : result.all)
      failed = failed || (one.who != "peer" && !one.failure.empty());
  }

  Table table = empty_table();
  std::vector<std::string> apart;
  for (const RowResult& result : results) {
    add_rows(table, result);
    compare_losses(result, apart);
  }
  table.print(std::cout, options.json);
  std::vector<std::string> notes = explanations(options, results);
  notes.insert(notes.end(), apart.begin(), apart.end());
  if (!options.json)
    for (const std::string& note : notes)
      std::cout << (&note == &notes[0] ? "\n" : "") << note << "\n";
  if (options.write) {
    std::ostringstream plain;
    table.print(plain, /*json=*/false);
    write_page(options, results, without_colours(plain.str()), notes);
  }
  return failed ? 1 : 0;
}

}  // namespace fsdp::cli
