// Who hangs where and why, from the flight recorder's files of all ranks.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cli/hang_files.h"

namespace fsdp::cli {

struct HangStory {
  enum Kind {
    kNothing,   // no rank waits for another
    kCrash,     // a rank crashed
    kMissing,   // some ranks wait in a call that others haven't reached
    kTogether,  // all ranks are in a call that doesn't end
    kMismatch,  // ranks made different calls
    kOrder,     // ranks wait for each other on several communicators
  };
  struct Waiting {
    int rank;
    double since_s;  // before its file was written
  };
  struct Missing {
    int rank;
    std::string where;  // what is known about it
  };

  Kind kind = kNothing;
  std::string group;  // of the call
  std::string backend;
  int size = 0;
  int64_t sequence = 0;
  std::string call;
  std::vector<Waiting> waiting;
  std::vector<Missing> missing;
  std::vector<std::pair<std::vector<int>, std::string>> calls;  // kMismatch: ranks and their call
  std::string said;                                             // the first error, and by whom
  std::string next;                                             // what to do
};

HangStory tell(const RunRanks& ranks);

std::string describe(const HangStory& story);  // about five lines
nlohmann::ordered_json to_json(const HangStory& story);

// "ranks 0-2, 5"
std::string rank_list(const std::vector<int>& ranks);

}  // namespace fsdp::cli
