// Chapter 1 of fsdp explain: each unit's buffer drawn as a line, its parameters above and the ranks
// that keep them below.
#include <ostream>

#include "base/format.h"
#include "base/table.h"
#include "cli/explain.h"
#include "cli/explain_text.h"

namespace fsdp::cli {
namespace {

constexpr int kColumns = 60;  // of a drawn buffer

// A unit's parameter without the unit's own path: "up.weight".
std::string short_name(const Json& unit, const Json& parameter) {
  std::string name = parameter["name"], path = unit["name"].get<std::string>() + ".";
  return name.starts_with(path) ? name.substr(path.size()) : name;
}

bool alike(const Json& a, const Json& b) {
  if (a["full_numel"] != b["full_numel"] || a["parameters"].size() != b["parameters"].size())
    return false;
  for (size_t i = 0; i < a["parameters"].size(); ++i)
    if (short_name(a, a["parameters"][i]) != short_name(b, b["parameters"][i])) return false;
  return true;
}

struct Stretch {  // of a drawn buffer, in elements
  int64_t begin, end;
  std::string label;
};

// "attn.q.weight", "attn.q", "q"
std::vector<std::string> shorter_and_shorter(const std::string& name) {
  std::string stem = name.ends_with(".weight") ? name.substr(0, name.rfind('.')) : name;
  return {name, stem, stem.substr(stem.rfind('.') + 1)};
}

// |up.weight     |gate.weight   |: each stretch as wide as its share of the buffer.
std::string drawn(const std::vector<Stretch>& stretches, int64_t numel) {
  std::string line(kColumns + 1, ' ');
  auto column = [&](int64_t element) { return static_cast<size_t>(element * kColumns / numel); };
  for (const Stretch& stretch : stretches) {
    size_t first = column(stretch.begin), last = column(stretch.end);
    line[first] = line[last] = '|';
    size_t room = last > first ? last - first - 1 : 0;
    for (const std::string& label : shorter_and_shorter(stretch.label))
      if (label.size() <= room) {
        line.replace(first + 1, label.size(), label);
        break;
      }
  }
  return line;
}

// The ranks that keep shard `index`: one, or one of each copy.
std::string keepers(const std::vector<Json>& accounts, int index) {
  std::vector<int> ranks;
  for (const Json& account : accounts)
    if (account["shard_rank"] == index) ranks.push_back(account["rank"]);
  if (ranks.size() == accounts.size() && ranks.size() > 1) return "every rank";
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i)
    text += formatted("{}{}", i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ", ranks[i]);
  return text;
}

// "up.weight, rows 0-7 of gate.weight"
std::string kept_by(const Json& unit, int index) {
  std::string text;
  for (const Json& parameter : unit["parameters"]) {
    int64_t first = parameter["kept"][index]["first"], numel = parameter["kept"][index]["numel"];
    int64_t row = parameter["row"], all = parameter["numel"];
    if (numel == 0) continue;
    if (!text.empty()) text += ", ";
    bool on_rows = first % row == 0 && numel % row == 0;
    int64_t step = on_rows ? row : 1;
    if (numel < all)
      text += formatted("{} {}-{} of ", on_rows ? "rows" : "elements", first / step,
                        (first + numel) / step - 1);
    text += short_name(unit, parameter);
  }
  return text.empty() ? "padding only" : text;
}

void tell_unit(const std::vector<Json>& accounts, const Json& unit, const std::string& title,
               std::ostream& out) {
  int64_t numel = unit["full_numel"], shard = unit["shard_numel"], used = 0;
  std::vector<Stretch> parameters, shards;
  for (const Json& parameter : unit["parameters"]) {
    int64_t begin = parameter["offset"], end = begin + parameter["numel"].get<int64_t>();
    if (begin > used) parameters.push_back({used, begin, "(padding)"});
    parameters.push_back({begin, end, short_name(unit, parameter)});
    used = end;
  }
  if (used < numel) parameters.push_back({used, numel, "(padding)"});
  int count = accounts.front()["shard_size"];
  for (int i = 0; i < count; ++i)
    shards.push_back({i * shard, (i + 1) * shard, keepers(accounts, i)});

  out << "\n  " << title << ": " << count_of(unit["numel"], "parameter") << ", "
      << with_separators(unit["full_bytes"]) << " bytes";
  int64_t padding = numel - unit["numel"].get<int64_t>();
  if (padding > 0) out << " including " << count_of(padding, "element") << " of padding";
  out << "\n    " << drawn(parameters, numel) << "\n    " << drawn(shards, numel) << "\n";
  for (int i = 0; i < count; ++i) {
    std::string who = keepers(accounts, i);
    out << "    " << who << (who.starts_with("ranks") ? " keep " : " keeps ")
        << with_separators(unit["shard_bytes"]) << " bytes: " << kept_by(unit, i) << "\n";
  }
}

}  // namespace

void tell_layout(const std::vector<Json>& accounts, bool brief, std::ostream& out) {
  const Json& account = accounts.front();
  int shards = account["shard_size"];
  heading(out, "1. How the parameters are sharded");
  if (!brief && shards > 1)
    paragraph(
        out,
        formatted(
            "A unit is a set of parameters that are gathered and freed together: here each block, "
            "and the root for the rest. A unit's parameters are packed into one buffer, which is "
            "cut into {} equal shards. Each rank keeps one shard of every unit.",
            shards));
  if (!brief && shards == 1)
    paragraph(out, formatted("A unit is a set of parameters that are reduced together: here each "
                             "block, and the root for the rest. Nothing is sharded: {}",
                             accounts.size() > 1 ? "every rank keeps everything."
                                                 : "there is one rank."));
  const Json& units = account["units"];
  for (size_t i = 0; i < units.size();) {
    size_t last = i;
    while (last + 1 < units.size() && alike(units[i], units[last + 1])) ++last;
    std::string title = units[i]["name"];
    if (last > i) title += formatted(" to {}, each", units[last]["name"].get<std::string>());
    tell_unit(accounts, units[i], title, out);
    i = last + 1;
  }
}

}  // namespace fsdp::cli
