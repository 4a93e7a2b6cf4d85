// Token files: the first byte selects the format, the next two give the bytes of the index of a
// Megatron file; the rest is the file itself.
#include <cstdlib>
#include <cstring>

#include "data/token_file.h"
#include "fsdp/error.h"
#include "fuzz/token_files.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using fsdp::data::Format;
  using fsdp::data::TokenFile;
  if (size < 3) return 0;
  const Format formats[] = {Format::kNanogpt, Format::kLlmc, Format::kMegatron, Format::kAuto};
  const Format format = formats[data[0] % 4];
  const bool megatron = format == Format::kMegatron;
  uint16_t index = 0;
  std::memcpy(&index, data + 1, 2);
  const std::string bytes(reinterpret_cast<const char*>(data + 3), size - 3);
  auto& files = fsdp::fuzz::files_in_memory();
  files["fuzzed.idx"] = bytes.substr(0, index);
  files["fuzzed.bin"] = megatron && index < bytes.size() ? bytes.substr(index)
                        : megatron                       ? ""
                                                         : bytes;
  try {
    const auto file = TokenFile::open(megatron ? "fuzzed.idx" : "fuzzed.bin", format);
    if (file->tokens() < 1) std::abort();
    std::vector<int64_t> ids(static_cast<size_t>(file->tokens()));
    file->read(0, file->tokens(), ids.data());
    const int64_t half = file->tokens() / 2;
    file->read(half, file->tokens() - half, ids.data());
    for (int64_t first : {int64_t{0}, half}) {
      int64_t last = -1;
      for (int64_t start : file->document_starts(first, file->tokens() - first)) {
        if (start < first || start >= file->tokens() || start <= last) std::abort();
        last = start;
      }
    }
  } catch (const fsdp::Error&) {
  }
  return 0;
}
