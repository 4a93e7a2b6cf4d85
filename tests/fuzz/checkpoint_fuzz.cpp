// Whole checkpoints: `.metadata`, two files of items and a manifest, any of them changed. The
// directory is verified, every tensor and extra value is read, and what can be read is written as
// one file. That takes memory and disk space in proportion to the checkpoint.
//
// An odd first byte replaces the manifest by one that fits the files: otherwise their checksums
// would hide everything behind them.
#include <cstdlib>

#include "checkpoint/safetensors_write.h"
#include "checkpoint/torch_file.h"
#include "checkpoint/verify.h"
#include "fsdp/error.h"
#include "fuzz/scratch.h"

namespace checkpoint = fsdp::checkpoint;
namespace fs = std::filesystem;

namespace {

void write_manifest(const fs::path& folder) {
  checkpoint::Manifest manifest;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name == checkpoint::kManifestName) continue;
    const std::string bytes = checkpoint::files::read_whole(entry.path(), 1 << 20);
    manifest.files[name] = {static_cast<int64_t>(bytes.size()),
                            checkpoint::block_sums(bytes.data(), bytes.size())};
  }
  checkpoint::files::write_whole(folder / checkpoint::kManifestName,
                                 checkpoint::encode_manifest(manifest));
}

template <typename Act>
void attempt(Act act) {
  try {
    act();
  } catch (const fsdp::Error&) {
  }
}

// A new file has the tensors' bytes at most once, and a description of them.
void check_size(const fs::path& file, size_t input) {
  if (fs::exists(file) && fs::file_size(file) > 64 * input + (1 << 16)) std::abort();
  fs::remove(file);
}

void read_all(const fs::path& folder, size_t input) {
  checkpoint::Source source(folder);
  std::vector<std::string> skipped;
  attempt([&] { read_extras(source, 0, &skipped); });
  std::vector<checkpoint::Copied> tensors;
  for (const auto& [name, entry] : source.metadata().tensors) {
    attempt([&, &name = name] { source.read_whole(name); });
    if (name.starts_with("model.")) tensors.push_back({name, name.substr(6), entry.dtype});
  }
  const fs::path out = folder.parent_path() / "out";
  attempt([&] { checkpoint::TorchFile(source, {}).write(out, {}); });
  check_size(out, input);
  attempt([&] { checkpoint::write_safetensors(source, out, tensors, {}, {}); });
  check_size(out, input);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const auto folder = fsdp::fuzz::scratch_folder() / "checkpoint";
  fsdp::fuzz::write_files(folder, {reinterpret_cast<const char*>(data), size},
                          {".metadata", "__0_0.distcp", "__1_0.distcp", ".manifest.json"});
  if (data[0] & 1) write_manifest(folder);
  attempt([&] { checkpoint::verify(folder, {.threads = 1}); });
  attempt([&] { read_all(folder, size); });
  return 0;
}
