// Shared by the tests of src/disk: a temporary directory, the ways to access a file, and
// distinguishable contents.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>  // NOLINT: mkdtemp

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "base/seams.h"
#include "disk/state_store.h"

namespace fsdp::disk {

inline bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

struct Directory {
  Directory() {
    std::string name = (std::filesystem::temp_directory_path() / "fsdp-disk-XXXXXX").string();
    if (!::mkdtemp(name.data())) throw Error("no temporary directory: " + name, "set TMPDIR.");
    path = name;
  }
  ~Directory() { std::filesystem::remove_all(path); }
  std::string path;
};

struct Way {
  const char* name;
  bool direct, uring;
};
inline constexpr Way kWays[] = {
    {"uring", true, true}, {"threads", true, false}, {"page_cache", false, false}};

// Runs a test once per way. A way that this machine doesn't support is skipped, with the reason.
class EveryWay : public testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    if (GetParam().uring && !why_no_uring().empty()) GTEST_SKIP() << "io_uring: " << why_no_uring();
    if (GetParam().uring && !ScratchFile(directory.path, 4096).direct())
      GTEST_SKIP() << "no O_DIRECT in " << directory.path;
  }

  StoreOptions options(int buffers = 3) const {
    StoreOptions made{.buffers = buffers, .direct = GetParam().direct};
    made.engine.uring = GetParam().uring;
    made.engine.piece = 16 << 10;
    made.engine.depth = 5;
    made.engine.threads = 3;
    return made;
  }

  Directory directory;
};

inline std::string way_name(const testing::TestParamInfo<Way>& info) {
  return info.param.name;
}

// Bytes that are unique to (tensor, version).
inline std::vector<char> contents(int64_t bytes, uint64_t tensor, uint64_t version) {
  std::vector<char> made(static_cast<size_t>(aligned(bytes)));
  uint64_t state = (tensor + 1) * 0x9E3779B97F4A7C15u ^ (version + 1) * 0xC2B2AE3D27D4EB4Fu;
  for (size_t at = 0; at < made.size(); at += sizeof state) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(&made[at], &state, sizeof state);
  }
  made.resize(static_cast<size_t>(bytes));
  return made;
}

// The message and hint of the Error that `work` throws; empty if it doesn't throw.
template <typename Work>
std::string error_of(Work work) {
  try {
    work();
  } catch (const Error& problem) {
    return problem.what();
  }
  return "";
}

}  // namespace fsdp::disk
