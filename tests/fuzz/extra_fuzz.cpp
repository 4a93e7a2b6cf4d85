// `extra.*` of a checkpoint: an item of any bytes, listed once as a plain value and once as a
// tensor. What was read is written into a file for torch.load.
#include <cstdlib>
#include <cstring>

#include "checkpoint/torch_file.h"
#include "fsdp/error.h"
#include "fuzz/scratch.h"

namespace checkpoint = fsdp::checkpoint;
namespace fs = std::filesystem;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto folder = fsdp::fuzz::scratch_folder() / "extra";
  fs::create_directories(folder);
  checkpoint::Metadata metadata;
  const checkpoint::ItemPlace place{"__0_0.distcp", 0, static_cast<int64_t>(size)};
  for (const char* key : {"step", "rank0.data", "rank1.data", "rank.x", "config"})
    metadata.add_value({std::string("extra"), std::string(key)}, place);
  metadata.add_chunk({std::string("extra"), std::string("order")}, at::kFloat, {2, 3},
                     {{{0, 0}, {2, 3}}, place});
  checkpoint::files::write_whole(folder / place.file, {reinterpret_cast<const char*>(data), size});
  checkpoint::files::write_whole(folder / ".metadata", checkpoint::encode(metadata));
  for (const bool whole : {false, true}) {
    try {
      checkpoint::Source source(folder);
      if (whole) {
        checkpoint::TorchFile(source, {}).write(folder / "out", {});
        if (fs::file_size(folder / "out") > 64 * size + (1 << 16)) std::abort();
        continue;
      }
      std::vector<std::string> skipped;
      const auto extras = checkpoint::read_extras(source, 0, &skipped);
      if (extras.run.contains("rank1.data") || extras.rank.contains("step")) std::abort();
    } catch (const fsdp::Error&) {
    }
  }
  return 0;
}
