#include "report/shortage_page.h"

#include "base/format.h"
#include "base/table.h"

namespace fsdp::report {

Page shortage_page(const ShortageFacts& facts) {
  Page page("Out of memory", formatted("{}, {}", facts.run, facts.where));
  page.section("What happened");
  page.paragraph(facts.problem);
  page.section("Memory");
  page.paragraph(
      "What the engine held when the error was caught: by then temporaries and activations were "
      "freed, and only the peak remembers them.");
  add_memory(page, facts.kinds, facts.limit);
  page.section("What would help");
  if (facts.help.empty()) {
    page.missing("No change of settings is known to help; fsdp plan shows what fits.");
  } else {
    PageTable table{.columns = {"change", "effect"}, .rows = {}};
    Json rows = Json::array();
    for (const ShortageFacts::Help& help : facts.help) {
      table.rows.push_back({help.what, help.effect});
      const Json part = {{"name", help.what},
                         {"value", help.bytes},
                         {"colour", kGreen},
                         {"inside", human_bytes(static_cast<double>(help.bytes))}};
      rows.push_back(
          {{"name", help.what.substr(0, help.what.find(" ("))}, {"parts", Json::array({part})}});
    }
    page.chart({{"type", "bars"},
                {"title", "Bytes that a change saves"},
                {"alt", "Savings; the table below has the numbers."},
                {"unit", "bytes"},
                {"legend", false},
                {"rows", rows}});
    page.table(table);
  }
  if (!facts.snapshot.empty()) {
    page.section("Every block of memory");
    page.paragraph(
        formatted("{} has every segment and block of the allocator at the moment of the "
                  "failure. Drop it onto https://pytorch.org/memory_viz.",
                  facts.snapshot));
  }
  page.section("The error");
  page.verbatim(facts.error);
  return page;
}

}  // namespace fsdp::report
