// Runs fsdp bench, for tests that look at it from the outside.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "launch/launched.h"
#include "paths.h"

namespace fsdp::bench {

struct Said {
  int code = -1;
  std::string out, err;
};

inline Said said_by(std::vector<std::string> words) {
  launch::Launched program(words, {"RANK", "WORLD_SIZE", "FSDP_BACKEND", "FSDP_TIMEOUT"});
  Said said;
  said.code = program.wait();
  said.out = program.out();
  said.err = program.err();
  return said;
}

inline Said bench(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {paths::program("fsdp"), "bench"});
  return said_by(arguments);
}

// Refused before anything ran: non-zero, nothing on stdout, the reason and a hint on stderr.
inline void expect_refusal(const Said& said, int code, const std::string& reason,
                           const std::string& hint) {
  EXPECT_EQ(said.code, code);
  EXPECT_EQ(said.out, "");
  EXPECT_NE(said.err.find(reason), std::string::npos) << said.err;
  EXPECT_NE(said.err.find("HINT: " + hint), std::string::npos) << said.err;
}

}  // namespace fsdp::bench
