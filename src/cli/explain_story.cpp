// Chapters 2 to 4 of fsdp explain: memory, the events of a step, totals. Numbers are rank 0's
// unless a line says otherwise.
#include <algorithm>
#include <map>
#include <ostream>
#include <set>

#include "base/format.h"
#include "base/table.h"
#include "base/terminal.h"
#include "cli/explain.h"
#include "cli/explain_text.h"
#include "fsdp/error.h"

namespace fsdp::cli {
namespace {

// --- 2: memory ---

// The least that a rank without sharding holds: float32 parameters, gradients, two states.
int64_t unsharded_bytes(const Json& account) {
  return 16 * account["numel"].get<int64_t>();
}

void tell_memory(const Json& account, bool brief, std::ostream& out) {
  heading(out, "2. Memory of rank 0 during the first step, in bytes");
  if (!brief) {
    paragraph(
        out,
        "Buffers are allocated when they are first needed, and kept. \"without sharding\" is the "
        "least that a rank with the whole model holds at the end of a step.");
    out << "\n";
  }
  std::vector<std::pair<const char*, std::string>> columns = {
      {"parameters", "parameters"}, {"whole_units", "gathered units"},
      {"gradients", "gradients"},   {"on_their_way", "reduce buffers"},
      {"states", "states"},         {"total", "total"}};
  int64_t all = 4 * account["numel"].get<int64_t>();
  std::vector<Json> rows = account["first_step"].get<std::vector<Json>>();
  rows.push_back({{"when", "without sharding"},
                  {"parameters", all},
                  {"whole_units", 0},
                  {"gradients", all},
                  {"on_their_way", 0},
                  {"states", 2 * all},
                  {"total", unsharded_bytes(account)}});
  out << formatted("  {:16}", "");
  for (const auto& [key, title] : columns) out << formatted("  {:>10}", title);
  out << "\n";
  for (const Json& row : rows) {
    out << formatted("  {:16}", row["when"].get<std::string>());
    for (const auto& [key, title] : columns)
      out << formatted("  {:>{}}", with_separators(row[key]), std::max<size_t>(10, title.size()));
    out << "\n";
  }
  if (brief) return;
  out << "\n";
  if (account["shared_memory"])
    paragraph(
        out,
        "Units aren't copied: all ranks map the same memory, which holds all shards in order.");
  else if (account["shard_size"] == 1)
    paragraph(out, "Units need no gather buffers: every rank has them whole.");
  else if (account["strategy"] == "SHARD_GRAD_OP")
    paragraph(out, "Every unit has its own buffer and stays gathered from forward to backward.");
  else
    paragraph(
        out, formatted(
                 "Gathered units take turns in {} as large as the largest unit, however many units "
                 "there are. The root has its own buffer.",
                 account["ring"] == 1 ? "one buffer" : account["ring"].dump() + " buffers"));
}

// --- 3: the step ---

std::string colour_of(const std::string& event) {
  if (event == "gather") return "36";
  if (event == "free") return "33";
  if (event == "reduce" || event == "reduced") return "35";
  return "32";
}

struct Telling {                               // state while events are printed
  std::map<std::string, int64_t> whole;        // units gathered or being gathered, in bytes
  std::set<std::string> gathered_in_backward;  // or opened
  int64_t most = 0;

