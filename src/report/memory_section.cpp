#include "report/memory_section.h"

#include <algorithm>

#include "base/table.h"

namespace fsdp::report {
namespace {

std::string size_text(int64_t bytes) {
  return bytes > 0 ? human_bytes(static_cast<double>(bytes)) : "-";
}

}  // namespace

void add_memory(Page& page, const std::vector<MemoryKind>& kinds, int64_t limit) {
  Json planned = Json::array(), measured = Json::array();
  int colour = kBlue;
  PageTable table{.columns = {"kind", {"planned", "number"}, {"measured", "number"}}, .rows = {}};
  for (const MemoryKind& kind : kinds) {
    table.rows.push_back({kind.name, size_text(kind.planned), size_text(kind.measured)});
    if (kind.sum) continue;
    auto part = [&](int64_t bytes) {
      return Json{{"name", kind.name}, {"value", bytes}, {"colour", colour}};
    };
    if (kind.planned > 0) planned.push_back(part(kind.planned));
    if (kind.measured > 0) measured.push_back(part(kind.measured));
    ++colour;
  }
  Json rows = Json::array();
  if (!planned.empty()) rows.push_back({{"name", "planned"}, {"parts", planned}});
  if (!measured.empty()) rows.push_back({{"name", "measured"}, {"parts", measured}});
  if (limit > 0) {
    const Json whole = {{"name", "the device's memory"}, {"value", limit}, {"colour", kPale}};
    rows.push_back({{"name", "device"}, {"parts", Json::array({whole})}});
  }
  page.chart({{"type", "bars"},
              {"title", "Memory of a rank at its peak"},
              {"alt", "Memory by kind, planned and measured; the table below has the numbers."},
              {"unit", "bytes"},
              {"share", true},
              {"rows", rows}});
  page.table(table);
}

}  // namespace fsdp::report
