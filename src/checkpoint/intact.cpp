#include "checkpoint/intact.h"

#include "base/format.h"
#include "checkpoint/damaged.h"
#include "checkpoint/files.h"

namespace fsdp::checkpoint {
namespace {

std::string problem_with_files(const std::filesystem::path& dir, const Manifest& manifest) {
  for (const auto& [name, file] : manifest.files) {
    std::error_code problem;
    const auto size = std::filesystem::file_size(dir / name, problem);
    if (problem) return name + " is missing";
    if (static_cast<int64_t>(size) != file.size)
      return formatted("{} has {} of {} bytes", name, size, file.size);
  }
  const auto sums = manifest.files.find(kMetadataName);
  if (sums != manifest.files.end()) files::read_all(dir / kMetadataName, &sums->second);
  return "";
}

}  // namespace

std::string problem_in(const std::filesystem::path& dir) {
  try {
    if (const auto manifest = read_manifest(dir)) return problem_with_files(dir, *manifest);
    if (read_metadata(dir).mark.empty()) return "";
    return formatted("{} is missing", kManifestName);
  } catch (const Error& problem) {
    std::string text = problem.message();
    if (text.ends_with('.')) text.pop_back();
    return text;
  } catch (const std::exception& problem) {
    return problem.what();
  }
}

void require_mark(const std::filesystem::path& dir, const Metadata& metadata,
                  const Manifest* manifest) {
  if (metadata.mark.empty()) return;  // of Python, or of an older version
  if (!manifest)
    throw Damaged(formatted("{}: is missing, so the checkpoint's bytes can't be checked.",
                            dir / kManifestName),
                  formatted("load another checkpoint, or make it again: fsdp ckpt verify {} "
                            "--restore-manifest.",
                            dir));
  if (mark_of(*manifest) != metadata.mark)
    throw Damaged(formatted("{}: belongs to another checkpoint than the files beside it.",
                            dir / kManifestName),
                  "the files were mixed up; load another checkpoint.");
}

}  // namespace fsdp::checkpoint