  int64_t total() const {
    int64_t sum = 0;
    for (const auto& [unit, size] : whole) sum += size;
    return sum;
  }
};

// Whether gathers send anything.
bool sends(const Json& account) {
  return account["shard_size"] > 1 && !account["shared_memory"];
}

const Json& unit_named(const Json& account, const std::string& name) {
  for (const Json& unit : account["units"])
    if (unit["name"] == name) return unit;
  throw Error(formatted("there is no unit \"{}\".", name), "");
}

// Why an event happened. `next` is the event after it, or null.
std::string reason(const Json& account, const Json& event, const Json& next, const Telling& told) {
  std::string kind = event["event"], unit = event["unit"];
  bool backward = event["phase"] == "backward";
  int shards = account["shard_size"];
  if (kind == "gather") {
    if (event["ahead"]) return "prefetched";
    return backward ? "backward reads its weights again" : "an operator reads its weights";
  }
  if (kind == "open")
    return account["shared_memory"] ? "read from shared memory" : "nothing to gather";
  if (kind == "ready") return backward ? "computes gradients" : "computes";
  if (kind == "free" || kind == "close") {
    if (event["phase"] == "step") return "before the weights change";
    bool last = !next.is_object() || next["event"] == kind || next["phase"] != event["phase"];
    if (backward && last) return "backward is done";
    return next["event"] == "gather" ? "its buffer is reused for " + next["unit"].get<std::string>()
                                     : "its buffer is needed";
  }
  if (kind == "reduce") {
    bool stayed = sends(account) && !told.gathered_in_backward.count(unit);
    return stayed ? "its gradients are complete; it was still gathered"
                  : "its gradients are complete";
  }
  if (shards == 1) return account["ranks"] == 1 ? "there is one rank" : "each rank has the mean";
  return formatted("each rank has its 1/{} of the mean", shards);
}

void advance(const Json& account, const Json& event, Telling& told) {
  std::string kind = event["event"], unit = event["unit"];
  if (kind == "gather") told.whole[unit] = unit_named(account, unit)["full_bytes"];
  if (kind == "free") told.whole.erase(unit);
  if ((kind == "gather" || kind == "open") && event["phase"] == "backward")
    told.gathered_in_backward.insert(unit);
  told.most = std::max(told.most, told.total());
}

// What a phase does, for newcomers.
std::string introduction(const Json& account, const std::string& phase) {
  bool cut = account["shard_size"] > 1, keeps = account["strategy"] == "SHARD_GRAD_OP";
  std::string text;
  if (phase == "forward") {
    if (!sends(account))
      return formatted("A unit opens when an operator first reads it. Nothing is sent: {}",
                       cut ? "all shards are in memory that every rank can read."
                           : "every rank has the whole unit.");
    text =
        "A unit is gathered when an operator first reads it: every rank sends its shard to the "
        "others. ";
    if (account["prefetch"].get<int>() > 0)
      text += "The next unit is prefetched: its gather runs while this unit computes. ";
    return text + (keeps ? "Under SHARD_GRAD_OP a unit stays gathered until its backward."
                         : "When a buffer is needed, the unit that was read least recently is "
                           "freed.");
  }
  if (phase == "backward") {
    text = "Units run in reverse order. ";
    if (sends(account) && !keeps) text += "Units that were freed are gathered again. ";
    if (account["ranks"] == 1) return text;
    text += "When a unit's gradients are complete, they are averaged over ranks";
    if (cut && account["replicate_size"].get<int>() > 1)
      return text + ", first within a copy of the model, then between the copies.";
    return text + (cut ? ", and each rank keeps only its part." : ".");
  }
  int64_t own = 0;
  for (const Json& unit : account["units"])
    for (const Json& parameter : unit["parameters"])
      own += parameter["kept"][account["shard_rank"].get<int>()]["numel"].get<int64_t>();
  return formatted(
      "Each rank updates its own shards with its part of the gradients and states: "
      "{} of {} on this rank. Nothing is sent.",
      with_separators(own), count_of(account["numel"], "parameter"));
}

int64_t tell_step(const Json& account, bool brief, std::ostream& out) {
  heading(out, "3. The third step, on rank 0");
  if (!brief)
    paragraph(
        out,
        formatted(
            "us: microseconds since the step began. sent: bytes that this rank {}. "
            "gathered: bytes of units that are gathered or being gathered. The engine learned the "
            "order of the units in the first two steps.",
            account["shared_memory"] ? "sends or that others read" : "sends"));
  size_t unit_width = 4;
  for (const Json& unit : account["units"])
    unit_width = std::max(unit_width, unit["name"].get<std::string>().size());
  auto line = [&](const std::string& us, const std::string& event, const std::string& unit,
                  const std::string& sent, const std::string& whole, const std::string& why) {
    std::string padded = formatted("{:7}", event);
    if (us != "us") padded = paint(STDOUT, colour_of(event).c_str(), padded);
    out << formatted("  {:>6}  {}  {:{}}  {:>6}  {:>8}  {}\n", us, padded, unit, unit_width, sent,
                     whole, why);
  };
  auto at = [](double us) { return number(us, 0).text; };
  Telling told;
  const Json& events = account["events"];
  size_t i = 0;
  for (const char* phase : {"forward", "backward", "step"}) {
    out << "\n  " << paint(STDOUT, "1", std::string(phase) == "step" ? "optimizer step" : phase)
        << "\n";
    if (!brief) paragraph(out, introduction(account, phase));
    bool any = i < events.size() && events[i]["phase"] == phase;
    if (any) {
      if (!brief) out << "\n";
      line("us", "event", "unit", "sent", "gathered", "why");
    }
    for (; i < events.size() && events[i]["phase"] == phase; ++i) {
      const Json& event = events[i];
      Json next = i + 1 < events.size() ? events[i + 1] : Json();
      std::string why = reason(account, event, next, told);
      advance(account, event, told);
      int64_t sent = event["sent"];
      line(at(event["us"]), event["event"], event["unit"], sent == 0 ? "" : with_separators(sent),
           sends(account) ? with_separators(told.total()) : "", why);
    }
    const char* end = std::string(phase) == "forward"    ? "forward_us"
                      : std::string(phase) == "backward" ? "backward_us"
                                                         : "step_us";
    out << formatted("  {:>6}  done\n", at(account[end]));
  }
  return told.most;
}

// --- 4: totals ---

bool same_order(const Json& a, const Json& b) {
  if (a["events"].size() != b["events"].size()) return false;
  for (size_t i = 0; i < a["events"].size(); ++i)
    if (a["events"][i]["event"] != b["events"][i]["event"] ||
        a["events"][i]["unit"] != b["events"][i]["unit"])
      return false;
  return true;
}

void tell_sums(const std::vector<Json>& accounts, int64_t most, bool brief, std::ostream& out) {
  const Json& account = accounts.front();
  int64_t ranks = account["ranks"], all = 4 * account["numel"].get<int64_t>();
  const Json& traffic = account["traffic"];
  int64_t reductions =
      traffic["reduce_scatter"].get<int64_t>() + traffic["all_reduce"].get<int64_t>();
  heading(out, "4. Totals of rank 0, in bytes");
  auto line = [&](const char* what, const std::string& here, const std::string& otherwise) {
    out << formatted("  {:34}{:>14}{:>14}\n", what, here, otherwise);
  };
  auto row = [&](const char* what, int64_t here, int64_t otherwise) {
    line(what, with_separators(here), with_separators(otherwise));
  };
  line("", account["strategy"], "unsharded");
  row("memory held between steps", account["first_step"].back()["total"], unsharded_bytes(account));
  row("gathered units, at most", account["shard_size"] == 1 ? all : most, all);
  row("sent by gathers", traffic["all_gather"], 0);
  row("sent by reductions", reductions, 2 * all * (ranks - 1) / ranks);
  bool same = true, kept = true;
  for (const Json& other : accounts) {
    same &= same_order(account, other);
    kept &= other["makes_no_memory"].get<bool>();
  }
  out << "\n";
  paragraph(out, formatted("The step allocated {} buffers. {}", kept ? "no" : "new",
                           ranks == 1 ? ""
                           : same     ? "All ranks had the same events in the same order."
                                      : "The ranks had events in different orders."));
  if (brief) return;
  if (account["shard_size"].get<int>() > 1)
    paragraph(out, formatted("A rank keeps 1/{} of the parameters, gradients and states. It also "
                             "needs memory for {}",
                             account["shard_size"].dump(),
                             !sends(account) ? "gradients being reduced."
                             : account["strategy"] == "SHARD_GRAD_OP"
                                 ? "the whole model."
                                 : "a few gathered units, however many there "
                                   "are: a lot for this toy, little for a deep model."));
  out << "\n";
  paragraph(out, formatted("Next: try --strategy {}, --prefetch 0, --ranks 4 or --shared. "
                           "docs/how-it-works.md explains every line.",
                           account["strategy"] == "FULL_SHARD" ? "SHARD_GRAD_OP" : "FULL_SHARD"));
}

}  // namespace

std::string introduction_of(const Json& account, const std::string& phase) {
  return introduction(account, phase);
}

std::vector<std::string> reasons_of(const Json& account) {
  std::vector<std::string> all;
  Telling told;
  const Json& events = account["events"];
  for (size_t i = 0; i < events.size(); ++i) {
    all.push_back(reason(account, events[i], i + 1 < events.size() ? events[i + 1] : Json(), told));
    advance(account, events[i], told);
  }
  return all;
}

void tell(const std::vector<Json>& accounts, bool brief, std::ostream& out) {
  const Json& account = accounts.front();
  out << formatted("One step of a toy model ({}: {} in {}, {} bytes) on {}, {}.\n",
                   account["model"].get<std::string>(), count_of(account["numel"], "parameter"),
                   count_of(account["units"].size(), "unit"),
                   with_separators(4 * account["numel"].get<int64_t>()),
                   count_of(account["ranks"], "rank"), account["strategy"].get<std::string>());
  if (!brief) {
    out << "Everything below was recorded in this run; the lines of a step are the engine's own "
           "events.\n";
    if (account["shard_size"] > 1)
      out << (account["shared_memory"]
                  ? "Ranks of one host read each other's shards from shared memory (the default of "
                    "shm).\n"
                  : "Ranks send each other their shards, as between GPUs or hosts. Ranks of one "
                    "host can share\nmemory instead: see --shared.\n");
  }
  tell_layout(accounts, brief, out);
  tell_memory(account, brief, out);
  int64_t most = tell_step(account, brief, out);
  tell_sums(accounts, most, brief, out);
}

}  // namespace fsdp::cli
