// The report of a benchmark with named rows, and its page: machine, versions, command, tables and
// every raw line.
#include <algorithm>
#include <cctype>
#include <chrono>
#include <cmath>
#include <ctime>
#include <fstream>
#include <iostream>
#include <regex>
#include <sstream>

#include "base/format.h"
#include "base/log.h"
#include "bench/flags.h"
#include "bench/harness.h"
#include "cli/probes.h"
#include "fsdp/error.h"
#include "fsdp/version.h"

namespace fsdp::bench {
namespace {

// The first value printed under this name; empty if there is none.
std::string said(const std::vector<Result>& results, const char* field) {
  for (const Result& result : results)
    for (const Contender& one : result.all)
      for (const Json& line : one.rounds)
        if (line.contains(field))
          return line[field].is_string() ? line[field].get<std::string>() : line[field].dump();
  return "";
}

std::string today() {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm parts{};
  char text[32] = "";
  if (gmtime_r(&now, &parts)) std::strftime(text, sizeof text, "%Y-%m-%d", &parts);
  return text;
}

// The command as typed: "./fsdp bench train …".
std::string own_command() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string all, word;
  while (std::getline(file, word, '\0')) {
    if (word.starts_with('/')) word.erase(0, word.rfind('/') + 1);  // without paths of this machine
    all += all.empty() ? "./fsdp bench" : " " + word;
  }
  return all;
}

std::string software(const std::vector<Result>& results) {
  std::string libtorch = cli::probe_libtorch().found;
  libtorch.erase(std::min(libtorch.find(" in /"), libtorch.size()));  // no paths of this machine
  std::string text =
      "fsdp.cpp " FSDP_VERSION ", " + cli::probe_compiler().found + "; LibTorch " + libtorch;
  if (const std::string peer = said(results, "peer"); !peer.empty()) text += "; " + peer;
  for (const char* field : {"cuda", "cudnn", "nccl"})  // only the peer prints them
    if (const std::string found = said(results, field); !found.empty())
      text += formatted(", {} {}", field, found);
  return text;
}

// bench/results/h200.md for an "NVIDIA H200".
std::string default_path(const std::string& gpu, const std::string& suffix) {
  std::string name = gpu.empty() ? "cpu" : gpu;
  if (name.starts_with("NVIDIA ")) name.erase(0, 7);
  for (char& letter : name) {
    const auto byte = static_cast<unsigned char>(letter);
    letter = std::isalnum(byte) ? static_cast<char>(std::tolower(byte)) : '-';
  }
  return formatted("bench/results/{}{}.md", name, suffix);
}

std::string page_of(const Options& options, const Report& report,
                    const std::vector<Result>& results) {
  const std::string gpu = said(results, "gpu");
  std::ostringstream out;
  out << "# " << report.heading << " on " << (gpu.empty() ? "the CPU" : "an " + gpu)
      << ", beside FSDP2\n\n| | |\n|---|---|\n| machine | "
      << (options.given.on.device == "cuda" ? cli::probe_gpus().found + "; " : "")
      << cli::probe_cores().found << " |\n| software | " << software(results) << " |\n| date | "
      << today() << " |\n| command | `" << own_command() << "` |\n\n";
  if (!report.summary.empty()) out << report.summary << "\n";
  out << "```\n";
  for (const Table& table : report.tables) {
    if (&table != &report.tables.front()) out << "\n";
    table.print(out, /*json=*/false);
  }
  out << "```\n\n";
  for (const std::string& note : report.notes) out << "- " << note << "\n";
  out << "\nThe command of each row and its raw lines (it ran --ranks processes):\n\n```\n";
  for (const Result& result : results)
    for (const Contender& one : result.all) {
      out << formatted("== {}, {}, {}: {}\n", result.row.title, one.title,
                       counted(result.row.on.ranks, "rank"), one.command());
      for (const Json& line : one.rounds) out << line.dump() << "\n";
      if (!one.failure.empty()) out << "failed: " << one.failure << "\n";
    }
  out << "```\n";
  static const std::regex colour("\033\\[[0-9;]*m");  // a page has no colours
  return std::regex_replace(out.str(), colour, "");
}

// Ours and the peer start with the same weights and data, so their losses must agree: by 0.1 % in
// float32, by 1 % in bfloat16, and less if they are near zero.
void compare_losses(const Result& result, std::vector<std::string>& notes) {
  const Contender* peer = result.peer();
  if (!peer) return;
  for (const Contender& one : result.all)
    for (const char* field : {"loss0", "loss"}) {
      // Without FSDP, each of several ranks trains on its own data.
      const bool alone = one.who == "plain" && result.row.on.ranks > 1;
      if (one.python || alone || one.who == "tape" || one.rounds.empty()) continue;
      const double mine = one.value(field), theirs = peer->value(field);
      const double share = result.row.dtype == "fp32" ? 0.001 : 0.01;
      if (std::abs(mine - theirs) <=
          share * std::abs(theirs) + 0.0001 * std::abs(peer->value("loss0")))
        continue;
      notes.push_back(formatted("{}, {}: the {} loss is {:.4f}, PyTorch's {:.4f}.",
                                result.row.title, one.title,
                                field == std::string("loss0") ? "first" : "last", mine, theirs));
      log::warn(notes.back());
    }
}

void print(const Options& options, const Report& report) {
  for (const Table& table : report.tables) {
    if (!options.json && &table != &report.tables.front()) std::cout << "\n";
    table.print(std::cout, options.json);
  }
  if (options.json) return;
  for (const std::string& note : report.notes)
    std::cout << (&note == &report.notes.front() ? "\n" : "") << note << "\n";
}

}  // namespace

std::string place_note(const Row& row) {
  return formatted("{}; {} ranks x {} threads, {}", description(row), row.on.ranks, row.on.threads,
                   row.on.backend);
}

std::string time_note(const Row& row) {
  return formatted("Time: rank 0's median of {} steps after {} for warm-up.", row.steps,
                   row.warmup);
}

int run_rows(const Options& options, std::vector<Result> results,
             const std::function<Report(const std::vector<Result>& results)>& report_on) {
  const bool well = measure(options, results);
  Report report = report_on(results);
  const bool peer = std::any_of(results.begin(), results.end(), [](const Result& result) {
    return std::any_of(result.all.begin(), result.all.end(),
                       [](const auto& one) { return one.python; });
  });
  if (options.peer && options.only != "ours" && options.only != "none" && !peer)
    report.notes.push_back(
        "FSDP2 (--peer) is missing: there was no Python with torch (set FSDP_TEST_PYTHON to one).");
  for (const Result& result : results) compare_losses(result, report.notes);
  print(options, report);
  const bool all = options.write_all && options.rows == "all" && options.peer && peer;
  if (!given(options, "--write") && !all) return well ? 0 : 1;
  const std::string path =
      options.page.empty() ? default_path(said(results, "gpu"), report.suffix) : options.page;
  std::ofstream file(path);
  file << page_of(options, report, results) << std::flush;
  if (!file)
    throw Error(formatted("can't write to {}.", path),
                "run it in the root of the checkout, or name a file: --write FILE.");
  log::info("wrote " + path);
  return well ? 0 : 1;
}

}  // namespace fsdp::bench
