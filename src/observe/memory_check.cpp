#include "observe/memory_check.h"

#include <cmath>
#include <sstream>

#include "base/format.h"
#include "base/table.h"
#include "observe/memory_record.h"

namespace fsdp::observe {
namespace {

int64_t known(const MemoryReport& memory) {  // on the device
  return memory.total() - memory.host + memory.activations;
}

}  // namespace

double unaccounted_share(const MemoryReport& memory, int64_t measured) {
  if (measured <= 0) return 0;
  return static_cast<double>(measured - known(memory)) / static_cast<double>(measured);
}

std::string describe(const MemoryReport& memory, std::optional<int64_t> measured) {
  Table table(
      {{"kind", "memory of this rank", Table::kLeft}, {"bytes", "bytes"}, {"size", "size"}});
  auto add = [&](const char* kind, int64_t bytes) {
    auto size = static_cast<double>(bytes);
    table.add({text(kind), text(with_separators(bytes)), Cell{size, human_bytes(size)}});
  };
  add("parameters", memory.parameters + memory.gathered_from);
  add("gradients", memory.gradients + memory.reduce_buffers + memory.accumulated);
  add("optimizer states", memory.optimizer);
  add("gather buffers", memory.unsharded + memory.secondary);
  add("activations", memory.activations);
  if (memory.host > 0) add("of these, in host memory", memory.host);
  add(memory.host > 0 ? "total on the device" : "total", known(memory));
  if (memory.host_activations > 0) add("host memory for activations", memory.host_activations);
  if (measured) add("measured peak", *measured);
  std::stringstream out;
  table.print(out, /*json=*/false);
  if (measured) {
    double share = 100 * unaccounted_share(memory, *measured);
    out << formatted("the allocator's peak is {:.1f} % {}\n", std::abs(share),
                     share >= 0 ? "higher: temporaries, buffers and inputs"
                                : "lower: not all of this existed at the same time");
  }
  return out.str();
}

Compared compare(const PlannedMemory& planned, const MemoryReport& held,
                 std::optional<int64_t> peak) {
  Table table({{"kind", "memory of this rank", Table::kLeft},
               {"planned", "planned"},
               {"measured", "measured"}});
  auto cell = [](int64_t bytes) {
    auto size = static_cast<double>(bytes);
    return Cell{size, bytes > 0 ? human_bytes(size) : "-"};
  };
  for (const ComparedKind& kind : compared_kinds({.held = held, .planned = planned, .peak = peak}))
    table.add({text(kind.name), cell(kind.planned), cell(kind.measured)});
  Compared compared;
  int64_t expected = planned.parameters + planned.master + planned.states;
  int64_t found = held.parameters + held.gathered_from + held.optimizer;
  if (held.host > 0 || planned.host > 0) {
    expected += planned.gradients + planned.host;
    found += held.gradients + held.host_activations;
  }
  if (peak) expected = planned.peak(), found = *peak;
  if (expected > 0)
    compared.off = static_cast<double>(found - expected) / static_cast<double>(expected);
  std::stringstream out;
  table.print(out, /*json=*/false);
  compared.text = out.str();
  return compared;
}

}  // namespace fsdp::observe
