// RunDirectory: the files of a run. owner/, config.toml (resolved), metrics.jsonl, events.jsonl,
// tensorboard/, checkpoints/step-N and the link checkpoints/latest, a copy of the tokenizer if
// there is one, origin/ if the run started from a Hugging Face directory, and what --profile, an
// out-of-memory error and a hang leave.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "base/format.h"
#include "train/config.h"

namespace fsdp::train {

struct RunDirectory {
  std::filesystem::path root;

  std::filesystem::path config() const { return root / "config.toml"; }
  std::filesystem::path metrics() const { return root / "metrics.jsonl"; }
  std::filesystem::path events() const { return root / "events.jsonl"; }
  std::filesystem::path tensorboard() const { return root / "tensorboard"; }
  // Of --profile: a trace of all ranks, each rank's part of it until they are merged, and where the
  // time went, as JSON and as a page.
  std::filesystem::path trace() const { return root / "trace.json"; }
  std::filesystem::path trace_part(int rank) const {
    return root / formatted("trace-rank{}.part", rank);
  }
  std::filesystem::path profile() const { return root / "profile.json"; }
  std::filesystem::path profile_page() const { return root / "profile.html"; }
  // Of an out-of-memory error on a rank: a page, and a GPU's memory for PyTorch's viewer.
  std::filesystem::path shortage_page(int rank) const {
    return root / formatted("out-of-memory-rank{}.html", rank);
  }
  std::filesystem::path memory_snapshot(int rank) const {
    return root / formatted("memory-rank{}.pickle", rank);
  }
  std::filesystem::path owner() const { return root / "owner"; }  // train/owner.h
  // Of the flight recorder, a file per rank, and what an earlier start of the run left there.
  std::filesystem::path flight() const { return root / "flight"; }
  // Stacks of a rank's threads, of each step that took far too long.
  std::filesystem::path stalls(int rank) const {
    return root / formatted("stall-rank{}.txt", rank);
  }
  std::filesystem::path earlier_flight() const { return root / "flight-before"; }
  std::filesystem::path checkpoints() const { return root / "checkpoints"; }
  std::filesystem::path checkpoint(int64_t step) const {
    return checkpoints() / formatted("step-{}", step);
  }
  std::filesystem::path tokenizer() const { return root / "tokenizer.json"; }
  // Settings of the Hugging Face directory that the run started from.
  std::filesystem::path origin() const { return root / "origin"; }
};

// Files of an earlier start must not be taken for this one's. For rank 0, before the others begin.
void put_flight_aside(const RunDirectory& run);

// runs/NAME, or runs/NAME-2, … if that exists.
std::filesystem::path free_directory(const std::string& name);

// Whether a run could resume there: its directory has a complete checkpoint.
bool has_checkpoint(const std::filesystem::path& run);

// For one rank. A new run must not find another run in the directory; a resumed run must find a
// checkpoint, which is returned. Throws Error otherwise. With Resume::kAuto, a run that left no
// checkpoint is begun anew. `take` makes this process the directory's owner, as soon as it exists.
std::optional<std::filesystem::path> prepare(const RunDirectory& run, Resume resume,
                                             const std::function<void()>& take = {});

// Resolves a path passed to `fsdp generate` and others: a run's directory, its checkpoints folder,
// or one checkpoint. Throws Error if it is none of these.
struct FoundCheckpoint {
  std::filesystem::path checkpoint;
  std::filesystem::path run;  // empty: the checkpoint isn't in a run's directory
};
FoundCheckpoint find_checkpoint(const std::filesystem::path& where);

}  // namespace fsdp::train
