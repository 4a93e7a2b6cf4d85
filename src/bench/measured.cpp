#include "bench/measured.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <regex>
#include <sstream>

#include "base/log.h"
#include "bench/page.h"
#include "fsdp/error.h"

namespace fsdp::bench {
namespace {

// The command as a page shows it: programs without their paths.
std::string shown(const std::vector<std::string>& program) {
  std::string all;
  for (const std::string& word : program) {
    bool path = word.find('/') != std::string::npos;
    std::string name = path ? std::filesystem::path(word).filename().string() : word;
    if (all.empty() && name.starts_with("python")) name = "python3";
    if (all.empty() && name == "fsdp-bench") name = "fsdp bench";
    if (name.ends_with(".py")) name = "bench/peers/" + name;
    all += (all.empty() ? "" : " ") + name;
  }
  return all;
}

std::string key_of(const BenchRow& row, const Measured& one, int threads, int round) {
  return std::to_string(row.ranks) + " ranks of " + std::to_string(threads) + " threads, round " +
         std::to_string(round) + ": " + one.command;
}

void keep(const std::string& path, const std::string& key, const Json& line) {
  if (path.empty()) return;
  std::ofstream file(path, std::ios::app);
  file << Json{{"of", key}, {"line", line}}.dump() << std::endl;
  if (!file)
    throw Error("can't write to " + path + ".", "pass a file in an existing folder: --keep FILE.");
}

// A command that two rows share is measured once.
void measure_one(Starts& starts, const BenchRow& row, Measured& one, int round) {
  std::string key = key_of(row, one, starts.threads, round);
  if (auto known = starts.known.find(key); known != starts.known.end()) {
    one.rounds.push_back(known->second);
    return;
  }
  Ranks ranks = {.count = row.ranks,
                 .threads = starts.threads,
                 .program = one.program,
                 .what = row.title + ", " + one.title,
                 .limit_s = starts.limit_s};
  bool share = one.who == "peer" && starts.device == "cuda" && row.ranks > 1;
  try {
    Json line = (share ? run_peers_on_gpu(ranks) : run_ranks(ranks)).front();
    if (!line.contains("step_ms")) throw Error("it printed no step_ms.", "");
    one.rounds.push_back(line);
    starts.known[key] = line;
    keep(starts.keep, key, line);
    log::info(ranks.what + ": " + number(line["step_ms"].get<double>(), 2).text + " ms");
  } catch (const Error& error) {
    one.failure = error.what();
    log::warn(ranks.what + ": " + one.failure);
  }
}

}  // namespace

const Json* Measured::line() const {
  std::vector<const Json*> order;
  for (const Json& line : rounds) order.push_back(&line);
  if (order.empty()) return nullptr;
  std::sort(order.begin(), order.end(), [](const Json* a, const Json* b) {
    return (*a)["step_ms"].get<double>() < (*b)["step_ms"].get<double>();
  });
  return order[order.size() / 2];
}

double Measured::value(const char* field) const {
  const Json* middle = line();
  if (!middle || !middle->contains(field) || !(*middle)[field].is_number()) return std::nan("");
  return (*middle)[field].get<double>();
}

std::vector<double> Measured::losses() const {
  const Json* middle = line();
  if (!middle || !middle->contains("losses")) return {};
  return (*middle)["losses"].get<std::vector<double>>();
}

Measured measured(std::string who, std::string title, std::vector<std::string> program) {
  std::string command = shown(program);
  return {.who = std::move(who),
          .title = std::move(title),
          .command = std::move(command),
          .program = std::move(program)};
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

Starts starts(const std::string& device, int threads, int limit_s, const std::string& keep) {
  Starts found = {.device = device, .threads = threads, .limit_s = limit_s, .keep = keep};
  if (keep.empty()) return found;
  std::ifstream file(keep);
  for (std::string line; std::getline(file, line);) {
    Json entry = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (entry.is_object() && entry.contains("of") && entry.contains("line"))
      found.known[entry["of"].get<std::string>()] = entry["line"];
  }
  return found;
}

bool measure(Starts& starts, std::vector<RowResult>& rows, int rounds) {
  bool well = true;
  for (RowResult& result : rows) {
    for (int round = 1; round <= rounds; ++round)
      for (Measured& one : result.all)
        if (one.failure.empty()) measure_one(starts, result.row, one, round);
    for (const Measured& one : result.all)
      well = well && (one.who == "peer" || one.failure.empty());
  }
  return well;
}

double apart(const Measured& one, const Measured* peer) {
  const std::vector<double> mine = one.losses();
  const std::vector<double> theirs = peer ? peer->losses() : std::vector<double>();
  if (mine.empty() || mine.size() != theirs.size()) return std::nan("");
  double most = 0;
  for (size_t i = 0; i < mine.size(); ++i) most = std::max(most, std::abs(mine[i] - theirs[i]));
  return most / std::abs(theirs.front());
}

void compare_losses(const RowResult& result, std::vector<std::string>& notes) {
  const Measured* peer = result.peer();
  if (!peer) return;
  for (const Measured& one : result.all)
    for (const char* field : {"loss0", "loss"}) {
      double mine = one.value(field), theirs = peer->value(field);
      // Losses near zero may differ by more than 1 %.
      double allowed = 0.01 * std::abs(theirs) + 0.0001 * std::abs(peer->value("loss0"));
      bool trained = one.who != "peer" && one.who != "tape" && !one.rounds.empty();
      bool apart = trained && !(std::abs(mine - theirs) <= allowed);
      if (!apart) continue;
      notes.push_back(result.row.title + ", " + one.title + ": the " +
                      (std::string(field) == "loss0" ? "first" : "last") + " loss is " +
                      number(mine, 4).text + ", FSDP2's " + number(theirs, 4).text + ".");
      log::warn(notes.back());
    }
}

void append(std::vector<std::string>& to, const std::vector<std::string>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

Cell maybe(double value, int digits) {
  return std::isfinite(value) ? number(value, digits) : Cell{nullptr, "-"};
}

Cell against(double value, double goal, int digits) {
  Cell cell = maybe(value, digits);
  if (goal > 0 && std::isfinite(value)) cell.colour = value <= goal ? "32" : "31";
  return cell;
}

Cell optional_cell(bool shown, const Cell& cell) {
  return shown ? cell : Cell{nullptr, ""};
}

void tell(const Told& told, const std::vector<RowResult>& results) {
  for (const Table* table : told.tables) {
    if (!told.json && table != told.tables.front()) std::cout << "\n";
    table->print(std::cout, told.json);
  }
  if (!told.json)
    for (const std::string& note : told.notes)
      std::cout << (&note == &told.notes[0] ? "\n" : "") << note << "\n";
  if (!told.write) return;
  static const std::regex colour("\033\\[[0-9;]*m");  // a page has no colours
  std::ostringstream plain;
  for (const Table* table : told.tables) {
    if (table != told.tables.front()) plain << "\n";
    table->print(plain, /*json=*/false);
  }
  Page page = {.heading = told.heading,
               .device = told.device,
               .summary = told.summary,
               .tables = std::regex_replace(plain.str(), colour, ""),
               .notes = told.notes};
  std::string path = told.page.empty() ? page_path(results, told.suffix) : told.page;
  std::ofstream file(path);
  file << page_of(page, results) << std::flush;
  if (!file)
    throw Error("can't write to " + path + ".",
                "run it in the root of the checkout, or name a file: --write FILE.");
  log::info("wrote " + path);
}

}  // namespace fsdp::bench
