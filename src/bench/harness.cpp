#include "bench/harness.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>

#include "base/environment.h"
#include "base/format.h"
#include "base/log.h"
#include "fsdp/error.h"

namespace fsdp::bench {
namespace {

std::vector<double> losses_of(const Contender* one) {
  if (!one || one->rounds.empty() || !one->rounds.front().contains("losses")) return {};
  return one->rounds.front()["losses"].get<std::vector<double>>();
}

// As a share of the first loss; NaN if unknown.
double apart(const Contender& one, const Contender* peer) {
  const std::vector<double> mine = losses_of(&one), theirs = losses_of(peer);
  if (mine.empty() || mine.size() != theirs.size()) return std::nan("");
  double most = 0;
  for (size_t i = 0; i < mine.size(); ++i) most = std::max(most, std::abs(mine[i] - theirs[i]));
  return most / std::abs(theirs.front());
}

using Known = std::map<std::string, Json>;  // what was measured, by command and round

Known read_kept(const std::string& path) {
  Known known;
  std::ifstream file(path);
  for (std::string line; !path.empty() && std::getline(file, line);) {
    const Json entry = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (entry.is_object() && entry.contains("of") && entry.contains("line"))
      known[entry["of"].get<std::string>()] = entry["line"];
  }
  return known;
}

void keep(const std::string& path, const std::string& key, const Json& line) {
  if (path.empty()) return;
  std::ofstream file(path, std::ios::app);
  file << Json{{"of", key}, {"line", line}}.dump() << std::endl;
  if (!file)
    throw Error(formatted("can't write to {}.", path),
                "pass a file in an existing folder: --keep FILE.");
}

std::string peer_script(const std::string& name) {
  namespace fs = std::filesystem;
  const fs::path source = FSDP_PEERS_DIR;
  const fs::path installed = fs::path(own_binary()).parent_path() / "../share/fsdp/peers";
  return (fs::exists(source / name) ? source / name : installed / name).string();
}

// PyTorch ranks that share one GPU need bench/peers/launch.sh.
Json run_contender(const Contender& one, const cli::Ranks& ranks, const Place& on) {
  if (!one.python || on.device != "cuda" || on.ranks == 1) return run_ranks(ranks).front();
  return run_ranks(ranks, {"bash", peer_script("launch.sh"), std::to_string(on.ranks)}).front();
}

// A command that two rows share is measured once.
void measure_one(const Options& options, const Row& row, Contender& one, int round, Known& known) {
  const std::string key = formatted("{} ranks of {} threads, round {}: {}", row.on.ranks,
                                    row.on.threads, round, one.command());
  if (auto found = known.find(key); found != known.end()) {
    one.rounds.push_back(found->second);
    return;
  }
  const std::string title = (row.title.empty() ? "" : row.title + ", ") + one.title;
  const std::string turn =
      options.rounds == 1 ? "" : formatted(", round {} of {}", round, options.rounds);
  const cli::Ranks ranks = {.count = row.on.ranks,
                            .threads = row.on.threads,
                            .program = one.program,
                            .what = title + turn,
                            .limit_s = !options.rows.empty() ? options.limit : 0};
  try {
    const Json line = run_contender(one, ranks, row.on);
    if (!line.contains("step_ms")) throw Error("it printed no step_ms.", "");
    one.rounds.push_back(line);
    known[key] = line;
    keep(options.keep, key, line);
    if (!options.rows.empty())
      log::info(formatted("{}: {:.2f} ms", title, line["step_ms"].get<double>()));
  } catch (const Error& error) {
    if (options.rows.empty()) throw;
    one.failure = error.what();
    log::warn(ranks.what + ": " + one.failure);
  }
}

}  // namespace

// --- running ---

int run_rank(const Place& on, const std::function<std::vector<Json>(const World&)>& work) {
  World world = init({.backend = on.backend});
  at::set_num_threads(on.threads);
  for (const Json& line : work(world))
    if (world.rank() == 0) std::cout << line.dump() << std::endl;
  world.comm().barrier();
  return 0;
}

std::vector<std::string> rank_program(const char* benchmark, const nlohmann::json& row) {
  return {own_binary(), benchmark, "--worker", row.dump()};
}

std::optional<std::string> python_with_torch(const std::string& left_out) {
  std::string python = environment::text("FSDP_TEST_PYTHON").value_or("python3");
  if (run_program({python, "-c", "import torch"}).code == 0) return python;
  log::info(
      formatted("{} left out: {} has no torch (set FSDP_TEST_PYTHON to one).", left_out, python));
  return std::nullopt;
}

std::vector<std::string> peer_program(const std::string& python, const std::string& script,
                                      const std::vector<std::string>& flags) {
  std::vector<std::string> program = {python, peer_script(script)};
  append(program, flags);
  return program;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return seconds_since(start);
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double Samples::median(const std::string& name) const {
  const auto found = all.find(name);
  return found == all.end() ? 0 : bench::median(found->second);
}

void Samples::fill(Json& line) const {
  for (const auto& [name, values] : all) line[name] = bench::median(values);
}

// --- rows and contenders ---

std::optional<std::string> python_for_peer(const Options& options) {
  return options.peer || options.only == "peer" ? python_with_torch("FSDP2 is") : std::nullopt;
}

double Contender::value(const char* field) const {
  std::vector<double> values;
  for (const Json& line : rounds)
    if (line.contains(field) && line[field].is_number()) values.push_back(line[field]);
  return values.empty() ? std::nan("") : median(values);
}

std::string Contender::command() const {
  std::string all;
  for (const std::string& word : program) {
    const bool path = !word.starts_with('{') && word.find('/') != std::string::npos;
    std::string name = path ? std::filesystem::path(word).filename().string() : word;
    if (all.empty() && name.starts_with("python")) name = "python3";
    if (all.empty() && name == "fsdp-bench") name = "fsdp bench";
    if (name.ends_with(".py")) name = "bench/peers/" + name;
    if (name.starts_with('{')) name = "'" + name + "'";
    all += (all.empty() ? "" : " ") + name;
  }
  return all;
}

Contender ours(const char* benchmark, const Row& row, const std::string& title) {
  return {.who = row.mode, .title = title, .program = rank_program(benchmark, row)};
}

Contender theirs(const std::string& python, const Row& row, const std::string& title,
                 const std::vector<std::string>& variant) {
  std::vector<std::string> flags = peer_flags(row);
  append(flags, variant);
  return {.who = "peer",
          .title = title,
          .program = peer_program(python, "peer_fsdp2.py", flags),
          .python = true};
}

const Contender* Result::peer() const {
  const Contender* best = nullptr;
  for (const Contender& one : all)
    if (one.who == "peer" && !one.rounds.empty() && (!best || one.ms() < best->ms())) best = &one;
  return best;
}

const Contender* Result::find(const std::string& who) const {
  for (const Contender& one : all)
    if (one.who == who) return &one;
  return nullptr;
}

double Result::ms_of(const std::string& who) const {
  return find(who) ? find(who)->ms() : std::nan("");
}

double Result::peer_ms() const {
  return peer() ? peer()->ms() : std::nan("");
}

bool measure(const Options& options, std::vector<Result>& results) {
  Known known = read_kept(options.keep);
  bool well = true;
  for (Result& result : results) {
    for (int round = 1; round <= options.rounds; ++round)
      for (Contender& one : result.all)
        if (one.failure.empty()) measure_one(options, result.row, one, round, known);
    for (const Contender& one : result.all) well = well && (one.python || one.failure.empty());
  }
  return well;
}

// --- tables ---

void set(Json& line, const std::string& key, double value, double goal) {
  line[key] = value;
  if (goal > 0) line[key + "_good"] = value <= goal;
}

Json named_line(const Result& result, const Contender& one, bool ours, double goal_ms,
                double peak_gb, double goal_gb) {
  const Row& row = result.row;
  const double ms = one.ms(), tokens = static_cast<double>(tokens_of(row)) * row.on.ranks;
  const bool stayed = one.who == "graph" && one.value("replayed") == 0;
  Json line = {{"row", row.title},
               {"what", one.title + (one.failure.empty() ? "" : ": failed") +
                            (stayed ? ": stayed eager" : "")},
               {"ranks", row.on.ranks},
               {"tokens_s", tokens / ms * 1e3},
               {"first_loss", one.value("loss0")},
               {"last_loss", one.value("loss")}};
  set(line, "step_ms", ms, goal_ms);
  set(line, "peak_gb", peak_gb, goal_gb);
  if (goal_ms > 0) {
    line["goal_ms"] = goal_ms;
    line["goal_ms_text"] = number(goal_ms, goal_ms < 100 ? 1 : 0).text;
    set(line, "times_goal", ms / goal_ms, 1);
  }
  if (goal_gb > 0) line["goal_gb"] = goal_gb;
  if (ours) line["times_peer"] = ms / result.peer_ms();
  if (ours) line["planned_gb"] = one.value("planned_mb") / 1000;
  if (!one.python) line["apart_percent"] = apart(one, result.peer()) * 100;
  return line;
}

std::vector<LineColumn> named_columns(int digits, const std::vector<LineColumn>& before_tokens,
                                      const std::vector<LineColumn>& after_tokens,
                                      const std::vector<LineColumn>& after_memory) {
  std::vector<LineColumn> all = {{"row", "model", kWords},    {"what", "what", kWords},
                                 {"ranks", "ranks", 0},       {"step_ms", "step ms", digits},
                                 {"goal_ms", "goal ms", 0},   {"times_goal", "x goal", 2},
                                 {"times_peer", "x FSDP2", 3}};
  append(all, before_tokens);
  all.push_back({"tokens_s", "tokens/s", 0});
  append(all, after_tokens);
  append(all,
         {{"peak_gb", "peak GB", 2}, {"planned_gb", "planned GB", 2}, {"goal_gb", "goal GB", 1}});
  append(all, after_memory);
  append(all, {{"first_loss", "first loss", 4},
               {"last_loss", "last loss", 4},
               {"apart_percent", "apart %", 2}});
  return all;
}

}  // namespace fsdp::bench
