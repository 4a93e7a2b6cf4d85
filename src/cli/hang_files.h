// The files of the flight recorder (comm/core/flight_recorder.h) of all ranks of a run, and the
// ranks' processes as far as this host knows them.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "comm/core/description.h"

namespace fsdp::cli {

struct RecordedCall {
  std::string group;
  int64_t sequence = 0;  // 0: the ranks meet to make the communicator
  comm::Description what;
  int64_t step = 0;
  int64_t issued_ns = 0, started_ns = 0, ended_ns = 0;  // Unix; 0: not yet
  bool failed = false;

  bool unfinished() const { return ended_ns == 0 || failed; }
  std::string text() const;  // "all_gather of 1,024 float32 for unit layers.7"
};

struct RecordedGroup {
  std::string backend;
  std::vector<int> ranks;  // of the world
};

struct RankFile {
  int rank = 0, world = 0;
  std::string run;  // the same on all ranks
  std::string host, host_identity;
  pid_t pid = 0;
  int64_t written_ns = 0;
  std::string cause;  // fault, crash, request
  std::string why;    // the error, or the signal
  int64_t step = 0;
  std::string phase, unit;
  std::map<std::string, RecordedGroup> groups;
  std::vector<RecordedCall> calls;  // oldest first

  // "stopped", "running", "gone"; empty: it runs elsewhere, or nobody knows.
  std::string process() const;
  std::string whereabouts() const;  // "step 12, forward, unit "layers.6" (aten::addmm)"
};

struct RunRanks {
  std::filesystem::path folder;  // that has the files
  std::map<int, RankFile> files;
  int world = 0;
  std::vector<std::string> notes;  // files that were left out, and why
};

// `where`: the folder of the files, a run's directory, or a folder with several runs' folders (the
// latest counts). Files of an earlier run are left out. Throws Error if there are none.
RunRanks read_ranks(const std::filesystem::path& where);

// Throws Error if it isn't such a file.
RankFile read_rank(const std::filesystem::path& file);

// --- a run that is still under way ---

struct RankProcess {  // as the run's events.jsonl has it
  int rank = 0;
  std::string host, host_identity;
  pid_t pid = 0;
};

// The ranks of the run in directory `run`, if it hasn't ended; else none.
std::vector<RankProcess> running_ranks(const std::filesystem::path& run);

// Asks the ranks on this host for their files and waits for them, a few seconds at most. Returns
// what can't be had: "rank 1 (pid 4711) doesn't answer: stopped".
std::vector<std::string> ask(const std::vector<RankProcess>& ranks,
                             const std::filesystem::path& folder);

}  // namespace fsdp::cli
