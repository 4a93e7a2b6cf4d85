// Command lines that fsdp run refuses, in this process: starting the binary for each takes seconds.
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "cli/program.h"

namespace fsdp::launch {
namespace {

using Words = std::vector<std::string>;

struct Said {
  int code;
  std::string out, err;
};

// `fsdp run ARGUMENTS`, parsed and run as by main().
Said run_with(Words arguments) {
  arguments.insert(arguments.begin(), {"fsdp", "run"});
  std::vector<char*> words;
  for (std::string& word : arguments) words.push_back(word.data());
  words.push_back(nullptr);
  CLI::App app{"fsdp", "fsdp"};
  app.require_subcommand(1);
  cli::Action action;
  cli::add_run(app, action);
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const int code = cli::run_command(app, action, static_cast<int>(arguments.size()), words.data());
  return {code, testing::internal::GetCapturedStdout(), testing::internal::GetCapturedStderr()};
}

TEST(RunFlags, BadFlagsAreErrorsWithAHint) {
  struct Case {
    Words arguments;
    std::string text;
  };
  for (const auto& [arguments, text] : {
           // An error is printed once, so no two of these follow each other.
           Case{{}, "no program to run"},
           Case{{"-n", "0", "true"}, "-n \"0\" isn't a number of ranks"},
           Case{{"-n", "2"}, "no program to run"},
           Case{{"-n", "-3", "true"}, "-n \"-3\" isn't a number of ranks"},
           Case{{"-n", "2", "--"}, "no program to run"},
           Case{{"-n", "two", "true"}, "-n \"two\" isn't a number of ranks"},
           Case{{"-n", "2", "--", ""}, "no program to run"},
           Case{{"-n", "2.5", "true"}, "-n \"2.5\" isn't a number of ranks"},
           Case{{"-n", "1000000", "true"}, "too many ranks for one machine"},
           Case{{"-n", "99999999999999999999", "true"}, "isn't a number of ranks"},
           Case{{"-n"}, "-n"},
           Case{{"--nope", "true"}, "there is no flag --nope"},
           Case{{"-x", "true"}, "there is no flag -x"},
           Case{{"--nnodes", "0", "true"}, "--nnodes \"0\""},
           Case{{"--nnodes", "3:1", "true"}, "isn't a number of nodes"},
           Case{{"--nnodes", "1", "--node-rank", "spare", "true"}, "out of range"},
           Case{{"--nnodes", "2", "true"}, "--nnodes 2 needs --master"},
           Case{{"--nnodes", "2", "--node-rank", "2", "--master", "a:1", "true"}, "out of range"},
           Case{{"--node-rank", "1", "true"}, "out of range"},
           Case{{"--node-rank", "-1", "true"}, "--node-rank \"-1\""},
           Case{{"--node-rank", "x", "true"}, "--node-rank \"x\""},
           Case{{"--nnodes", "2", "--master", "host:port", "true"}, "\"port\" isn't a port"},
           Case{{"--nnodes", "2", "--master", "host:70000", "true"}, "\"70000\" isn't a port"},
           Case{{"--nnodes", "2", "--master", ":1", "true"}, "isn't HOST:PORT"},
           Case{{"--nnodes", "2", "--master", "host:65535", "true"}, "65536"},
           Case{{"--nnodes", "2", "--master", "h:5000", "--control-port", "5000", "true"},
                "--control-port"},
           Case{{"--master", "a:1", "--master-port", "1", "true"}, "--master excludes"},
           Case{{"--standalone", "--nnodes", "2", "true"}, "--standalone"},
           Case{{"--max-restarts", "-1", "true"}, "--max-restarts"},
           Case{{"--max-restarts", "x", "true"}, "--max-restarts"},
           Case{{"--grace", "-1", "true"}, "--grace"},
           Case{{"--grace", "nan", "true"}, "--grace"},
           Case{{"--rendezvous-timeout", "soon", "true"}, "--rendezvous-timeout"},
           Case{{"--prefix", "sometimes", "true"}, "--prefix"},
           Case{{"-m", "--no-python", "x"}, "contradict"},
       }) {
    const Said said = run_with(arguments);
    EXPECT_TRUE(said.code == 1 || said.code == 2) << said.code << " for " << text;
    for (const std::string& part : {text, std::string("error"), std::string("HINT: ")})
      EXPECT_NE(said.err.find(part), std::string::npos) << part << " isn't in:\n" << said.err;
    EXPECT_EQ(said.out, "");
  }
}

}  // namespace
}  // namespace fsdp::launch
