// fsdp explain from the outside: its events are those the strategy demands, its bytes add up to
// what the engine counted, and docs/how-it-works.md shows what it prints.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>

#include "launch/launched.h"
#include "paths.h"

namespace fsdp {
namespace {

using Json = nlohmann::ordered_json;

launch::Ended explain(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {paths::program("fsdp"), "explain"});
  return launch::run_to_end(arguments, {"RANK", "WORLD_SIZE", "FSDP_BACKEND", "FSDP_TIMEOUT=60"});
}

// One account per rank, in rank order.
std::vector<Json> accounts_of(std::vector<std::string> arguments) {
  arguments.push_back("--json");
  launch::Ended said = explain(arguments);
  EXPECT_EQ(said.code, 0) << said.err;
  std::vector<Json> accounts;
  std::istringstream lines(said.out);
  for (std::string line; std::getline(lines, line);) {
    accounts.push_back(Json::parse(line, nullptr, /*allow_exceptions=*/false));
    EXPECT_TRUE(accounts.back().is_object()) << line;
  }
  return accounts;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

struct Case {
  std::string strategy;
  int ranks;
  int prefetch;
  bool shared = false;

  std::vector<std::string> flags() const {
    std::vector<std::string> all = {"--strategy",          strategy,     "--ranks",
                                    std::to_string(ranks), "--prefetch", std::to_string(prefetch)};
    if (shared) all.push_back("--shared");
    return all;
  }
};

class Explain : public testing::TestWithParam<Case> {};

constexpr int kBlocks = 5;

// How often FULL_SHARD must gather a block: twice if it was freed before backward came to it, which
// happens to all but the last that fit the ring.
int gathers_of(const Case& how, const std::string& unit) {
  bool sends = how.ranks > 1 && how.strategy != "NO_SHARD" && !how.shared;
  if (!sends) return 0;
  if (unit == "root" || how.strategy == "SHARD_GRAD_OP") return 1;
  int block = std::stoi(unit.substr(unit.rfind('.') + 1));
  int ring = how.prefetch > 0 ? 2 + how.prefetch : 1;
  return block < kBlocks - ring ? 2 : 1;
}

void expect_what_is_demanded(const Case& how, const std::vector<Json>& accounts) {
  for (const Json& account : accounts) {
    SCOPED_TRACE(account.dump());
    std::map<std::string, std::vector<std::string>> seen;  // events by unit
    std::vector<std::string> first_ready, reduced;
    double before = 0;
    for (const Json& event : account["events"]) {
      std::string kind = event["event"], unit = event["unit"];
      if (kind == "ready" && seen[unit].size() == 1) first_ready.push_back(unit);
      if (kind == "reduced") reduced.push_back(unit);
      seen[unit].push_back(kind);
      EXPECT_GE(event["us"].get<double>(), before) << "time goes on";
      before = event["us"];
      EXPECT_FALSE(how.prefetch == 0 && event["ahead"].get<bool>());
    }
    EXPECT_GE(account["step_us"].get<double>(), before);
    ASSERT_EQ(seen.size(), kBlocks + 1u);
    for (const auto& [unit, kinds] : seen) {
      SCOPED_TRACE(unit);
      int gathers = gathers_of(how, unit);
      std::vector<std::string> expected;
      if (gathers == 0) expected = {"open", "ready", "reduce", "reduced", "close"};
      if (gathers == 1) expected = {"gather", "ready", "reduce", "reduced", "free"};
      if (gathers == 2)
        expected = {"gather", "ready", "free", "gather", "ready", "reduce", "reduced", "free"};
      EXPECT_EQ(kinds, expected);
    }
    EXPECT_EQ(first_ready, (std::vector<std::string>{"root", "blocks.0", "blocks.1", "blocks.2",
                                                     "blocks.3", "blocks.4"}));
    EXPECT_EQ(reduced, (std::vector<std::string>(first_ready.rbegin(), first_ready.rend())));
  }
}

// Bytes of the events are the engine's own traffic, and the shards are the whole model.
void expect_sums(const Case& how, const std::vector<Json>& accounts) {
  for (size_t rank = 0; rank < accounts.size(); ++rank) {
    const Json& account = accounts[rank];
    EXPECT_EQ(account["rank"], rank);
    std::map<std::string, int64_t> sent;
    for (const Json& event : account["events"])
      sent[event["event"]] += event["sent"].get<int64_t>();
    const Json& traffic = account["traffic"];
    EXPECT_EQ(sent["gather"], traffic["all_gather"].get<int64_t>());
    EXPECT_EQ(sent["reduce"],
              traffic["reduce_scatter"].get<int64_t>() + traffic["all_reduce"].get<int64_t>());
    EXPECT_EQ(sent["open"] + sent["ready"] + sent["free"] + sent["reduced"] + sent["close"], 0);
    EXPECT_EQ(sent["reduce"] > 0, how.ranks > 1);

    int64_t model = 0;
    for (const Json& unit : account["units"])
      for (const Json& parameter : unit["parameters"]) {
        int64_t kept = 0;
        for (const Json& part : parameter["kept"]) {
          EXPECT_TRUE(part["numel"] == 0 || part["first"] == kept) << parameter;
          kept += part["numel"].get<int64_t>();
        }
        EXPECT_EQ(kept, parameter["numel"].get<int64_t>()) << parameter;
        model += kept;
      }
    EXPECT_EQ(model, account["numel"].get<int64_t>());
    EXPECT_EQ(account["makes_no_memory"], true);
  }
}

TEST_P(Explain, TellsWhatTheStrategyDemandsInBytesThatAddUp) {
  std::vector<Json> accounts = accounts_of(GetParam().flags());
  ASSERT_EQ(accounts.size(), static_cast<size_t>(GetParam().ranks));
  expect_what_is_demanded(GetParam(), accounts);
  expect_sums(GetParam(), accounts);
}

INSTANTIATE_TEST_SUITE_P(Ways, Explain,
                         testing::Values(Case{"FULL_SHARD", 1, 1}, Case{"FULL_SHARD", 2, 1},
                                         Case{"FULL_SHARD", 3, 0},
                                         Case{"FULL_SHARD", 2, 1, /*shared=*/true},
                                         Case{"SHARD_GRAD_OP", 2, 1}, Case{"SHARD_GRAD_OP", 3, 0},
                                         Case{"NO_SHARD", 2, 1}, Case{"HYBRID_SHARD", 4, 1}),
                         [](const auto& test) {
                           return test.param.strategy + "_" + std::to_string(test.param.ranks) +
                                  "_" + std::to_string(test.param.prefetch) +
                                  (test.param.shared ? "_shared" : "");
                         });

// "gather root" and the like, from the lines of the output.
std::vector<std::string> told_events(const std::string& text) {
  static const std::regex event(
      R"(^ +\d+  (gather|ready|free|reduce|reduced|open|close) +([a-z0-9.]+) .*$)");
  std::vector<std::string> told;
  for (const std::string& line : lines_of(text)) {
    std::smatch match;
    if (std::regex_match(line, match, event)) told.push_back(match[1].str() + " " + match[2].str());
  }
  return told;
}

TEST(ExplainText, HasALineForEveryEvent) {
  std::vector<std::string> expected;
  std::vector<Json> accounts = accounts_of({"--model", "llama-tiny"});
  ASSERT_EQ(accounts.size(), 2u);
  for (const Json& event : accounts.front()["events"])
    expected.push_back(event["event"].get<std::string>() + " " + event["unit"].get<std::string>());
  ASSERT_FALSE(expected.empty());
  for (const std::vector<std::string>& flags :
       {std::vector<std::string>{}, std::vector<std::string>{"--brief"}}) {
    std::vector<std::string> arguments = {"--model", "llama-tiny"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    launch::Ended said = explain(arguments);
    EXPECT_EQ(said.code, 0) << said.err;
    EXPECT_EQ(told_events(said.out), expected) << said.out;
    EXPECT_EQ(said.out.find('\x1b'), std::string::npos) << "colours in a pipe";
    EXPECT_TRUE(launch::has(said.out, "All ranks had the same events in the same order."));
  }
}

TEST(ExplainText, DrawsTheShardsOfABlock) {
  launch::Ended said = explain({"--brief"});
  EXPECT_EQ(said.code, 0) << said.err;
  EXPECT_TRUE(launch::has(said.out, R"(  blocks.0 to blocks.4, each: 384 parameters, 1,536 bytes
    |up.weight          |gate.weight        |down.weight        |
    |rank 0                       |rank 1                       |
    rank 0 keeps 768 bytes: up.weight, rows 0-7 of gate.weight
    rank 1 keeps 768 bytes: rows 8-15 of gate.weight, down.weight
)"));
}

TEST(ExplainText, GathersAheadAreToldAsSuch) {
  auto count = [](const std::string& text) {
    size_t found = 0;
    for (const std::string& line : lines_of(text))
      found += line.find("prefetched") != std::string::npos;
    return found;
  };
  launch::Ended ahead = explain({"--brief"}), on_demand = explain({"--brief", "--prefetch", "0"});
  EXPECT_EQ(ahead.code + on_demand.code, 0) << ahead.err << on_demand.err;
  EXPECT_EQ(count(ahead.out), 7u) << ahead.out;  // all 8 gathers but the first
  EXPECT_EQ(count(on_demand.out), 0u) << on_demand.out;
}

TEST(ExplainText, RefusesWhatMakesNoSense) {
  auto refused = [](std::vector<std::string> arguments, int code, const std::string& reason) {
    launch::Ended said = explain(arguments);
    EXPECT_EQ(said.code, code);
    EXPECT_EQ(said.out, "");
    EXPECT_TRUE(launch::has(said.err, reason));
    EXPECT_TRUE(launch::has(said.err, "HINT: "));
  };
  refused({"--ranks", "0"}, 2, "--ranks");
  refused({"--ranks", "9"}, 2, "--ranks");
  refused({"--strategy", "nonsense"}, 2, "--strategy");
  refused({"--model", "nonsense"}, 2, "--model");
  refused({"--strategy", "hybrid_shard", "--ranks", "3"}, 2, "HYBRID_SHARD keeps two copies");
}

// The page holds the whole output of `fsdp explain`, cut into pieces: fenced blocks marked
// "explain". Times differ from run to run, nothing else may.
TEST(ExplainText, IsWhatHowItWorksShows) {
  std::ifstream file(paths::source("docs/how-it-works.md"));
  std::stringstream page;
  page << file.rdbuf();
  auto shape = [](const std::string& line) {
    return std::regex_replace(line, std::regex(R"(^ +\d+  (\w))"), "  #  $1");
  };
  std::vector<std::string> shown, printed;
  bool inside = false;
  for (const std::string& line : lines_of(page.str())) {
    if (line == "```explain" || (inside && line == "```"))
      inside = !inside;
    else if (inside && !line.empty())
      shown.push_back(shape(line));
  }
  launch::Ended said = explain({});
  EXPECT_EQ(said.code, 0) << said.err;
  for (const std::string& line : lines_of(said.out))
    if (!line.empty()) printed.push_back(shape(line));
  ASSERT_GT(shown.size(), 50u) << "no blocks marked \"explain\" in "
                               << paths::source("docs/how-it-works.md");
  for (size_t i = 0; i < std::min(shown.size(), printed.size()); ++i)
    ASSERT_EQ(shown[i], printed[i])
        << "docs/how-it-works.md is out of date: paste the output of fsdp explain";
  EXPECT_EQ(shown.size(), printed.size());
}

TEST(ExplainPage, DrawsTheShardsAndTheRing) {
  launch::Folder folder;
  for (const Case& one : {Case{"FULL_SHARD", 2, 1}, Case{"SHARD_GRAD_OP", 2, 0},
                          Case{"NO_SHARD", 1, 1}, Case{"FULL_SHARD", 2, 1, true}}) {
    std::vector<std::string> arguments = one.flags();
    arguments.insert(arguments.end(), {"--html", folder / "step.html"});
    const launch::Ended said = explain(arguments);
    ASSERT_EQ(said.code, 0) << said.err;
    EXPECT_EQ(said.out, folder / "step.html" + "\n");
    const std::string page = folder.read("step.html");
    EXPECT_NE(page.find("Who is in which buffer"), std::string::npos);
    const bool ring = one.strategy == "FULL_SHARD" && !one.shared;
    EXPECT_EQ(page.find("ring buffer 3") != std::string::npos, ring) << one.strategy;
    EXPECT_EQ(page.find("ring buffer 4"), std::string::npos) << "as many as the engine has";
  }
}

}  // namespace
}  // namespace fsdp
