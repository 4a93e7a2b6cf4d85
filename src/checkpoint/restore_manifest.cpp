// restore_manifest: sums up the files of a checkpoint whose manifest is lost. The mark in .metadata
// tells whether the result is the manifest that was lost, and so whether the files are intact.
#include <algorithm>
#include <memory>

#include "base/format.h"
#include "checkpoint/damaged.h"
#include "checkpoint/files.h"
#include "checkpoint/intact.h"

namespace fsdp::checkpoint {
namespace {

constexpr int64_t kSummedPiece = 32 * kSumBlock;

FileSums sums_of_file(const std::filesystem::path& path) {
  const files::Input file(path);
  const std::unique_ptr<char[]> buffer(new char[kSummedPiece]);
  FileSums sums{file.size(), {}};
  for (int64_t at = 0; at < file.size(); at += kSummedPiece) {
    const auto size = static_cast<size_t>(std::min(kSummedPiece, file.size() - at));
    file.read(at, buffer.get(), size);
    const auto some = block_sums(buffer.get(), size);
    sums.sums.insert(sums.sums.end(), some.begin(), some.end());
  }
  return sums;
}

}  // namespace

void restore_manifest(const std::filesystem::path& dir) {
  const Metadata metadata = read_metadata(dir);
  if (metadata.mark.empty())
    throw Error(formatted("{}: .metadata doesn't say that there was a manifest.", dir),
                "Python and older versions write none; fsdp ckpt verify checks such a checkpoint.");
  Manifest manifest;
  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("__") && name.ends_with(".distcp"))
      manifest.files[name] = sums_of_file(entry.path());
  }
  if (mark_of(manifest) != metadata.mark)
    throw Damaged(formatted("{}: its files aren't what was saved, so there is no manifest for them.",
                            dir),
                  "load another checkpoint; fsdp ckpt verify lists the damage.");
  manifest.files[kMetadataName] = sums_of_file(dir / kMetadataName);
  write_manifest(dir, manifest);
  files::sync_directory(dir);
}

}  // namespace fsdp::checkpoint
