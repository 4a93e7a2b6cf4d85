#include "cli/plan_tables.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/table.h"
#include "fsdp/error.h"
#include "observe/throughput.h"
#include "train/plan_config.h"

namespace fsdp::cli {
namespace {

constexpr int kMostRanks = 65536;

[[noreturn]] void refuse(const std::string& text, const std::string& why) {
  throw CodedError(
      kExitUsage, formatted("--world {}: {}", text, why),
      "give a number of ranks (8), a list (8,16,24), or a range that doubles (8..1024).");
}

int ranks_of(const std::string& part, const std::string& text) {
  int ranks = 0;
  auto [end, problem] = std::from_chars(part.data(), part.data() + part.size(), ranks);
  if (problem != std::errc() || end != part.data() + part.size())
    refuse(text, formatted("\"{}\" isn't a number of ranks.", part));
  if (ranks < 1 || ranks > kMostRanks)
    refuse(text, formatted("a world has 1 to {} ranks, not {}.", kMostRanks, part));
  return ranks;
}

std::string name_of(const Offload& offload) {
  if (!offload.any()) return "off";
  const std::string where = offload.directory.empty() ? "" : ", states on disk";
  if (offload.optimizer) return (offload.parameters ? "all" : "optimizer") + where;
  if (offload.parameters && offload.gradients) return "parameters, gradients";
  return offload.parameters ? "parameters" : "gradients";
}

const std::vector<Table::Column> kSetting = {{"strategy", "strategy", Table::kLeft},
                                             {"recompute", "activations", Table::kLeft},
                                             {"offload", "offload", Table::kLeft}};

std::vector<Table::Column> figures(int64_t tokens_per_sample) {
  return {{"micro_batch", "largest micro-batch"},
          {"bytes", "memory"},
          {"host_bytes", "host"},
          {"step_ms", "step ms"},
          {"tokens_per_second", tokens_per_sample > 1 ? "tokens/s" : "samples/s"}};
}

std::vector<Cell> setting_cells(const PlanChoice& choice) {
  return {text(lower(name(choice.strategy))),
          text(enum_name(train::activations_mode(choice.recompute))),
          text(name_of(choice.offload))};
}

std::vector<Cell> figure_cells(const PlanChoice& choice, int64_t tokens_per_sample) {
  bool fits = choice.largest_batch > 0;
  auto total = static_cast<double>(choice.plan.memory.total());
  auto host = static_cast<double>(choice.plan.memory.host);
  double ms = 1e3 * choice.plan.time.total();
  double rate = choice.samples_per_second() * static_cast<double>(tokens_per_sample);
  return {Cell{choice.largest_batch, fits ? std::to_string(choice.largest_batch) : "-"},
          Cell{total, human_bytes(total)}, Cell{host, host > 0 ? human_bytes(host) : ""},
          fits ? number(ms, 1) : Cell{ms, "-"},
          Cell{rate, fits ? observe::human_count(rate) : "-"}};
}

template <typename T>
void append(std::vector<T>& to, const std::vector<T>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

}  // namespace

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

std::vector<int> worlds_of(const std::string& text) {
  if (size_t dots = text.find(".."); dots != std::string::npos) {
    int first = ranks_of(text.substr(0, dots), text), last = ranks_of(text.substr(dots + 2), text);
    if (first > last) refuse(text, "the first number is larger than the last.");
    std::vector<int> worlds;
    for (int ranks = first; ranks < last; ranks *= 2) worlds.push_back(ranks);
    worlds.push_back(last);
    return worlds;
  }
  std::vector<int> worlds;
  for (size_t at = 0; at <= text.size();) {
    size_t comma = std::min(text.find(',', at), text.size());
    worlds.push_back(ranks_of(text.substr(at, comma - at), text));
    at = comma + 1;
  }
  return worlds;
}

void print_choices(const std::vector<PlanChoice>& choices, int64_t tokens_per_sample, bool json) {
  std::vector<Table::Column> columns = kSetting;
  columns.push_back({"fits", "fits", Table::kLeft});
  append(columns, figures(tokens_per_sample));
  columns.push_back({"fastest", "choice", Table::kLeft});
  Table table(columns);
  for (const PlanChoice& choice : choices) {
    bool fits = choice.largest_batch > 0;
    std::vector<Cell> row = setting_cells(choice);
    row.push_back(Cell{fits, fits ? "yes" : "no", fits ? "32" : "31"});
    append(row, figure_cells(choice, tokens_per_sample));
    row.push_back(Cell{choice.fastest, choice.fastest ? "fastest" : "", "1"});
    table.add(std::move(row));
  }
  table.print(std::cout, json);
}

void print_worlds(const std::vector<WorldChoice>& worlds, int64_t tokens_per_sample, bool json) {
  std::vector<Table::Column> columns = {{"world", "ranks"},
                                        {"as_asked", "micro-batch as asked"},
                                        {"fitting", "settings that fit"},
                                        {"settings", ""}};
  append(columns, kSetting);
  columns[4].title = "fastest: strategy";
  append(columns, figures(tokens_per_sample));
  Table table(columns);
  for (const WorldChoice& world : worlds) {
    bool fits = world.fitting > 0;
    std::string of = formatted("{} of {}", world.fitting, world.settings);
    std::vector<Cell> row = {
        Cell{world.world, std::to_string(world.world)},
        Cell{world.largest_batch,
             world.largest_batch > 0 ? std::to_string(world.largest_batch) : "doesn't fit"},
        Cell{world.fitting, of, fits ? "32" : "31"}, Cell{world.settings, ""}};
    if (fits) {
      append(row, setting_cells(world.fastest));
      append(row, figure_cells(world.fastest, tokens_per_sample));
    } else {
      while (row.size() < columns.size()) row.push_back(Cell{nullptr, "-"});
    }
    table.add(std::move(row));
  }
  table.print(std::cout, json);
}

void print_sequences(const std::vector<LongestSequence>& rows, int64_t part, bool json) {
  Table table({{"world", "ranks"},
               {"max_seq", "longest sequence"},
               {"bytes", "memory"},
               {"host_bytes", "host"},
               {"step_ms", "step ms"},
               {"tokens_per_second", "tokens/s"}});
  for (const LongestSequence& row : rows) {
    const PlannedMemory& memory = row.plan.memory;
    const double seconds = row.plan.time.total();
    const double rate = seconds > 0 ? static_cast<double>(row.plan.samples * part) / seconds : 0;
    const bool fits = row.parts > 0;
    const std::string tokens =
        fits ? formatted("{}", row.parts * part) : formatted("less than {}", part);
    table.add(
        {Cell{row.world, std::to_string(row.world)}, Cell{row.parts * part, tokens},
         Cell{memory.total(), human_bytes(static_cast<double>(memory.total()))},
         Cell{memory.host, memory.host > 0 ? human_bytes(static_cast<double>(memory.host)) : ""},
         Cell{1e3 * seconds, fits ? formatted("{:.1f}", 1e3 * seconds) : "-"},
         Cell{rate, fits ? observe::human_count(rate) : "-"}});
  }
  table.print(std::cout, json);
}

void print_kinds(const Plan& plan) {
  Table table({{"kind", "", Table::kLeft}, {"bytes", ""}});
  const PlannedMemory& memory = plan.memory;
  auto add = [&](const char* kind, int64_t bytes) { table.add({text(kind), Cell{bytes, ""}}); };
  add("parameters", memory.parameters);
  add("master", memory.master);
  add("gradients", memory.gradients);
  add("states", memory.states);
  add("gather_buffers", memory.gather_buffers);
  add("communication", memory.communication);
  add("activations", memory.activations);
  add("logits", memory.logits);
  add("temporaries", memory.temporaries);
  add("workspaces", memory.workspaces);
  add("fragmentation", memory.fragmentation);
  add("outside", memory.outside);
  add("host", memory.host);
  add("disk", memory.disk);
  table.print(std::cout, /*json=*/true);
}

PlannedSaves saves_of(const Plan& plan, const PlanOptions& options, int ranks_on_host,
                      double pool_gib, std::optional<double> adapters_saved) {
  const PlannedMemory& memory = plan.memory;
  PlannedSaves saves;
  const int64_t all = memory.parameters + memory.master + memory.states + memory.host + memory.disk;
  saves.bytes = adapters_saved.value_or(static_cast<double>(all));
  const double rate = options.disk_speed * 1e9 / ranks_on_host;
  saves.seconds = saves.bytes / rate;
  if (const double step = plan.time.total(); step > 0)
    saves.every = std::max<int64_t>(static_cast<int64_t>(std::ceil(saves.seconds / step)), 1);
  const auto on_host = static_cast<double>(options.host_memory) / ranks_on_host;
  saves.pool = pool_gib > 0 ? pool_gib * (1 << 30)
                            : std::max(on_host - static_cast<double>(memory.host), 0.0) / 2;
  if (options.host_memory > 0 || pool_gib > 0)
    saves.held = std::max(saves.bytes - saves.pool, 0.0) / rate;
  return saves;
}

std::string describe(const PlannedSaves& saves, double disk_speed) {
  std::string text = formatted(
      "A checkpoint has {} per rank. At {:g} GB/s per host (--disk-speed) it takes {:.3g} s to "
      "write in the background; with checkpoint.every = {} or more, none is skipped.",
      human_bytes(saves.bytes), disk_speed, saves.seconds, saves.every);
  if (saves.held > 0)
    text += formatted(
        " It passes through {} of host memory per rank (checkpoint.pool), so the "
        "update after it waits {:.3g} s.",
        human_bytes(saves.pool), saves.held);
  return text + "\n";
}

void print_verdict(const Plan& plan, int64_t tokens_per_sample, const PlannedSaves& saves) {
  const double seconds = plan.time.total();
  const nlohmann::ordered_json verdict = {
      {"fits", plan.fits},
      {"bytes", plan.memory.total()},
      {"peak_bytes", plan.memory.peak()},
      {"micro_batch", plan.batch},
      {"step_ms", 1e3 * seconds},
      {"compute_ms", 1e3 * plan.time.compute},
      {"communication_ms", 1e3 * plan.time.communication},
      {"exposed_ms", 1e3 * plan.time.exposed},
      {"optimizer_ms", 1e3 * plan.time.optimizer},
      {"offload_ms", 1e3 * plan.time.offload},
      {"tokens_per_second",
       seconds > 0 ? static_cast<double>(plan.samples * tokens_per_sample) / seconds : 0},
      {"checkpoint_bytes", saves.bytes},
      {"checkpoint_s", saves.seconds},
      {"checkpoint_every", saves.every},
      {"checkpoint_held_s", saves.held},
      {"advice", plan.advice}};
  std::cout << verdict.dump() << "\n";
}

std::string nothing_fits(bool host_lacks) {
  return host_lacks
             ? "\nNothing fits: with offload the GPUs have enough memory, but the hosts don't. "
               "Use hosts with more memory (--host-memory), or more hosts.\n"
             : "\nNothing fits: use more ranks (--world), or GPUs with more memory (--gpu).\n";
}

}  // namespace fsdp::cli
