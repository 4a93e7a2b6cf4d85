// Buddy: copies of the checkpoints in this host's memory, on the next host of the run, so that a host
// may be lost (docs/recovery.md).
//
// The hosts form a ring. The first rank of each one has two threads: one sends what the host's ranks
// have written to the next host, the other takes what the host before sends and puts it beside the
// host's own files. There, newest_of_hosts() and bring_to_hosts() find it. On the wire, after the
// handshake:
//
//   sender → receiver   {"checkpoint": "step-12", "files": {"__0_0.distcp": 4096, …}}
//   receiver → sender   {"missing": ["__0_0.distcp", …]}
//   sender → receiver   the bytes of these files, in this order
//   receiver → sender   {"kept": "step-12"}, once sizes and checksums are those of the manifest
//
// Instead of its messages, the receiver may send {"problem": "…"}, which ends the copying.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "fsdp/world.h"

namespace fsdp::checkpoint {

class Buddy {
 public:
  // `folder`: for checkpoints, in the memory of this host. Collective.
  Buddy(const World& world, const std::filesystem::path& folder);
  ~Buddy();  // doesn't wait for copies under way

  // Begins to copy a checkpoint of which every host has its files; returns at once. On ranks that
  // aren't the first of their host, it does nothing.
  void copy(const std::string& name);

  enum class State { kDone, kCopying, kFailed };
  State state() const;          // of the last copy(), as far as this host sends it
  std::string problem() const;  // why it failed
  double seconds() const;       // that the last copy took

 private:
  class Ring;
  std::unique_ptr<Ring> ring_;  // of the first rank of a host
};

}  // namespace fsdp::checkpoint
