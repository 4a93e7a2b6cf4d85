#include "observe/memory_check.h"

#include <cmath>
#include <cstdio>
#include <sstream>

#include "base/table.h"

namespace fsdp::observe {
namespace {

int64_t known(const MemoryReport& memory) {
  return memory.total() + memory.activations;
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
  add("together", known(memory));
  if (measured) add("measured peak", *measured);
  std::stringstream out;
  table.print(out, /*json=*/false);
  if (measured) {
    double share = 100 * unaccounted_share(memory, *measured);
    char line[160];
    std::snprintf(line, sizeof line, "the allocator's peak is %.1f %% %s\n", std::abs(share),
                  share >= 0 ? "more: temporaries, buffers and inputs"
                             : "less: not everything was there at once");
    out << line;
  }
  return out.str();
}

}  // namespace fsdp::observe
