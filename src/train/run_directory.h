// A run is a directory: config.toml as resolved, metrics.jsonl, tensorboard/, checkpoints/step-N
// and the link checkpoints/latest, a copy of the tokenizer where the data had one, and origin/
// where it was begun from a Hugging Face directory.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "train/config.h"

namespace fsdp::train {

struct RunDirectory {
  std::filesystem::path root;

  std::filesystem::path config() const { return root / "config.toml"; }
  std::filesystem::path metrics() const { return root / "metrics.jsonl"; }
  std::filesystem::path tensorboard() const { return root / "tensorboard"; }
  std::filesystem::path trace(int rank) const {  // of --profile
    return root / ("trace-rank" + std::to_string(rank) + ".json");
  }
  std::filesystem::path checkpoints() const { return root / "checkpoints"; }
  std::filesystem::path checkpoint(int64_t step) const {
    return checkpoints() / ("step-" + std::to_string(step));
  }
  std::filesystem::path tokenizer() const { return root / "tokenizer.json"; }
  // What the Hugging Face directory that the run was begun from says beside its weights.
  std::filesystem::path origin() const { return root / "origin"; }
};

// runs/NAME, or runs/NAME-2, … if that is taken.
std::filesystem::path free_directory(const std::string& name);

// For one rank. A new run must find no other run there; one that is resumed must find a checkpoint.
// Returns the checkpoint to go on from. Errors say what is there and what to do.
std::optional<std::filesystem::path> prepare(const RunDirectory& run, bool resume);

// Writes the config beside the run, whole or not at all.
void keep_config(const RunDirectory& run, const std::string& toml);

// What `fsdp generate` and others may be given: a run's directory, its checkpoints folder, or one
// checkpoint. An Error where none of these is there.
struct FoundCheckpoint {
  std::filesystem::path checkpoint;
  std::filesystem::path run;  // empty: the checkpoint lies in no run's directory
};
FoundCheckpoint find_checkpoint(const std::filesystem::path& where);

}  // namespace fsdp::train
