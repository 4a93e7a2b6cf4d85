#include "report/profile_section.h"

#include <cmath>
#include <map>

#include "base/format.h"
#include "base/table.h"
#include "report/json_values.h"

namespace fsdp::report {
namespace {

constexpr size_t kRanksSplit = 32;

Colour colour_of(const std::string& family) {
  static const std::map<std::string, Colour> colours = {{"products", kBlue},
                                                        {"attention", kPurple},
                                                        {"norms", kTeal},
                                                        {"element-wise", kGreen},
                                                        {"loss", kPink},
                                                        {"optimizer", kBrown},
                                                        {"copies", kOrange},
                                                        {"communication, exposed", kRed},
                                                        {"waiting for data", kYellow},
                                                        {"host gaps", kPale},
                                                        {"between operators", kPale}};
  const auto found = colours.find(family);
  return found == colours.end() ? kGrey : found->second;
}

double at(const Json& object, const char* key) {
  return number_in(object, key, 0);
}

std::string name_in(const Json& object) {
  return text_in(object, "name");
}

std::string ms_text(double ms) {
  return formatted("{:.3f}", ms);
}

std::string percent(double part, double whole) {
  return whole > 0 ? formatted("{:.1f} %", 100 * part / whole) : "-";
}

Json parts_of(const Json& families) {
  Json parts = Json::array();
  for (const Json& family : families)
    if (family.is_object() && at(family, "ms") > 0)
      parts.push_back({{"name", name_in(family)},
                       {"value", short_number(at(family, "ms"))},
                       {"colour", colour_of(name_in(family))}});
  return parts;
}

void add_families(Page& page, const Json& profile) {
  const double whole = at(profile, "traced_ms"), peak = at(profile, "peak_tflops");
  Json rows = Json::array();
  rows.push_back({{"name", ""}, {"parts", parts_of(array_in(profile, "families"))}});
  page.chart({{"type", "bars"},
              {"title", "The traced step"},
              {"alt", "The step's time by family of kernels; the table below has the numbers."},
              {"unit", "ms"},
              {"share", true},
              {"rows", rows}});
  PageTable table{.columns = {"family",
                              {"ms", "number"},
                              {"share", "number"},
                              {"calls", "number"},
                              {"TFLOP/s", "number"},
                              {"of the peak", "number"}},
                  .rows = {}};
  for (const Json& family : array_in(profile, "families")) {
    if (!family.is_object()) continue;
    const double ms = at(family, "ms"), tflops = at(family, "tflops"), calls = at(family, "calls");
    table.rows.push_back({name_in(family), ms_text(ms), percent(ms, whole),
                          calls > 0 ? with_separators(std::llround(calls)) : "",
                          tflops > 0 ? formatted("{:.3g}", tflops) : "",
                          tflops > 0 && peak > 0 ? percent(tflops, peak) : ""});
  }
  if (at(profile, "hidden_ms") > 0)
    table.rows.push_back({PageCell("communication, hidden", "faint"),
                          ms_text(at(profile, "hidden_ms")), "", "", "", ""});
  page.table(table);
}

void add_units(Page& page, const Json& profile) {
  const Json& units = array_in(profile, "units");
  if (units.empty()) return;
  page.heading("By unit");
  PageTable table{.columns = {"unit",
                              {"forward ms", "number"},
                              {"backward ms", "number"},
                              {"update ms", "number"},
                              {"exposed ms", "number"}},
                  .rows = {}};
  auto shown_ms = [](double ms) { return ms > 0 ? ms_text(ms) : std::string("-"); };
  for (const Json& unit : units)
    if (unit.is_object())
      table.rows.push_back({name_in(unit), shown_ms(at(unit, "forward_ms")),
                            shown_ms(at(unit, "backward_ms")), shown_ms(at(unit, "update_ms")),
                            shown_ms(at(unit, "exposed_ms"))});
  page.table(table);
}

void add_kernels(Page& page, const Json& profile) {
  const Json& kernels = array_in(profile, "kernels");
  if (kernels.empty()) return;
  const double whole = at(profile, "traced_ms");
  page.heading(at(profile, "gpu") > 0 ? "The kernels that take longest"
                                      : "The operators that take longest");
  PageTable table{.columns = {{"name", "code"},
                              "family",
                              {"ms", "number"},
                              {"share", "number"},
                              {"calls", "number"},
                              {"longest ms", "number"}},
                  .rows = {}};
  for (const Json& kernel : kernels)
    if (kernel.is_object())
      table.rows.push_back({name_in(kernel), text_in(kernel, "family"), ms_text(at(kernel, "ms")),
                            percent(at(kernel, "ms"), whole),
                            with_separators(std::llround(at(kernel, "calls"))),
                            ms_text(at(kernel, "longest_ms"))});
  page.table(table);
}

void add_timeline(Page& page, const Json& profile) {
  const auto found = profile.find("timeline");
  if (found == profile.end() || !found->is_object() || array_in(*found, "lanes").empty()) return;
  Json chart = *found;
  chart["type"] = "timeline";
  chart["title"] = "Units in the traced step";
  chart["alt"] = "When each unit computed and communicated; red is exposed.";
  chart["unit"] = "ms";
  page.chart(chart, "Red: computation waits for communication. Drag to zoom.");
}

void add_ranks_split(Page& page, const Json& profile) {
  const Json& ranks = array_in(profile, "ranks");
  if (ranks.size() < 2) return;
  Json rows = Json::array();
  for (const Json& rank : ranks)
    if (rank.is_object() && rows.size() < kRanksSplit)
      rows.push_back({{"name", formatted("rank {}", std::llround(at(rank, "rank")))},
                      {"parts", parts_of(array_in(rank, "families"))}});
  page.chart({{"type", "bars"},
              {"title", "The traced step on each rank"},
              {"alt", "The step's time by rank and family"},
              {"unit", "ms"},
              {"share", true},
              {"rows", rows}});
}

}  // namespace

void add_profile(Page& page, const Json& profile) {
  std::string text =
      formatted("Step {} on rank 0 of {}, traced: {:.3f} ms.", std::llround(at(profile, "step")),
                std::max(1LL, std::llround(at(profile, "world"))), at(profile, "traced_ms"));
  if (at(profile, "step_ms") > 0)
    text += formatted(" Without the tracer a step takes {:.3f} ms.", at(profile, "step_ms"));
  if (flag_in(profile, "graphed"))
    text += " The traced step was eager; the others are replayed as CUDA graphs.";
  page.paragraph(text);
  std::vector<std::string> next;
  for (const Json& line : array_in(profile, "advice"))
    if (line.is_string()) next.push_back(line.get<std::string>());
  add_families(page, profile);
  if (!next.empty()) {
    page.heading("What to try next");
    page.list(next);
  }
  add_timeline(page, profile);
  add_units(page, profile);
  add_kernels(page, profile);
  add_ranks_split(page, profile);
}

Page profile_page(const std::string& run, const Json& profile) {
  Page page(formatted("Profile of {}", run), "A step of fsdp.cpp, and where its time went");
  page.section("Where the time goes");
  add_profile(page, profile);
  return page;
}

}  // namespace fsdp::report
