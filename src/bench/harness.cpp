#include "bench/harness.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <ctime>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <map>
#include <regex>
#include <sstream>

#include "base/environment.h"
#include "base/log.h"
#include "base/regular_file.h"
#include "base/subprocess.h"
#include "cli/probes.h"
#include "fsdp/error.h"

namespace fsdp::bench {

// --- ranks and peers ---

int run_rank(const Machine& on, const std::function<Lines(const World&)>& work) {
  World world = init({.backend = on.backend});
  at::set_num_threads(on.threads);
  for (const Json& line : work(world))
    if (world.rank() == 0) std::cout << line.dump() << std::endl;
  world.comm().barrier();
  return 0;
}

Python python_with_torch(const std::string& left_out) {
  std::string python = environment::text("FSDP_TEST_PYTHON").value_or("python3");
  if (run_program({python, "-c", "import torch"}).code == 0) return python;
  log::info(
      formatted("{} left out: {} has no torch (set FSDP_TEST_PYTHON to one).", left_out, python));
  return std::nullopt;
}

Strings peer_program(const Python& python, const std::string& script, const std::string& flags) {
  Strings program = {python.value(), bench_file("peers/" + script)};
  std::istringstream words(flags);
  append(program, {std::istream_iterator<std::string>(words), {}});
  return program;
}

// --- command lines ---

Flags::Flags(CLI::App& bench, const char* name, const char* help, bool& json,
             const std::string& examples)
    : cli::Flags(bench, name, help, ("Examples:\n" + examples).c_str()) {
  flag("--json", json, "One JSON object per line");
}

void Flags::place(Machine& on) {
  choice("--device", on.device, {"cpu", "cuda"}, "cpu or cuda");
  any("--backend", on.backend, "shm, mpi or nccl; default: shm on the CPU, nccl on a GPU");
  number("--ranks", on.ranks, "Ranks on this host");
  command.parse_complete_callback([&on] {
    if (on.backend.empty()) on.backend = on.device == "cuda" ? "nccl" : "shm";
  });
}

// --- contenders on rows ---

double Contender::value(const char* field) const {
  std::vector<double> values;
  for (const Json& line : rounds)
    if (line.contains(field) && line[field].is_number()) values.push_back(line[field]);
  return values.empty() ? std::nan("") : median(values);
}

Contender ours(const char* benchmark, const Row& row, const std::string& title) {
  return {.who = row.mode, .title = title, .program = rank_program(benchmark, for_rank(row))};
}

Contender theirs(const Python& python, const Row& row, const std::string& title,
                 const std::string& variant) {
  const std::string flags = peer_flags(row) + " " + variant;
  return {"peer", title, peer_program(python, "peer_fsdp2.py", flags), /*python=*/true};
}

Contender Result::fastest(const std::string& who) const {
  Contender best;
  for (const Contender& one : all)
    if (one.who == who && one.ran() && !(best.ms() <= one.ms())) best = one;
  return best;
}

namespace {

// As a page shows a command: without paths of this machine. The row says on how many ranks.
std::string command_of(const Strings& program, bool python = false) {
  std::string all = python ? "python3" : "fsdp bench";
  for (size_t i = 1; i < program.size(); ++i) {
    std::string word = program[i];
    if (word.starts_with('/')) word.erase(0, word.rfind('/') + 1);
    if (word.ends_with(".py")) word = "bench/peers/" + word;
    all += word.starts_with('{') ? " '" + word + "'" : " " + word;
  }
  return all;
}

using Known = std::map<std::string, Json>;  // what was measured, by command and round

Known read_kept(const std::string& path) {
  Known known;
  std::istringstream file(read_if_there(path));
  for (std::string line; std::getline(file, line);) {
    const Json entry = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (entry.is_object() && entry.contains("of") && entry.contains("line"))
      known[entry["of"].get<std::string>()] = entry["line"];
  }
  return known;
}

void keep(const std::string& path, const std::string& key, const Json& line) {
  if (path.empty()) return;
  std::ofstream file(place_of_file(path), std::ios::app);
  file << Json{{"of", key}, {"line", line}}.dump() << std::endl;
  if (!file)
    throw Error(formatted("can't write to {}.", path),
                "pass a file in an existing folder: --keep FILE.");
}

// A command that two rows share is measured once.
void measure(const Options& options, const Row& row, Contender& one, int round, Known& known) {
  const std::string key = formatted("{} ranks of {} threads, round {}: {}", row.on.ranks,
                                    row.on.threads, round, command_of(one.program, one.python));
  if (known.contains(key)) return one.rounds.push_back(known[key]);
  const bool named = !options.rows.empty();
  const std::string title = (row.title.empty() ? "" : row.title + ", ") + one.title;
  cli::Ranks ranks = {row.on.ranks, row.on.threads, one.program, title, named ? options.limit : 0};
  if (options.rounds > 1) ranks.what += formatted(", round {} of {}", round, options.rounds);
  if (one.python && row.on.device == "cuda" && row.on.ranks > 1)  // they share one GPU
    ranks.launcher = {"bash", bench_file("peers/launch.sh"), std::to_string(row.on.ranks)};
  try {
    const Json line = run_ranks(ranks).front();
    if (!line.contains("step_ms")) throw Error("it printed no step_ms.", "");
    one.rounds.push_back(known[key] = line);
    keep(options.keep, key, line);
    if (named) log::info(formatted("{}: {:.2f} ms", title, line["step_ms"].get<double>()));
  } catch (const Error& error) {
    if (!named) throw;
    one.failure = error.what();
    log::warn(ranks.what + ": " + one.failure);
  }
}

// --- reports ---

void print_tables(const Report& report, std::ostream& out, bool json) {
  for (const Table& table : report.tables) {
    if (!json && &table != &report.tables.front()) out << "\n";
    table.print(out, json);
  }
}

// The first value printed under this name; empty if there is none.
std::string said(const Results& results, const char* field) {
  for (const Result& result : results)
    for (const Contender& one : result.all)
      for (const Json& line : one.rounds)
        if (line.contains(field))
          return line[field].is_string() ? line[field].get<std::string>() : line[field].dump();
  return "";
}

std::string software(const Results& results) {
  std::string text = cli::versions();
  if (const std::string peer = said(results, "peer"); !peer.empty()) text += "; " + peer;
  for (const char* field : {"cuda", "cudnn", "nccl"})  // only the peer prints them
    if (const std::string found = said(results, field); !found.empty())
      text += formatted(", {} {}", field, found);
  return text;
}

std::string page_of(const Options& options, const Report& report, const Results& results) {
  const std::string gpu = said(results, "gpu");
  const std::time_t now = std::time(nullptr);
  std::istringstream file(read_if_there("/proc/self/cmdline"));
  Strings own;
  for (std::string word; std::getline(file, word, '\0');) own.push_back(word);
  std::ostringstream out;
  out << "# " << report.heading << " on " << (gpu.empty() ? "the CPU" : "an " + gpu)
      << ", beside FSDP2\n\n| | |\n|---|---|\n| machine | "
      << (options.row.on.device == "cuda" ? cli::probe_gpus().found + "; " : "")
      << cli::probe_cores().found << " |\n| software | " << software(results) << " |\n| date | "
      << std::put_time(std::gmtime(&now), "%F") << " |\n| command | `"
      << "./" + command_of(own) << "` |\n\n"
      << report.summary << (report.summary.empty() ? "" : "\n") << "```\n";
  print_tables(report, out, /*json=*/false);
  out << "```\n\n";
  for (const std::string& note : report.notes) out << "- " << note << "\n";
  out << "\nThe command of each row and its raw lines (it ran --ranks processes):\n\n```\n";
  for (const Result& result : results)
    for (const Contender& one : result.all) {
      out << formatted("== {}, {}, {}: {}\n", result.row.title, one.title,
                       count_of(result.row.on.ranks, "rank"), command_of(one.program, one.python));
      for (const Json& line : one.rounds) out << line.dump() << "\n";
      if (!one.failure.empty()) out << "failed: " << one.failure << "\n";
    }
  out << "```\n";
  static const std::regex colour("\033\\[[0-9;]*m");  // a page has no colours
  return std::regex_replace(out.str(), colour, "");
}

// By default bench/results/h200.md for an "NVIDIA H200".
void write_page(const Options& options, const Report& report, const Results& results) {
  std::string name = said(results, "gpu");
  if (name.empty()) name = "cpu";
  if (name.starts_with("NVIDIA ")) name.erase(0, 7);
  std::ranges::transform(name, name.begin(), [](unsigned char letter) {
    return std::isalnum(letter) ? std::tolower(letter) : '-';
  });
  const std::string path =
      options.page.empty() ? formatted("bench/results/{}{}.md", name, report.suffix) : options.page;
  std::ofstream file(place_of_file(path));
  file << page_of(options, report, results) << std::flush;
  if (!file)
    throw Error(formatted("can't write to {}.", path),
                "run it in the root of the checkout, or name a file: --write FILE.");
  log::info("wrote " + path);
}

// Ours and the peer start with the same weights and data, so their losses must agree: by 0.1 % in
// float32, by 1 % in bfloat16, and less if they are near zero.
void compare_losses(const Result& result, Strings& notes) {
  const Contender peer = result.fastest("peer");
  const double share = result.row.dtype == "fp32" ? 0.001 : 0.01;
  for (const Contender& one : result.all)
    for (const auto& [when, field] : {std::pair("first", "loss0"), std::pair("last", "loss")}) {
      // Without FSDP, each of several ranks trains on its own data.
      const bool alone = one.who == "plain" && result.row.on.ranks > 1;
      if (!peer.ran() || one.python || alone || one.who == "tape" || !one.ran()) continue;
      const double mine = one.value(field), theirs = peer.value(field);
      const double allowed = share * std::abs(theirs) + 0.0001 * std::abs(peer.value("loss0"));
      if (std::abs(mine - theirs) <= allowed) continue;
      notes.push_back(formatted("{}, {}: the {} loss is {:.4f}, PyTorch's {:.4f}.",
                                result.row.title, one.title, when, mine, theirs));
      log::warn(notes.back());
    }
}

// The largest difference between two losses of a step, as a share of the first; NaN if unknown.
double apart(const Contender& one, const Contender& peer) {
  const auto losses = [](const Contender& of) {
    return of.ran() ? of.rounds.front().value("losses", std::vector<double>())
                    : std::vector<double>();
  };
  const std::vector<double> mine = losses(one), theirs = losses(peer);
  if (mine.empty() || mine.size() != theirs.size()) return std::nan("");
  double most = 0;
  for (size_t i = 0; i < mine.size(); ++i) most = std::max(most, std::abs(mine[i] - theirs[i]));
  return most / std::abs(theirs.front());
}

}  // namespace

int print(const Report& report, bool json) {
  print_tables(report, std::cout, json);
  if (json) return 0;
  for (const std::string& note : report.notes)
    std::cout << (&note == &report.notes.front() ? "\n" : "") << note << "\n";
  return 0;
}

int run_rows(const Options& options, const std::vector<Row>& rows, const Python& python,
             ContendersOf* contenders_of, ReportOn* report_on) {
  Results results;
  for (const Row& row : rows) results.push_back({row, contenders_of(options, row, python)});
  Known known = read_kept(options.keep);
  bool any = false, peer = false, well = true;
  for (auto& [row, all] : results) {
    for (int round = 1; round <= options.rounds; ++round)
      for (Contender& one : all)
        if (one.failure.empty()) measure(options, row, one, round, known);
    for (const Contender& one : all) {
      any = true;
      peer = peer || one.python;
      well = well && (one.python || one.failure.empty());
    }
  }
  if (!any) throw Error("there is nothing to measure.", "leave out --only.");
  Report report = report_on(options, results);
  if (options.peer && options.wants("peer") && !peer)
    report.notes.push_back(
        "FSDP2 (--peer) is missing: there was no Python with torch (set FSDP_TEST_PYTHON to one).");
  for (const Result& result : results) compare_losses(result, report.notes);
  print(report, options.json);
  const bool all = !report.summary.empty() && options.rows == "all" && options.peer && peer;
  if (given(options, "--write") || all) write_page(options, report, results);
  return well ? 0 : 1;
}

void set(Json& line, const std::string& key, double value, double goal) {
  line[key] = value;
  if (goal > 0) line[key + "_good"] = value <= goal;
}

Json line_of(const Result& result, const Contender& one, double goal_ms, double goal_gb) {
  const Row& row = result.row;
  const double ms = one.ms(), tokens = static_cast<double>(row.tokens()) * row.on.ranks;
  const bool stayed = one.who == "graph" && one.value("replayed") == 0;
  Json line = {{"row", row.title},
               {"what", one.title + (one.failure.empty() ? "" : ": failed") +
                            (stayed ? ": stayed eager" : "")},
               {"ranks", row.on.ranks},
               {"tokens_s", tokens / ms * 1e3},
               {"first_loss", one.value("loss0")},
               {"last_loss", one.value("loss")}};
  set(line, "step_ms", ms, goal_ms);
  set(line, "peak_gb", one.value("peak_alloc_mb") / 1000, goal_gb);
  if (goal_gb > 0) line["goal_gb"] = goal_gb;
  if (goal_ms > 0) {
    line["goal_ms"] = goal_ms;
    line["goal_ms_text"] = formatted("{:.{}f}", goal_ms, goal_ms < 100 ? 1 : 0);
    set(line, "times_goal", ms / goal_ms, 1);
  }
  if (one.python) return line;
  line["apart_percent"] = apart(one, result.fastest("peer")) * 100;
  if (one.who == "plain") return line;
  line["times_peer"] = ms / result.fastest("peer").ms();
  line["planned_gb"] = one.value("planned_mb") / 1000;
  return line;
}

}  // namespace fsdp::bench
