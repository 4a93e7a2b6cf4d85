// fsdp run --nnodes 2, as two launchers on this machine. namespaces.sh tests two network
// namespaces.
#include <gtest/gtest.h>

#include <csignal>
#include <memory>

#include "fsdp/error.h"
#include "launch/connection.h"
#include "launch/launched.h"

namespace fsdp::launch {
namespace {

using Words = std::vector<std::string>;

// The ports of one run.
struct Ports {
  int master = free_port(), control = free_port();

  Words flags(int nnodes, int node) const {
    return {"--nnodes",       std::to_string(nnodes),
            "--node-rank",    std::to_string(node),
            "--master",       "127.0.0.1:" + std::to_string(master),
            "--control-port", std::to_string(control)};
  }
  std::unique_ptr<Launched> start(int nnodes, int node, Words rest) const {
    Words all = flags(nnodes, node);
    all.insert(all.end(), rest.begin(), rest.end());
    return std::make_unique<Launched>(fsdp_run(all));
  }
};

TEST(Nodes, RanksAreNumberedAcrossBothNodes) {
  Ports ports;
  const char* program =
      "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_PORT";
  auto second = ports.start(2, 1, {"-n", "2", "sh", "-c", program});  // may start first
  auto first = ports.start(2, 0, {"-n", "1", "sh", "-c", program});
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(second->wait(), 0) << second->err();
  std::string port = std::to_string(ports.master);
  EXPECT_EQ(first->out_lines(), (Words{"[0] 0 0 3 1 0 " + port}));
  EXPECT_EQ(second->out_lines(), (Words{"[1] 1 0 3 2 1 " + port, "[2] 2 1 3 2 1 " + port}));
}

TEST(Nodes, LaunchersMeetOnThePortAfterTheMasters) {
  int port = 0;
  ASSERT_TRUE(eventually([&] {
    port = free_port();
    try {
      check_port_is_free(port + 1, "the test's port");
      return port < 65535;
    } catch (const Error&) {
      return false;
    }
  }));
  Words flags = {"--nnodes",          "2", "--master_addr", "localhost", "--master_port",
                 std::to_string(port)};
  Words first = flags, second = flags;
  first.insert(first.end(), {"--node_rank", "0", "echo", "here"});
  second.insert(second.end(), {"--node_rank", "1", "echo", "there"});
  Launched one(fsdp_run(first)), other(fsdp_run(second));
  EXPECT_EQ(one.wait(), 0) << one.err();
  EXPECT_EQ(other.wait(), 0) << other.err();
  EXPECT_EQ(one.out(), "[0] here\n");
  EXPECT_EQ(other.out(), "[1] there\n");
}

class FailingNode : public testing::TestWithParam<int> {};

TEST_P(FailingNode, EndsTheOtherAndIsNamedOnBoth) {
  Ports ports;
  std::string program = "test $GROUP_RANK = " + std::to_string(GetParam()) +
                        " && { echo last words; exit 7; }; sleep 1000";
  auto first = ports.start(2, 0, {"sh", "-c", program});
  auto second = ports.start(2, 1, {"sh", "-c", program});
  for (auto* node : {first.get(), second.get()}) {
    EXPECT_EQ(node->wait(), 7);
    std::string rank = std::to_string(GetParam());
    EXPECT_TRUE(has(node->err(), "error: rank " + rank + " (pid "));
    EXPECT_TRUE(has(node->err(), "on node " + rank + " exited with code 7."));
    EXPECT_TRUE(has(node->err(), "    last words\n"));
  }
}

TEST_P(FailingNode, RestartsAllRanks) {
  Ports ports;
  std::string program =
      "echo start $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; "
      "test $TORCHELASTIC_RESTART_COUNT = 2 && exit 0; test $GROUP_RANK = " +
      std::to_string(GetParam()) + " && exit 7; sleep 1000";
  // Node 0's --max-restarts counts for both.
  auto first = ports.start(2, 0, {"--max-restarts", "3", "sh", "-c", program});
  auto second = ports.start(2, 1, {"sh", "-c", program});
  for (auto* node : {first.get(), second.get()}) {
    EXPECT_EQ(node->wait(), 0) << node->err();
    EXPECT_TRUE(has(node->out(), "start 2 of 3"));
    EXPECT_TRUE(has(node->err(), "restart 2 of 3."));
  }
}

TEST_P(FailingNode, AKilledLauncherEndsTheOther) {
  Ports ports;
  Folder folder;
  Words program = {"sh", "-c", "echo $$ > $0/rank-$RANK; exec sleep 1000", folder.path()};
  std::unique_ptr<Launched> nodes[] = {ports.start(2, 0, program), ports.start(2, 1, program)};
  pid_t ranks[] = {folder.read_pid("rank-0"), folder.read_pid("rank-1")};
  int victim = GetParam(), other = 1 - victim;
  nodes[victim]->signal(SIGKILL);
  EXPECT_EQ(nodes[other]->wait(), 1);
  EXPECT_TRUE(has(nodes[other]->err(), "the launcher of node " + std::to_string(victim)));
  EXPECT_TRUE(has(nodes[other]->err(), "HINT:"));
  for (pid_t rank : ranks) EXPECT_TRUE(eventually([&] { return !is_alive(rank); }));
}

TEST_P(FailingNode, AnInterruptEndsBoth) {
  Ports ports;
  Folder folder;
  Words program = {"--max-restarts", "5", "sh", "-c", "echo $$ > $0/rank-$RANK; exec sleep 1000",
                   folder.path()};
  std::unique_ptr<Launched> nodes[] = {ports.start(2, 0, program), ports.start(2, 1, program)};
  pid_t ranks[] = {folder.read_pid("rank-0"), folder.read_pid("rank-1")};
  nodes[GetParam()]->signal(SIGINT);
  for (auto& node : nodes) {
    EXPECT_EQ(node->wait(), 128 + SIGINT);
    EXPECT_TRUE(
        has(node->err(), "interrupted on node " + std::to_string(GetParam()) + " by SIGINT"));
  }
  for (pid_t rank : ranks) EXPECT_FALSE(is_alive(rank));
}

TEST_P(FailingNode, AProgramThatIsMissingOnOneNodeEndsBoth) {
  Ports ports;
  Words there = {"sleep", "1000"}, missing = {"no-such-program"};
  int victim = GetParam();
  auto first = ports.start(2, 0, victim == 0 ? missing : there);
  auto second = ports.start(2, 1, victim == 1 ? missing : there);
  for (auto* node : {first.get(), second.get()}) {
    EXPECT_EQ(node->wait(), 127);
    EXPECT_TRUE(
        has(node->err(), "can't run \"no-such-program\": No such file or directory on node " +
                             std::to_string(victim)));
  }
}

INSTANTIATE_TEST_SUITE_P(Node, FailingNode, testing::Values(0, 1));

TEST(Nodes, ANodeThatFinishedStillLearnsOfAFailure) {
  Ports ports;
  Folder folder;
  // Node 1's rank has exited with 0 before node 0's fails.
  const char* program =
      "test $RANK = 1 && { echo $$ > $0/gone; exit 0; }; "
      "while ! test -s $0/gone || kill -0 $(cat $0/gone) 2> /dev/null && "
      "! grep -q 'State:.Z' /proc/$(cat $0/gone)/status; do sleep 0.01; done; exit 5";
  auto first = ports.start(2, 0, {"sh", "-c", program, folder.path()});
  auto second = ports.start(2, 1, {"sh", "-c", program, folder.path()});
  EXPECT_EQ(first->wait(), 5);
  EXPECT_EQ(second->wait(), 5);
  EXPECT_TRUE(has(second->err(), "rank 0 (pid "));
}

TEST(Nodes, MissingNodesAreNamed) {
  Ports ports;
  auto first = ports.start(4, 0, {"--rendezvous-timeout", "3", "echo", "started"});
  auto third = ports.start(4, 2, {"--rendezvous-timeout", "100", "echo", "started"});
  EXPECT_EQ(first->wait(), 1);
  EXPECT_TRUE(has(first->err(), "node 1, 3 didn't join within 3 s."));
  EXPECT_TRUE(has(first->err(), "HINT:"));
  EXPECT_EQ(third->wait(), 1);  // node 0 tells it, long before its own timeout
  EXPECT_TRUE(has(third->err(), "node 1, 3 didn't join within 3 s."));
  EXPECT_EQ(first->out() + third->out(), "");
}

TEST(Nodes, AMissingNodeZeroIsAnError) {
  Ports ports;
  auto second = ports.start(2, 1, {"--rendezvous-timeout", "0.3", "echo", "started"});
  EXPECT_EQ(second->wait(), 1);
  EXPECT_TRUE(has(second->err(), "node 0's launcher did not answer at 127.0.0.1:"));
  EXPECT_TRUE(has(second->err(), "Connection refused"));
  EXPECT_EQ(second->out(), "");
}

TEST(Nodes, DifferentNumbersOfNodesAreShownOnBoth) {
  Ports ports;
  auto first = ports.start(3, 0, {"echo", "started"});
  auto second = ports.start(2, 1, {"echo", "started"});
  for (auto* node : {first.get(), second.get()}) {
    EXPECT_EQ(node->wait(), 1);
    EXPECT_TRUE(has(node->err(), "node 0 has --nnodes 3, node 1 (127.0.0.1) has --nnodes 2."));
  }
}

TEST(Nodes, ADuplicateNodeRankIsAnErrorOnAll) {
  Ports ports;
  auto first = ports.start(3, 0, {"echo", "started"});
  auto second = ports.start(3, 1, {"echo", "started"});
  auto again = ports.start(3, 1, {"echo", "started"});
  for (auto* node : {first.get(), second.get(), again.get()}) {
    EXPECT_EQ(node->wait(), 1);
    EXPECT_TRUE(has(node->err(), "two launchers have --node-rank 1"));
  }
}

TEST(Nodes, AControlPortThatIsTakenIsAnError) {
  Ports ports;
  FileDescriptor taken = listen_on(ports.control, "the test's port");
  auto first = ports.start(2, 0, {"echo", "started"});
  EXPECT_EQ(first->wait(), 1);
  EXPECT_TRUE(has(first->err(), "port " + std::to_string(ports.control)));
  EXPECT_TRUE(has(first->err(), "--control-port"));
}

TEST(Nodes, StrangersOnTheControlPortDoNoHarm) {
  Ports ports;
  auto first = ports.start(2, 0, {"echo", "here"});
  std::vector<Connection> strangers;
  std::string problem;
  for (const std::string& words :
       {std::string("GET / HTTP/1.1"), std::string("{}"), std::string("[1]"),
        std::string("{\"type\": \"hello\", \"version\": \"x\"}"), encode(KillOrder{}),
        encode(Hello{.nnodes = 2, .node = 77, .nproc = 1}),
        encode(Hello{.nnodes = 2, .node = 1, .nproc = -1})}) {
    ASSERT_TRUE(eventually([&] {
      auto connection = Connection::open("127.0.0.1", ports.control, 1, problem);
      if (!connection) return false;
      connection->send_line(words);
      strangers.push_back(std::move(*connection));
      return true;
    })) << problem;
  }
  auto second = ports.start(2, 1, {"echo", "there"});
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(second->wait(), 0) << second->err();
  EXPECT_EQ(first->out(), "[0] here\n");
}

}  // namespace
}  // namespace fsdp::launch
