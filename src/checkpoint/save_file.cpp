#include "checkpoint/save_file.h"

#include "base/format.h"
#include "checkpoint/files.h"
#include "checkpoint/item.h"

namespace fsdp::checkpoint {

std::string file_of(int rank) {
  return formatted("__{}_0.distcp", rank);
}

SaveReport write_file(const SavePlan& plan, const ReadChunk& read,
                      const std::filesystem::path& folder, int rank) {
  SaveReport report;
  if (!plan.writes) return report;
  files::Output out(folder / file_of(plan.file), plan.bytes());
  for (const auto& value : plan.values)
    report.metadata.add_value(value.path, write_value(out, value.put));
  for (const auto& chunk : plan.chunks) {
    const ItemPlace place =
        write_tensor(out, chunk.part.memory, [&](const auto& use) { read(chunk, use); });
    for (const auto& name : chunk.paths)
      report.metadata.add_chunk(name, chunk.part.memory.scalar_type(), chunk.sizes,
                                {chunk.part.rectangle, place});
  }
  report.manifest.files[file_of(plan.file)] = out.close();
  if (plan.file != rank) report.metadata = {};  // another rank reports the same
  return report;
}

}  // namespace fsdp::checkpoint
