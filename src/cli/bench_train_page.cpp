#include "cli/bench_train_page.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <fstream>
#include <sstream>

#include "base/table.h"
#include "cli/probes.h"
#include "fsdp/version.h"

namespace fsdp::cli {
namespace {

// The first that somebody printed under this name; empty: nobody did.
std::string said(const std::vector<RowResult>& results, const std::string& who, const char* field) {
  for (const RowResult& result : results)
    for (const Measured& one : result.all)
      for (const Json& line : one.rounds)
        if ((who.empty() || one.who == who) && line.contains(field))
          return line[field].is_string() ? line[field].get<std::string>() : line[field].dump();
  return "";
}

std::string today() {
  std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm parts{};
  char text[32] = "";
  if (gmtime_r(&now, &parts)) std::strftime(text, sizeof text, "%Y-%m-%d", &parts);
  return text;
}

// "fsdp bench train …": what was typed.
std::string own_command() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string all, word;
  bool first = true;
  while (std::getline(file, word, '\0')) {
    if (word.starts_with('/')) word.erase(0, word.rfind('/') + 1);  // no paths of this machine
    all += first ? "./fsdp" : " " + word;
    first = false;
  }
  return all;
}

// Without the folder that it lies in: a page says nothing of the machine's paths.
std::string without_place(std::string text) {
  size_t place = text.find(" in /");
  if (place != std::string::npos) text.erase(place);
  return text;
}

std::string software(const std::vector<RowResult>& results) {
  std::string text = "fsdp.cpp " FSDP_VERSION ", " + probe_compiler().found + "; LibTorch " +
                     without_place(probe_libtorch().found);
  std::string peer = said(results, "peer", "peer");
  if (!peer.empty()) text += "; " + peer;
  for (const char* field : {"cuda", "cudnn", "nccl"})
    if (std::string found = said(results, "peer", field); !found.empty())
      text += std::string(", ") + field + " " + found;
  return text;
}

// Goal, what was reached, and the peer: for those who read one table only.
void add_summary(std::ostream& out, const std::vector<RowResult>& results) {
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
}

}  // namespace

double Measured::value(const char* field) const {
  std::vector<const Json*> order;
  for (const Json& line : rounds) order.push_back(&line);
  if (order.empty()) return std::nan("");
  std::sort(order.begin(), order.end(), [](const Json* a, const Json* b) {
    return (*a)["step_ms"].get<double>() < (*b)["step_ms"].get<double>();
  });
  const Json& middle = *order[order.size() / 2];
  return middle.contains(field) && middle[field].is_number() ? middle[field].get<double>()
                                                             : std::nan("");
}

const Measured* RowResult::peer() const {
  const Measured* best = nullptr;
  for (const Measured& one : all)
    if (one.who == "peer" && !one.rounds.empty() && (!best || one.ms() < best->ms())) best = &one;
  return best;
}

double RowResult::ms_of(const std::string& who) const {
  for (const Measured& one : all)
    if (one.who == who) return one.ms();
  return std::nan("");
}

std::string page_path(const std::vector<RowResult>& results) {
  std::string name = said(results, "", "gpu");
  if (name.empty()) name = "cpu";
  if (name.starts_with("NVIDIA ")) name.erase(0, 7);
  for (char& letter : name)
    letter = std::isalnum(static_cast<unsigned char>(letter))
                 ? static_cast<char>(std::tolower(static_cast<unsigned char>(letter)))
                 : '-';
  return "bench/results/" + name + ".md";
}

std::string page_of(const TrainBench& options, const std::vector<RowResult>& results,
                    const std::string& table, const std::vector<std::string>& notes) {
  std::string gpu = said(results, "", "gpu");
  std::ostringstream out;
  out << "# Training on " << (gpu.empty() ? "the CPU" : "an " + gpu) << ", beside FSDP2\n\n"
      << "| | |\n|---|---|\n"
      << "| machine | " << (options.device == "cuda" ? probe_gpus().found + "; " : "")
      << probe_cores().found << " |\n| software | " << software(results) << " |\n| date | "
      << today() << " |\n| command | `" << own_command() << "` |\n\n";
  add_summary(out, results);
  out << "\n```\n" << table << "```\n\n";
  for (const std::string& note : notes) out << "- " << note << "\n";
  out << "\nWhat each ran, and its raw lines (with --ranks processes of it):\n\n```\n";
  for (const RowResult& result : results)
    for (const Measured& one : result.all) {
      out << "== " << result.row.title << ", " << one.title << ", " << result.row.ranks
          << (result.row.ranks == 1 ? " rank: " : " ranks: ") << one.command << "\n";
      for (const Json& line : one.rounds) out << line.dump() << "\n";
      if (!one.failure.empty()) out << "failed: " << one.failure << "\n";
    }
  out << "```\n";
  return out.str();
}

}  // namespace fsdp::cli
