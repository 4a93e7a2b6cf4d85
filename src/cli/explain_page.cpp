// fsdp explain --html: the step as a picture. Shards as bars, the ring as a timeline of who is in
// which buffer, memory, and the list of events with their reasons.
#include <algorithm>
#include <map>

#include "base/format.h"
#include "base/table.h"
#include "cli/explain.h"
#include "report/page.h"

namespace fsdp::cli {
namespace {

using report::PageTable;
using RankColour = report::Colour;

// --- shards ---

// Each unit twice: its parameters, and which rank keeps which part of them.
void draw_shards(report::Page& page, const std::vector<Json>& accounts) {
  const Json& account = accounts.front();
  const int count = account["shard_size"];
  Json rows = Json::array();
  for (const Json& unit : account["units"]) {
    const std::string path = unit["name"].get<std::string>() + ".";
    const auto part = [](const std::string& name, int64_t numel, int colour) {
      return Json{{"name", name},
                  {"value", numel},
                  {"colour", colour},
                  {"text", formatted("{} elements", with_separators(numel))}};
    };
    Json parameters = Json::array(), shards = Json::array();
    int64_t used = 0;
    int colour = 0;
    for (const Json& parameter : unit["parameters"]) {
      const int64_t begin = parameter["offset"], numel = parameter["numel"];
      if (begin > used) parameters.push_back(part("padding", begin - used, report::kPale));
      std::string name = parameter["name"];
      if (name.starts_with(path)) name = name.substr(path.size());
      parameters.push_back(part(name, numel, colour++ % 7));
      used = begin + numel;
    }
    const int64_t full = unit["full_numel"];
    if (full > used) parameters.push_back(part("padding", full - used, report::kPale));
    for (int i = 0; i < count; ++i)
      shards.push_back(part(count == 1 ? "every rank" : formatted("rank {}", i),
                            unit["shard_numel"], (i + 4) % 8));
    rows.push_back({{"name", unit["name"]}, {"parts", parameters}});
    rows.push_back({{"name", "kept by"}, {"parts", shards}});
  }
  page.chart({{"type", "bars"},
              {"title", "Each unit's buffer, and the shards it is cut into"},
              {"alt", "Parameters of each unit and the ranks that keep them"},
              {"plain", true},
              {"rows", rows}});
}

// --- the ring ---

// Follows the events and says which buffer each unit is in. Like the engine, a gather takes the
// first free buffer of the ring.
class RingPicture {
 public:
  explicit RingPicture(const Json& account) : account_(account) {
    for (const Json& event : account["events"]) see(event);
    const double end = account["step_us"];
    for (const auto& [unit, open] : open_) close(unit, open, end);
  }

  Json chart() const {
    Json lanes = Json::array(), phases = Json::array();
    for (const auto& [name, bars] : lanes_)
      if (name != kReductions) lanes.push_back({{"name", name}, {"bars", bars}});
    if (const auto last = lanes_.find(kReductions); last != lanes_.end())
      lanes.push_back({{"name", last->first}, {"bars", last->second}});
    const double forward = account_["forward_us"], backward = account_["backward_us"],
                 end = account_["step_us"];
    phases.push_back({{"name", "forward"}, {"begin", 0}, {"end", forward}});
    phases.push_back({{"name", "backward"}, {"begin", forward}, {"end", backward}});
    phases.push_back({{"name", "optimizer step"}, {"begin", backward}, {"end", end}});
    return {{"type", "timeline"},
            {"title", "Who is in which buffer, on rank 0"},
            {"alt", "When each unit was gathered, in which buffer, and when it was reduced"},
            {"unit", "us"},
            {"begin", 0},
            {"end", end},
            {"phases", phases},
            {"lanes", lanes}};
  }

 private:
  static constexpr const char* kReductions = "reductions";  // the last lane
  struct Open {
    std::string lane;
    double begun = 0, ready = -1;
    bool ahead = false;
  };

  const Json& unit_of(const std::string& name) const {
    for (const Json& unit : account_["units"])
      if (unit["name"] == name) return unit;
    static const Json none = Json::object();
    return none;
  }

  std::string lane_of(const std::string& unit) {
    if (!unit_of(unit).value("sends", false)) return unit;
    if (unit_of(unit).value("has_own_buffer", false)) return "own buffer: " + unit;
    for (int i = 1;; ++i) {
      std::string lane = formatted("ring buffer {}", i);
      const bool taken = std::any_of(open_.begin(), open_.end(),
                                     [&](const auto& one) { return one.second.lane == lane; });
      if (!taken) return lane;
    }
  }

  void bar(const std::string& lane, const std::string& unit, const char* kind, double begin,
           double end, RankColour colour) {
    lanes_[lane].push_back(
        {{"begin", begin}, {"end", end}, {"name", unit}, {"kind", kind}, {"colour", colour}});
  }

