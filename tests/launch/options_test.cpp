#include "launch/options.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "fsdp/error.h"

namespace fsdp::launch {
namespace {

using Words = std::vector<std::string>;

TEST(ParseEndpoint, AcceptsNamesIpv4AndIpv6) {
  auto check = [](const char* text, const char* host, int port) {
    auto endpoint = parse_endpoint(text, "--master");
    EXPECT_EQ(endpoint.host, host) << text;
    EXPECT_EQ(endpoint.port, port) << text;
  };
  check("node0:29500", "node0", 29500);
  check("node0", "node0", 0);
  check("10.0.0.1:1", "10.0.0.1", 1);
  check("[fe80::1]:65535", "fe80::1", 65535);
  check("[::1]", "::1", 0);
}

TEST(ParseEndpoint, RejectsAnythingElseWithAHint) {
  for (const char* text : {"", ":1", "a:b", "a:0", "a:65536", "a:-1", "a:1x", "::1", "[::1", "[]:1",
                           "[::1]1", "a:", "a:1:2", "a:99999999999999999999"}) {
    try {
      parse_endpoint(text, "--master");
      ADD_FAILURE() << "\"" << text << "\" was accepted";
    } catch (const Error& problem) {
      EXPECT_NE(problem.message().find("--master"), std::string::npos) << problem.what();
      EXPECT_FALSE(problem.hint().empty()) << problem.what();
    }
  }
}

TEST(CommandFor, RunsPythonForScriptsAndModulesOnly) {
  unsetenv("PYTHON_EXEC");
  EXPECT_EQ(command_for({"./train", "-m", "x.py"}, false, false), (Words{"./train", "-m", "x.py"}));
  EXPECT_EQ(command_for({"train.py", "--lr", "1"}, false, false),
            (Words{"python3", "-u", "train.py", "--lr", "1"}));
  EXPECT_EQ(command_for({"train.py"}, false, true), (Words{"train.py"}));
  EXPECT_EQ(command_for({"pkg.train", "x"}, true, false),
            (Words{"python3", "-u", "-m", "pkg.train", "x"}));
  EXPECT_THROW(command_for({}, false, false), Error);
  EXPECT_THROW(command_for({""}, false, false), Error);
  EXPECT_THROW(command_for({"pkg"}, true, true), Error);
}

TEST(Complete, DefaultsTheControlPortToTheMasterPortPlusOne) {
  Options options;
  options.nnodes = 2;
  options.node_rank = 1;
  options.master_host = "node0";
  complete(options);
  EXPECT_EQ(options.master_port, 29500);
  EXPECT_EQ(options.control_port, 29501);
}

TEST(Complete, LeavesThePortOfOneNodeToTheLauncher) {
  Options options;
  complete(options);
  EXPECT_EQ(options.master_port, 0);
}

TEST(ParseNnodes, AcceptsTorchrunsFixedRange) {
  EXPECT_EQ(parse_nnodes("3").most, 3);
  EXPECT_EQ(parse_nnodes("3").least, 3);
  EXPECT_EQ(parse_nnodes("2:2").most, 2);
  EXPECT_EQ(parse_nnodes("1:4").least, 1);
  EXPECT_EQ(parse_nnodes("1:4").most, 4);
  EXPECT_THROW(parse_nnodes("4:1"), Error);
  EXPECT_THROW(parse_nnodes(":2"), Error);
}

}  // namespace
}  // namespace fsdp::launch
