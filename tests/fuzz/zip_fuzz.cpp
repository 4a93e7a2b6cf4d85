// Archives of torch.save. The first 16 bytes give the position of the archive in the file, which a
// hostile `.metadata` could set to anything.
#include <cstdlib>
#include <cstring>

#include "checkpoint/zip.h"
#include "fsdp/error.h"
#include "fuzz/memory_file.h"

namespace checkpoint = fsdp::checkpoint;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static fsdp::fuzz::MemoryFile memory;
  int64_t place[2];
  if (size < sizeof place) return 0;
  std::memcpy(place, data, sizeof place);
  data += sizeof place, size -= sizeof place;
  if (place[1] == 0) place[1] = static_cast<int64_t>(size);  // all of it
  memory.fill(data, size);
  try {
    const checkpoint::files::Input file(memory.path());
    const checkpoint::ArchiveReader archive(file, place[0], place[1], "fuzzed");
    for (const char* name : {"data.pkl", "byteorder", "version", "data/0", "", "a/b"}) {
      const auto record = archive.find(name);
      if (!record) continue;
      if (record->offset < 0 || record->size < 0 || record->offset > file.size() - record->size)
        std::abort();
      archive.read(*record, 1 << 16);
    }
    archive.need("data.pkl");
  } catch (const fsdp::Error&) {
  }
  return 0;
}
