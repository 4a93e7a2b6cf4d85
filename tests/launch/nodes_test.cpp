// fsdp run --nnodes 2, as two launchers on this machine. namespaces.sh tests two network
// namespaces.
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <csignal>
#include <fstream>
#include <memory>
#include <optional>

#include "base/sockets.h"
#include "fsdp/error.h"
#include "launch/connection.h"
#include "launch/launched.h"
#include "launch/ports.h"

namespace fsdp::launch {
namespace {

using Words = std::vector<std::string>;

const Words kNoSecret = {"FSDP_SECRET", "FSDP_SECRET_FILE"};  // unset

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
      return port < 65535 && listen_on(port + 1, "the test's port");
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
  EXPECT_EQ(nodes[other]->wait(), 69);
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

// A mistake in one command line is told to that launcher. Node 0 goes on waiting.
TEST(Nodes, DifferentNumbersOfNodesAreShownOnBoth) {
  Ports ports;
  auto first = ports.start(3, 0, {"--rendezvous-timeout", "3", "echo", "started"});
  auto second = ports.start(2, 1, {"echo", "started"});
  const std::string differ = "node 0 has --nnodes 3, node 1 (127.0.0.1) has --nnodes 2";
  EXPECT_EQ(second->wait(), 1);
  EXPECT_TRUE(has(second->err(), differ));
  EXPECT_EQ(first->wait(), 1);
  EXPECT_TRUE(has(first->err(), "refused a launcher: 127.0.0.1 doesn't fit: "));
  EXPECT_TRUE(has(first->err(), differ));
  EXPECT_TRUE(has(first->err(), "node 1, 2 didn't join within 3 s; refused: 127.0.0.1 doesn't"));
}

TEST(Nodes, ADuplicateNodeRankIsAnErrorThere) {
  Ports ports;
  auto first = ports.start(3, 0, {"--rendezvous-timeout", "60", "echo", "started"});
  auto second = ports.start(3, 1, {"echo", "started"});
  auto again = ports.start(3, 1, {"echo", "started"});
  const std::string twice = "two launchers have --node-rank 1";
  // One of the two is refused, and the run still begins with the other.
  ASSERT_TRUE(eventually([&] { return first->err().find(twice) != std::string::npos; }));
  auto third = ports.start(3, 2, {"echo", "started"});
  EXPECT_EQ(first->wait(), 0);
  EXPECT_EQ(third->wait(), 0);
  EXPECT_EQ(second->wait() + again->wait(), 1);
  EXPECT_TRUE(has(second->err() + again->err(), twice));
}

TEST(Nodes, AControlPortThatIsTakenIsAnError) {
  Ports ports;
  FileDescriptor taken = listen_on(ports.control, "the test's port");
  auto first = ports.start(2, 0, {"echo", "started"});
  EXPECT_EQ(first->wait(), 1);
  EXPECT_TRUE(has(first->err(), "port " + std::to_string(ports.control)));
  EXPECT_TRUE(has(first->err(), "--control-port"));
}

// --- strangers ---

// A connection to node 0 that has shaken hands by `secret`; nullopt: it was refused.
std::optional<Connection> greet(const Ports& ports, const std::string& secret) {
  std::optional<Connection> connection;
  std::string problem;
  eventually([&] {
    connection = Connection::open("127.0.0.1", ports.control, 1, secret, problem);
    return connection.has_value();
  });
  if (!connection) return std::nullopt;
  eventually([&] {
    connection->receive();
    return connection->is_trusted() || !connection->is_open();
  });
  if (!connection->is_trusted()) return std::nullopt;
  return connection;
}

// What node 0 answers.
std::string refusal_of(Connection& connection) {
  std::optional<Message> message;
  eventually([&] {
    connection.receive();
    message = connection.next();
    return message || !connection.is_open();
  });
  const auto* refused = message ? std::get_if<Refusal>(&*message) : nullptr;
  return refused ? refused->message : "";
}

// Without a secret, anyone can shake hands.
TEST(Nodes, StrangersOnTheControlPortDoNoHarm) {
  Ports ports;
  auto first = ports.start(2, 0, {"echo", "here"});
  std::vector<Connection> strangers;
  for (const std::string& words :
       {std::string("GET / HTTP/1.1"), std::string("{}"), std::string("[1]"),
        std::string("{\"type\": \"hello\", \"version\": \"x\"}"), encode(KillOrder{}),
        encode(Hello{.nnodes = 2, .node = 77, .nproc = 1}),
        encode(Hello{.nnodes = 2, .node = 1, .nproc = -1})}) {
    auto connection = greet(ports, "");
    ASSERT_TRUE(connection);
    connection->send_line(words);
    strangers.push_back(std::move(*connection));
  }
  auto second = ports.start(2, 1, {"echo", "there"});
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(second->wait(), 0) << second->err();
  EXPECT_EQ(first->out(), "[0] here\n");
  EXPECT_TRUE(has(first->err(), "the nodes have no secret"));
  EXPECT_FALSE(has(second->err(), "the nodes have no secret"));
}

TEST(Nodes, AHelloOfAnotherVersionIsRefusedAndNodeZeroGoesOn) {
  Ports ports;
  auto first = ports.start(2, 0, {"echo", "here"});
  auto old = greet(ports, "");
  ASSERT_TRUE(old);
  old->send(Hello{.version = kMessageVersion + 1, .nnodes = 2, .node = 1, .nproc = 1});
  EXPECT_TRUE(has(refusal_of(*old), "has another version than node 0's."));
  auto second = ports.start(2, 1, {"echo", "there"});
  EXPECT_EQ(first->wait(), 0);
  EXPECT_EQ(second->wait(), 0);
  EXPECT_TRUE(has(first->err(), "refused a launcher: 127.0.0.1 doesn't fit: "));
}

TEST(Nodes, WhoDoesNotSpeakTheProtocolIsDropped) {
  Ports ports;
  auto first = ports.start(2, 0, {"echo", "here"});
  for (const std::string& words :
       {std::string("GET / HTTP/1.1\r\n\r\n"), encode(Hello{.nnodes = 2, .node = 1}) + "\n",
        std::string(100'000, 'x')}) {
    FileDescriptor socket;
    std::string problem;
    ASSERT_TRUE(eventually([&] {
      const auto limit = std::chrono::steady_clock::now() + std::chrono::minutes(1);
      socket = sockets::connect_tcp("127.0.0.1", ports.control, limit, problem);
      return static_cast<bool>(socket);
    }));
    const auto limit = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    sockets::send_all(socket, words, limit);
    std::string answer;
    EXPECT_EQ(sockets::receive_some(socket, answer, 1, limit), ECONNRESET);
    EXPECT_EQ(answer, "");
  }
  auto second = ports.start(2, 1, {"echo", "there"});
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(second->wait(), 0) << second->err();
  EXPECT_TRUE(has(first->err(), "refused a launcher: 127.0.0.1 speaks another protocol"));
}

// --- the secret ---

const char* kSecret = "the secret of this run of two nodes";

std::unique_ptr<Launched> start_with(const std::string& secret, const Ports& ports, int node,
                                     Words rest) {
  Words all = ports.flags(2, node);
  all.insert(all.end(), rest.begin(), rest.end());
  return std::make_unique<Launched>(fsdp_run(all), Words{"FSDP_SECRET=" + secret});
}

TEST(Nodes, OnlyLaunchersWithTheSecretJoin) {
  Ports ports;
  auto first = start_with(kSecret, ports, 0, {"sh", "-c", "echo ${#FSDP_SECRET}"});
  EXPECT_FALSE(greet(ports, ""));  // a false node 1
  EXPECT_FALSE(greet(ports, "another secret of a run"));
  auto wrong = start_with("another secret of a run", ports, 1,
                          {"--rendezvous-timeout", "1", "echo", "started"});
  EXPECT_EQ(wrong->wait(), 1);
  EXPECT_TRUE(has(wrong->err(), "node 0's launcher isn't at 127.0.0.1:"));
  EXPECT_TRUE(has(wrong->err(), "doesn't know the secret of this run"));
  EXPECT_EQ(wrong->out(), "");
  auto second = start_with(kSecret, ports, 1, {"sh", "-c", "echo ${#FSDP_SECRET}"});
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(second->wait(), 0) << second->err();
  EXPECT_EQ(first->out(), "[0] 35\n");  // its ranks have it, too
  EXPECT_EQ(second->out(), "[1] 35\n");
  EXPECT_FALSE(has(first->err(), "no secret"));
  for (const auto* text : {"the secret of this run of", "another secret of"})
    EXPECT_FALSE(has(first->err() + second->err() + wrong->err(), text));
}

TEST(Nodes, AFalseNodeZeroIsNotTrusted) {
  Ports ports;
  FileDescriptor listener = listen_on(ports.control, "the test's port");
  auto second = start_with(kSecret, ports, 1, {"--rendezvous-timeout", "2", "echo", "started"});
  std::optional<Connection> accepted;
  ASSERT_TRUE(eventually([&] {
    accepted = Connection::accept(listener, "");  // it doesn't know the secret
    return accepted.has_value();
  }));
  listener.close();
  EXPECT_TRUE(eventually([&] {
    accepted->receive();
    return !accepted->is_open();
  }));
  EXPECT_FALSE(accepted->is_trusted());
  EXPECT_EQ(second->wait(), 1);
  EXPECT_TRUE(has(second->err(), "doesn't know the secret of this run"));
  EXPECT_EQ(second->out(), "");
}

TEST(Nodes, ASecretFileThatOthersMayReadIsRefused) {
  Folder folder;
  const std::string path = folder / "secret";
  std::ofstream(path) << kSecret << "\n";
  chmod(path.c_str(), 0644);
  Launched open(fsdp_run({"--secret-file", path, "echo", "started"}));
  EXPECT_EQ(open.wait(), 2);
  EXPECT_TRUE(has(open.err(), "is open to other users"));
  EXPECT_TRUE(has(open.err(), "chmod 600"));
  chmod(path.c_str(), 0600);
  Launched closed(fsdp_run({"--secret-file", path, "sh", "-c", "echo ${#FSDP_SECRET}"}));
  EXPECT_EQ(closed.wait(), 0) << closed.err();
  EXPECT_EQ(closed.out(), "35\n");
}

TEST(Nodes, OneNodeMakesASecretOfItsOwn) {
  Launched run(fsdp_run({"-n", "2", "sh", "-c", "echo ${#FSDP_SECRET} $FSDP_SECRET"}), kNoSecret);
  EXPECT_EQ(run.wait(), 0);
  const Words lines = run.out_lines();
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_TRUE(has(lines[0], "[0] 64 "));
  EXPECT_EQ(lines[0].substr(4), lines[1].substr(4));
  EXPECT_EQ(run.err(), "");
}

// --- the port of rank 0 ---

TEST(HeldPorts, IsGivenToNobodyElseAndARankCanListenOnIt) {
  const HeldPort held(0, "a test's port");
  std::vector<std::unique_ptr<HeldPort>> others;
  for (int i = 0; i < 500; ++i) {
    others.push_back(std::make_unique<HeldPort>(0, "another port"));
    EXPECT_NE(others.back()->number(), held.number());
  }
  const FileDescriptor rank = listen_on(held.number(), "what a rank does");
  EXPECT_TRUE(rank);
  EXPECT_THROW(HeldPort(held.number(), "the port of another run"), Error);
}

// --- nodes that come back ---

// Each start of a rank writes FOLDER/NODE-RESTART with its pid; FOLDER/done ends all ranks.
class Returning : public testing::Test {
 protected:
  std::unique_ptr<Launched> start(int nnodes, int node, Words flags = {}) {
    return start(std::to_string(nnodes), std::to_string(node), flags);
  }
  std::unique_ptr<Launched> start(const std::string& nnodes, const std::string& node,
                                  const Words& flags) {
    Words all = {"--nnodes", nnodes, "--node-rank", node, "--master",
                 "127.0.0.1:" + std::to_string(ports_.master), "--control-port",
                 std::to_string(ports_.control), "--max-restarts", "3"};
    all.insert(all.end(), flags.begin(), flags.end());
    const Words program = {
        "sh", "-c",
        "echo $$ > $0/draft-$GROUP_RANK; "
        "mv $0/draft-$GROUP_RANK $0/$GROUP_RANK-$TORCHELASTIC_RESTART_COUNT-of-$WORLD_SIZE; "
        "while ! test -e $0/done; do sleep 0.01; done",
        folder_.path()};
    all.insert(all.end(), program.begin(), program.end());
    return std::make_unique<Launched>(fsdp_run(all), kNoSecret);
  }
  // Waits until a rank of that node runs in that start.
  pid_t rank(int node, int restart, int world = 2) {
    return folder_.read_pid(std::to_string(node) + "-" + std::to_string(restart) + "-of-" +
                            std::to_string(world));
  }
  void finish() { std::ofstream(folder_ / "done") << "\n"; }

  Ports ports_;
  Folder folder_;
};

TEST_F(Returning, ALauncherThatWasKilledIsWaitedForAndRejoins) {
  auto first = start(2, 0), second = start(2, 1);
  const pid_t there = rank(1, 0);
  ASSERT_NE(rank(0, 0), 0);
  second->signal(SIGKILL);
  EXPECT_TRUE(is_gone(there));
  auto again = start(2, 1);
  EXPECT_NE(rank(0, 1), 0) << first->err();
  EXPECT_NE(rank(1, 1), 0) << again->err();
  finish();
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(again->wait(), 0) << again->err();
  EXPECT_TRUE(has(first->err(), "the launcher of node 1 (127.0.0.1) is gone"));
  EXPECT_TRUE(has(first->err(), "restart 1 of 3."));
}

TEST_F(Returning, NodeZeroMayComeBackToo) {
  auto first = start(2, 0), second = start(2, 1);
  ASSERT_NE(rank(0, 0), 0);
  ASSERT_NE(rank(1, 0), 0);
  first->signal(SIGKILL);
  auto again = start(2, 0);
  EXPECT_NE(rank(0, 1), 0) << again->err();
  EXPECT_NE(rank(1, 1), 0) << second->err();
  finish();
  EXPECT_EQ(again->wait(), 0) << again->err();
  EXPECT_EQ(second->wait(), 0) << second->err();
}

TEST_F(Returning, ASpareTakesThePlaceOfALostNode) {
  auto first = start(2, 0), second = start(2, 1);
  auto spare = start("2", "spare", {}), unused = start("2", "spare", {});
  ASSERT_NE(rank(0, 0), 0);
  ASSERT_NE(rank(1, 0), 0);
  for (const auto& node : {spare.get(), unused.get()})
    ASSERT_TRUE(eventually([&] { return has(node->err(), "connected to node 0 as a spare"); }));
  second->signal(SIGKILL);
  EXPECT_NE(rank(0, 1), 0) << first->err();
  EXPECT_NE(rank(1, 1), 0) << spare->err() << unused->err();
  finish();
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(spare->wait(), 0) << spare->err();
  EXPECT_EQ(unused->wait(), 0) << unused->err();
}

TEST_F(Returning, WithoutItTheRunGoesOnWithFewerNodesIfThatIsAllowed) {
  auto first = start("2:3", "0", {"--rendezvous-timeout", "5"});
  auto second = start("2:3", "1", {}), third = start("2:3", "2", {});
  for (int node : {0, 1, 2}) ASSERT_NE(rank(node, 0, 3), 0);
  second->signal(SIGKILL);
  EXPECT_NE(rank(0, 1, 2), 0) << first->err();
  EXPECT_NE(rank(1, 1, 2), 0) << third->err();  // it was node 2
  finish();
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(third->wait(), 0) << third->err();
  EXPECT_TRUE(has(first->err(), "going on with 2 of 3 nodes"));
}

TEST_F(Returning, IfTooFewComeTheRunEnds) {
  auto first = start("2", "0", {"--rendezvous-timeout", "1"}), second = start(2, 1);
  ASSERT_NE(rank(0, 0), 0);
  ASSERT_NE(rank(1, 0), 0);
  second->signal(SIGKILL);
  EXPECT_EQ(first->wait(), 1);
  EXPECT_TRUE(has(first->err(), "node 1 didn't join within 1 s"));
}

TEST_F(Returning, ALauncherThatIsStoppedIsLostAndRejoinsWhenItContinues) {
  auto first = start(2, 0), second = start(2, 1);
  ASSERT_NE(rank(0, 0), 0);
  const pid_t there = rank(1, 0);
  second->signal(SIGSTOP);
  EXPECT_TRUE(eventually([&] { return first->err().find("no sign of life") != std::string::npos; }));
  EXPECT_TRUE(is_alive(there));
  second->signal(SIGCONT);
  EXPECT_TRUE(is_gone(there));
  EXPECT_NE(rank(0, 1), 0) << first->err();
  EXPECT_NE(rank(1, 1), 0) << second->err();
  finish();
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(second->wait(), 0) << second->err();
}

}  // namespace
}  // namespace fsdp::launch
