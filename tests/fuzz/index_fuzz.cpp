// A Hugging Face directory: model.safetensors.index.json and the files that it names. Everything
// listed must be inside of its file.
#include <cstdlib>

#include "checkpoint/hugging_face.h"
#include "fsdp/error.h"
#include "fuzz/scratch.h"

namespace checkpoint = fsdp::checkpoint;
namespace fs = std::filesystem;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto folder = fsdp::fuzz::scratch_folder() / "model";
  fsdp::fuzz::write_files(folder, {reinterpret_cast<const char*>(data), size},
                          {"model.safetensors.index.json", "model.safetensors", "config.json",
                           "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"});
  try {
    for (const auto& [name, listed] : checkpoint::list_hugging_face(folder).tensors) {
      const auto held = static_cast<int64_t>(fs::file_size(folder / listed.file));
      if (listed.bytes < 0 || listed.stored.offset < 0 ||
          listed.stored.offset > held - listed.bytes)
        std::abort();
      checkpoint::name_in_model(name);
    }
  } catch (const fsdp::Error&) {
  }
  return 0;
}