  void close(const std::string& unit, const Open& open, double at) {
    const double ready = open.ready < 0 ? at : open.ready;
    bar(open.lane, unit, open.ahead ? "being gathered ahead" : "being gathered", open.begun, ready,
        open.ahead ? report::kTeal : report::kOrange);
    if (open.ready >= 0) bar(open.lane, unit, "gathered", open.ready, at, report::kBlue);
  }

  void see(const Json& event) {
    const std::string kind = event["event"], unit = event["unit"];
    const double at = event["us"];
    if (kind == "gather" || kind == "open") {
      const std::string lane = lane_of(unit);
      open_[unit] = {lane, at, -1, event.value("ahead", false)};
    } else if (kind == "ready" && open_.count(unit)) {
      if (open_[unit].ready < 0) open_[unit].ready = at;
    } else if ((kind == "free" || kind == "close") && open_.count(unit)) {
      close(unit, open_[unit], at);
      open_.erase(unit);
    } else if (kind == "reduce") {
      reducing_[unit] = at;
    } else if (kind == "reduced" && reducing_.count(unit)) {
      bar(kReductions, unit, "gradients being reduced", reducing_[unit], at, report::kPink);
      reducing_.erase(unit);
    }
  }

  const Json& account_;
  std::map<std::string, Open> open_;
  std::map<std::string, double> reducing_;
  std::map<std::string, Json> lanes_;
};

// --- memory and events ---

void draw_memory(report::Page& page, const Json& account) {
  const std::vector<std::pair<const char*, const char*>> kinds = {
      {"parameters", "parameters"},
      {"whole_units", "gathered units"},
      {"gradients", "gradients"},
      {"on_their_way", "reduce buffers"},
      {"states", "states"}};
  const int64_t all = 4 * account["numel"].get<int64_t>();
  std::vector<Json> moments = account["first_step"].get<std::vector<Json>>();
  moments.push_back({{"when", "without sharding"},
                     {"parameters", all},
                     {"whole_units", 0},
                     {"gradients", all},
                     {"on_their_way", 0},
                     {"states", 2 * all}});
  Json rows = Json::array();
  for (const Json& moment : moments) {
    Json parts = Json::array();
    int colour = 0;
    for (const auto& [key, title] : kinds) {
      const int64_t bytes = moment[key];
      if (bytes > 0) parts.push_back({{"name", title}, {"value", bytes}, {"colour", colour}});
      ++colour;
    }
    rows.push_back({{"name", moment["when"]}, {"parts", parts}});
  }
  page.chart({{"type", "bars"},
              {"title", "Memory of rank 0 during the first step"},
              {"alt", "Memory by kind at each moment of the step"},
              {"unit", "bytes"},
              {"rows", rows}});
}

void list_events(report::Page& page, const Json& account) {
  const std::vector<std::string> reasons = reasons_of(account);
  PageTable table{
      .columns = {{"us", "number"}, "phase", "event", "unit", {"bytes sent", "number"}, "why"},
      .rows = {}};
  const Json& events = account["events"];
  for (size_t i = 0; i < events.size(); ++i) {
    const int64_t sent = events[i]["sent"];
    table.rows.push_back(
        {formatted("{:.0f}", events[i]["us"].get<double>()), events[i]["phase"].get<std::string>(),
         events[i]["event"].get<std::string>(), events[i]["unit"].get<std::string>(),
         sent > 0 ? with_separators(sent) : "", reasons[i]});
  }
  page.begin_details(formatted("All {} events of the step", events.size()));
  page.table(table);
  page.end_details();
}

}  // namespace

report::Page explain_page(const std::vector<Json>& accounts) {
  const Json& account = accounts.front();
  const std::string strategy = account["strategy"];
  report::Page page(
      formatted("One step of a toy model, {}", strategy),
      formatted("{}: {} in {}, on {}; recorded by fsdp explain",
                account["model"].get<std::string>(), count_of(account["numel"], "parameter"),
                count_of(account["units"].size(), "unit"), count_of(account["ranks"], "rank")));
  page.section("How the parameters are sharded");
  page.paragraph(
      "A unit is a set of parameters that are gathered and freed together: here each block, and "
      "the "
      "root for the rest. Its parameters are packed into one buffer, which is cut into equal "
      "shards. "
      "Each rank keeps one shard of every unit.");
  draw_shards(page, accounts);
  page.section("A step");
  for (const char* phase : {"forward", "backward", "step"})
    page.paragraph(introduction_of(account, phase));
  page.chart(RingPicture(account).chart(),
             "Gathered units take turns in the ring's buffers, however many units there are.");
  list_events(page, account);
  page.section("Memory");
  draw_memory(page, account);
  const Json& traffic = account["traffic"];
  page.section("Bytes sent by rank 0");
  page.cards({{"by gathers", with_separators(traffic["all_gather"])},
              {"by reductions", with_separators(traffic["reduce_scatter"].get<int64_t>() +
                                                traffic["all_reduce"].get<int64_t>())}});
  return page;
}

}  // namespace fsdp::cli
