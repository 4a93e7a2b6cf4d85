// What a launcher does while it waits for node 0's plan. The test is node 0.
#include "launch/meeting.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>

#include "launch/launched.h"
#include "launch/ports.h"

namespace fsdp::launch {
namespace {

using namespace std::chrono_literals;

Options options_of(int node, int control_port) {
  Options options;
  options.nnodes = 2;
  options.node_rank = node;
  options.master_host = "127.0.0.1";
  options.control_port = control_port;
  return options;
}

// A launcher that joins before its `restart`-th restart, in a thread of its own.
struct Joiner {
  Joiner(int node, int restart, double rendezvous_s)
      : listener(listen_on(port, "the test's port")), options(options_of(node, port)) {
    options.rendezvous_s = rendezvous_s;
    met.plan = first_plan(options);
    met.plan.restart = restart;
    joined = std::async(std::launch::async, [this] { join(options, met, [] { return 0; }); });
  }
  // Node 0's side of the connection, once the launcher has said hello.
  Connection greeted() {
    Connection connection;
    EXPECT_TRUE(eventually([&] {
      if (auto one = Connection::accept(listener, "")) connection = std::move(*one);
      return connection.is_open();
    }));
    EXPECT_TRUE(eventually([&] {
      connection.receive();
      return connection.next().has_value();
    }));
    return connection;
  }

  const int port = free_port();
  FileDescriptor listener;
  Options options;
  Met met;
  std::future<void> joined;
};

TEST(Meeting, WhoWaitsForAPlaceIsDismissedWhenTheRunEnds) {
  for (const int node : {kSpareNode, 1}) {  // 1: another one has taken its place
    Joiner joiner(node, node == kSpareNode ? 0 : 1, 60);
    Connection node_0 = joiner.greeted();
    node_0.send(Verdict{});
    joiner.joined.get();
    EXPECT_TRUE(joiner.met.dismissed);
  }
}

TEST(Meeting, NodeZeroDecidesHowLongToWaitForTheOthers) {
  for (const int restart : {0, 1}) {
    Joiner joiner(1, restart, 0.5);
    Connection node_0 = joiner.greeted();
    EXPECT_EQ(joiner.joined.wait_for(700ms), std::future_status::timeout);  // it goes on waiting
    Plan plan = joiner.met.plan;
    plan.nprocs = {1, 1};
    plan.node = 1;
    plan.run_id = "a run";
    node_0.send(plan);
    joiner.joined.get();
    EXPECT_EQ(joiner.met.plan.run_id, "a run");
  }
}

}  // namespace
}  // namespace fsdp::launch
