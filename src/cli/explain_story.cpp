// The telling of fsdp explain: what the ranks wrote down, in words, drawings and columns. Numbers
// are those of rank 0, unless a line says otherwise.
#include <algorithm>
#include <map>
#include <ostream>
#include <set>

#include "base/table.h"
#include "base/terminal.h"
#include "cli/explain.h"
#include "cli/explain_text.h"
#include "fsdp/error.h"

namespace fsdp::cli {
namespace {

// --- 2: memory ---

// What a rank without sharding must hold at least: float32 parameters, gradients, two states.
int64_t unsharded_bytes(const Json& account) {
  return 16 * account["numel"].get<int64_t>();
}

void tell_memory(const Json& account, bool brief, std::ostream& out) {
  heading(out, "2. What rank 0 holds, in bytes, as the first step goes");
  if (!brief) {
    paragraph(out,
              "Buffers are made when they are first needed, and kept. \"Without sharding\" is what "
              "a rank needs at least that keeps the whole model, at the end of the step.");
    out << "\n";
  }
  std::vector<std::pair<const char*, const char*>> columns = {
      {"parameters", "parameters"},     {"whole_units", "whole units"}, {"gradients", "gradients"},
      {"on_their_way", "on their way"}, {"states", "states"},           {"total", "total"}};
  int64_t all = 4 * account["numel"].get<int64_t>();
  std::vector<Json> rows = account["first_step"].get<std::vector<Json>>();
  rows.push_back({{"when", "without sharding"},
                  {"parameters", all},
                  {"whole_units", 0},
                  {"gradients", all},
                  {"on_their_way", 0},
                  {"states", 2 * all},
                  {"total", unsharded_bytes(account)}});
  auto width = [](const std::string& title) { return std::max<size_t>(title.size(), 10); };
  out << "  " << left("", 16);
  for (const auto& [key, title] : columns) out << "  " << right(title, width(title));
  out << "\n";
  for (const Json& row : rows) {
    out << "  " << left(row["when"], 16);
    for (const auto& [key, title] : columns)
      out << "  " << right(with_separators(row[key]), width(title));
    out << "\n";
  }
  if (brief) return;
  out << "\n";
  if (account["shared_memory"])
    paragraph(
        out, "No unit is copied: all ranks read one mapping in which the shards lie side by side.");
  else if (account["shard_size"] == 1)
    paragraph(out, "No unit needs a buffer to be whole in: it is whole.");
  else if (account["strategy"] == "SHARD_GRAD_OP")
    paragraph(out,
              "Every unit has a buffer to be whole in, and stays in it from forward to backward.");
  else
    paragraph(out, "Whole units take turns in " +
                       (account["ring"] == 1 ? "one buffer" : account["ring"].dump() + " buffers") +
                       " of the size of the largest, however many units there are. The root has "
                       "one of its own.");
}

// --- 3: the step ---

std::string colour_of(const std::string& event) {
  if (event == "gather") return "36";
  if (event == "free") return "33";
  if (event == "reduce" || event == "reduced") return "35";
  return "32";
}

struct Telling {                               // what is known while events go by
  std::map<std::string, int64_t> whole;        // units that have memory to be whole in, in bytes
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
  throw Error("there is no unit \"" + name + "\".", "");
}

// Why an event happened. `next` is the event after it, or null.
std::string reason(const Json& account, const Json& event, const Json& next, const Telling& told) {
  std::string kind = event["event"], unit = event["unit"];
  bool backward = event["phase"] == "backward";
  int shards = account["shard_size"];
  if (kind == "gather") {
    if (event["ahead"]) return "ahead, before it is read";
    return backward ? "backward reads its weights again" : "an operator reads its weights";
  }
  if (kind == "open")
    return account["shared_memory"] ? "read where the ranks' shards lie" : "all of it is here";
  if (kind == "ready") return backward ? "computes gradients" : "computes";
  if (kind == "free" || kind == "close") {
    if (event["phase"] == "step") return "before the weights change";
    bool last = !next.is_object() || next["event"] == kind || next["phase"] != event["phase"];
    if (backward && last) return "backward is over";
    return next["event"] == "gather" ? "its buffer goes to " + next["unit"].get<std::string>()
                                     : "its buffer is needed";
  }
  if (kind == "reduce") {
    bool stayed = sends(account) && !told.gathered_in_backward.count(unit);
    return std::string("its gradients are complete") + (stayed ? "; it was still whole" : "");
  }
  if (shards == 1) return account["ranks"] == 1 ? "nobody to share with" : "each rank has the mean";
  return "each rank has its 1/" + std::to_string(shards) + " of the mean";
}

void advance(const Json& account, const Json& event, Telling& told) {
  std::string kind = event["event"], unit = event["unit"];
  if (kind == "gather") told.whole[unit] = unit_named(account, unit)["full_bytes"];
  if (kind == "free") told.whole.erase(unit);
  if ((kind == "gather" || kind == "open") && event["phase"] == "backward")
    told.gathered_in_backward.insert(unit);
  told.most = std::max(told.most, told.total());
}

// What a phase does, for those who see it for the first time.
std::string introduction(const Json& account, const std::string& phase) {
  bool cut = account["shard_size"] > 1, keeps = account["strategy"] == "SHARD_GRAD_OP";
  std::string text;
  if (phase == "forward") {
    if (!sends(account))
      return std::string("A unit opens when an operator first reads it. Nothing is sent: ") +
             (cut ? "the shards of all ranks lie in memory that every rank can read."
                  : "all of it is here.");
    text =
        "A unit is gathered when an operator first reads it: every rank sends its shard to the "
        "others. ";
    if (account["prefetch"].get<int>() > 0)
      text += "The gather of the next unit starts ahead and runs while this one computes. ";
    return text + (keeps ? "Under SHARD_GRAD_OP a unit then stays whole until its backward."
                         : "When a buffer is needed, the unit that was read least recently is "
                           "freed.");
  }
  if (phase == "backward") {
    text = "Units come in the opposite order. ";
    if (sends(account) && !keeps)
      text += "What was freed is gathered again, what is still whole is not. ";
    if (account["ranks"] == 1) return text;
    text += "When a unit's gradients are complete, they are averaged over ranks";
    if (cut && account["replicate_size"].get<int>() > 1)
      return text + ", first within a copy of the model, then between the copies.";
    return text + (cut ? ", and each rank keeps its part only." : ".");
  }
  int64_t own = 0;
  for (const Json& unit : account["units"])
    for (const Json& parameter : unit["parameters"])
      own += parameter["kept"][account["shard_rank"].get<int>()]["numel"].get<int64_t>();
  return "Each rank updates what it keeps, with its own part of the gradients and states: " +
         with_separators(own) + " of " + count_of(account["numel"], "parameter") +
         " on this one. Nothing is sent.";
}

int64_t tell_step(const Json& account, bool brief, std::ostream& out) {
  heading(out, "3. The third step, as rank 0 saw it");
  if (!brief)
    paragraph(
        out,
        std::string("us: microseconds since the step began. sent: bytes that this rank ") +
            (account["shared_memory"] ? "sends or that others read where they lie. " : "sends. ") +
            "whole: bytes of units in this rank's memory that are whole or on their way. Two "
            "steps were taken before, in which the engine learned the order of the units.");
  size_t unit_width = 4;
  for (const Json& unit : account["units"])
    unit_width = std::max(unit_width, unit["name"].get<std::string>().size());
  auto line = [&](const std::string& us, const std::string& event, const std::string& unit,
                  const std::string& sent, const std::string& whole, const std::string& why) {
    std::string padded = left(event, 7);
    out << "  " << right(us, 6) << "  "
        << (us == "us" ? padded : paint(STDOUT, colour_of(event).c_str(), padded)) << "  "
        << left(unit, unit_width) << "  " << right(sent, 6) << "  " << right(whole, 6) << "  "
        << why << "\n";
  };
  auto at = [](double us) { return number(us, 0).text; };
  Telling told;
  const Json& events = account["events"];
  size_t i = 0;
  for (const char* phase : {"forward", "backward", "step"}) {
    out << "\n  " << paint(STDOUT, "1", std::string(phase) == "step" ? "optimizer's step" : phase)
        << "\n";
    if (!brief) paragraph(out, introduction(account, phase));
    bool any = i < events.size() && events[i]["phase"] == phase;
    if (any) {
      if (!brief) out << "\n";
      line("us", "event", "unit", "sent", "whole", "why");
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
    out << "  " << right(at(account[end]), 6) << "  done\n";
  }
  return told.most;
}

// --- 4: what it took ---

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
  heading(out, "4. What it took, on rank 0, in bytes");
  out << "  " << left("", 34) << right(account["strategy"], 14) << right("not sharded", 14) << "\n";
  auto row = [&](const char* what, int64_t here, int64_t otherwise) {
    out << "  " << left(what, 34) << right(with_separators(here), 14)
        << right(with_separators(otherwise), 14) << "\n";
  };
  row("held all the time", account["first_step"].back()["total"], unsharded_bytes(account));
  row("in whole units, at most", account["shard_size"] == 1 ? all : most, all);
  row("sent by gathers", traffic["all_gather"], 0);
  row("sent by reductions", reductions, 2 * all * (ranks - 1) / ranks);
  bool same = true, kept = true;
  for (const Json& other : accounts) {
    same &= same_order(account, other);
    kept &= other["makes_no_memory"].get<bool>();
  }
  out << "\n";
  paragraph(out,
            std::string(kept ? "The step made no new buffer. " : "The step made new buffers. ") +
                (ranks == 1 ? ""
                 : same     ? "All ranks had the same events in the same order."
                            : "The ranks had events in different orders."));
  if (brief) return;
  if (account["shard_size"].get<int>() > 1)
    paragraph(out, "Of parameters, gradients and states a rank keeps 1/" +
                       account["shard_size"].dump() + ". " +
                       (!sends(account) ? "Beside that it needs room for gradients on their way."
                        : account["strategy"] == "SHARD_GRAD_OP"
                            ? "Beside that it needs room for the whole model, once."
                            : "Beside that it needs room for a few units, however many there are: "
                              "much for a model of this size, little for a deep one."));
  out << "\n";
  paragraph(out, std::string("Next: fsdp explain --strategy ") +
                     (account["strategy"] == "FULL_SHARD" ? "SHARD_GRAD_OP" : "FULL_SHARD") +
                     ", --prefetch 0, --ranks 4, --shared. docs/how-it-works.md goes through it.");
}

}  // namespace

void tell(const std::vector<Json>& accounts, bool brief, std::ostream& out) {
  const Json& account = accounts.front();
  out << "A training step of a toy (" << account["model"].get<std::string>() << ": "
      << count_of(account["numel"], "parameter") << " in "
      << count_of(account["units"].size(), "unit") << ", "
      << with_separators(4 * account["numel"].get<int64_t>()) << " bytes) on "
      << count_of(account["ranks"], "rank") << ", " << account["strategy"].get<std::string>()
      << ".\n";
  if (!brief) {
    out << "Everything below happened just now; the lines are the engine's own events.\n";
    if (account["shard_size"] > 1)
      out << (account["shared_memory"]
                  ? "Ranks of one host read each other's shards where they lie (the default over "
                    "shm).\n"
                  : "Ranks send each other their shards, as GPUs and hosts do. Ranks of one host "
                    "need not:\nsee --shared.\n");
  }
  tell_layout(accounts, brief, out);
  tell_memory(account, brief, out);
  int64_t most = tell_step(account, brief, out);
  tell_sums(accounts, most, brief, out);
}

}  // namespace fsdp::cli
