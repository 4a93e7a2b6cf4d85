// MemoryFolder: a folder in the memory of this host, in which ranks keep what must not be lost when
// they die (docs/recovery.md). It lives as long as the launcher.
#pragma once

#include <string>
#include <utility>

#include "launch/processes.h"

namespace fsdp::launch {

inline constexpr const char* kMemoryVariable = "FSDP_MEMORY_DIR";  // tells ranks its path

class MemoryFolder {
 public:
  MemoryFolder() = default;  // none
  // Makes the folder `name` in a folder of this user below /dev/shm. If that fails, path() is
  // empty; ranks then do without.
  explicit MemoryFolder(const std::string& name);
  MemoryFolder(MemoryFolder&& other) noexcept { *this = std::move(other); }
  MemoryFolder& operator=(MemoryFolder&& other) noexcept;
  ~MemoryFolder();

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  FileDescriptor lock_;  // others don't remove it while we hold this
};

// Removes the folders of this user's launchers that are dead.
void remove_dead_memory_folders() noexcept;

}  // namespace fsdp::launch
