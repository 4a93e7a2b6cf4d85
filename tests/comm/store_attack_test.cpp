// What strangers, false stores and misbehaving peers can't do to the store: end its process, hold
// up its ranks, read or change its keys, or take its memory.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "comm/store.h"
#include "comm/store_parts.h"
#include "comm/store_table.h"

namespace fsdp::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const std::string kSecret = "the secret of these tests";

// The rank that all these tests are about: it still gets its answers.
void expect_to_work(const StoreForTest& store, const c10::intrusive_ptr<StoreClient>& client) {
  const int64_t before = client->add("works", 0);
  EXPECT_EQ(client->add("works", 1), before + 1);
  EXPECT_EQ(store.client()->add("works", 1), before + 2);  // a new connection, too
}

std::string framed(const std::string& body) {
  const uint32_t length = static_cast<uint32_t>(body.size());
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + body;
}

// 850 bytes that ended rank 0 by SIGPIPE when c10d's TCPStore held the keys: a greeting, 50 checks,
// and the end before any answer.
TEST(StoreAttacks, AClientThatAsksAndClosesEndsNobody) {
  struct sigaction before {
  }, by_default{};
  by_default.sa_handler = SIG_DFL;
  sigaction(SIGPIPE, &by_default, &before);
  for (const auto transport : {Transport::kTcp, Transport::kUnix}) {
    const StoreForTest store(transport, kSecret);
    const auto client = store.client();
    for (int i = 0; i < 20; ++i) {
      std::string greeting("\0\x3c\x85\xf7\x5e", 5);
      for (int check = 0; check < 50; ++check)
        greeting += std::string("\x04\1\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0x", 18);
      const FileDescriptor other = store.stranger();
      send(other.get(), greeting.data(), greeting.size(), MSG_NOSIGNAL);
    }
    // The same by one who knows the secret.
    for (int i = 0; i < 20; ++i) {
      const FileDescriptor insider = store.insider();
      std::string checks;
      for (int check = 0; check < 50; ++check)
        checks += encode(StoreRequest{StoreCall::kCheck, 0, {"x"}});
      send(insider.get(), checks.data(), checks.size(), MSG_NOSIGNAL);
    }
    expect_to_work(store, client);
  }
  sigaction(SIGPIPE, &before, nullptr);
}

TEST(StoreAttacks, IdleStrangersHoldUpNobodyAndAreDropped) {
  const StoreForTest store(Transport::kTcp, kSecret, milliseconds(200));
  const auto client = store.client();
  std::vector<FileDescriptor> idle;
  for (int i = 0; i < 300; ++i) {
    idle.push_back(store.stranger());
    if (i % 50 == 0) expect_to_work(store, client);
  }
  expect_to_work(store, client);
  for (const auto& socket : idle) EXPECT_TRUE(is_dropped(socket));
  expect_to_work(store, client);
}

TEST(StoreAttacks, ASlowHandshakeIsDropped) {
  const StoreForTest store(Transport::kTcp, kSecret, milliseconds(200));
  const auto client = store.client();
  const FileDescriptor slow = store.stranger();
  std::string greeting = Handshake(Handshake::Role::kCaller, kSecret, "a test").outgoing();
  greeting.pop_back();
  for (const char byte : greeting)
    if (send(slow.get(), &byte, 1, MSG_NOSIGNAL) != 1) break;
  EXPECT_TRUE(is_dropped(slow));  // although it never stopped following the protocol
  expect_to_work(store, client);
}

TEST(StoreAttacks, StrangersGetNothingBeforeTheyProveTheSecret) {
  const StoreForTest store(Transport::kTcp, kSecret);
  const auto client = store.client();
  client->set("key", "value");
  for (const std::string& secret : {std::string(), std::string("another secret of a run")}) {
    const FileDescriptor stranger = store.stranger();
    Handshake handshake(Handshake::Role::kCaller, kSecret, "a test"),
        wrong(Handshake::Role::kCaller, secret, "a test");
    // A request behind 32 bytes that aren't the proof.
    const std::string sent = handshake.outgoing() + std::string(32, 'x') +
                             encode(StoreRequest{StoreCall::kSet, 0, {"key", "forged"}});
    EXPECT_EQ(sockets::send_all(stranger, sent, in_a_minute()), 0);
    EXPECT_TRUE(is_dropped(stranger));
  }
  EXPECT_EQ(client->get_to_str("key"), "value");
}

TEST(StoreAttacks, MessagesThatAreNoneAreDropped) {
  const StoreForTest store(Transport::kTcp, kSecret);
  const auto client = store.client();
  const std::string check = encode(StoreRequest{StoreCall::kCheck, 0, {"x"}}).substr(4);
  for (const std::string& bytes :
       {std::string("\xff\xff\xff\xff", 4),            // 4 GiB announced
        framed(""), framed("\x63" + check.substr(1)),  // no such call
        framed(check + "rest"), framed(check.substr(0, 5)),
        framed(encode(StoreRequest{StoreCall::kSet, 0, {"only a key"}}).substr(4))}) {
    const FileDescriptor insider = store.insider();
    EXPECT_EQ(sockets::send_all(insider, bytes, in_a_minute()), 0);
    EXPECT_TRUE(is_dropped(insider));
  }
  expect_to_work(store, client);
}

TEST(StoreAttacks, APeerThatReadsNothingHoldsUpNobody) {
  const StoreForTest store(Transport::kTcp, kSecret);
  const auto client = store.client();
  client->set("large", std::string(4 << 20, 'v'));
  std::vector<FileDescriptor> deaf;
  for (int i = 0; i < 20; ++i) {
    deaf.push_back(store.insider());
    const std::string get = encode(StoreRequest{StoreCall::kGet, 1000, {"large"}});
    EXPECT_EQ(sockets::send_all(deaf.back(), get, in_a_minute()), 0);
  }
  expect_to_work(store, client);
  // It may not ask again before it has read the answer.
  const std::string more = encode(StoreRequest{StoreCall::kCheck, 0, {"x"}});
  EXPECT_EQ(sockets::send_all(deaf[0], more, in_a_minute()), 0);
  EXPECT_TRUE(is_dropped(deaf[0]));
  expect_to_work(store, client);
}

TEST(StoreAttacks, ConnectionsAreLimited) {
  const StoreForTest store(Transport::kUnix, kSecret);
  const auto client = store.client();
  std::vector<FileDescriptor> insiders;
  for (int i = 0; i < 64 + 16 * 2 - 1; ++i) insiders.push_back(store.insider());
  EXPECT_TRUE(is_dropped(store.stranger()));
  insiders.clear();
  EXPECT_EQ(client->add("works", 1), 1);
}

// A process that runs out of descriptors goes on once there are some.
TEST(StoreAttacks, RunningOutOfDescriptorsIsNoEnd) {
  const StoreForTest store(Transport::kTcp, kSecret);
  const auto client = store.client();
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit few{256, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  std::vector<FileDescriptor> taken;
  while (FileDescriptor one{dup(0)}) taken.push_back(std::move(one));
  taken.pop_back();
  const FileDescriptor stranger = store.stranger();  // with the last one: none is left to accept it
  EXPECT_EQ(client->add("works", 1), 1);
  taken.clear();
  setrlimit(RLIMIT_NOFILE, &before);
  expect_to_work(store, client);
}

TEST(StoreAttacks, AnotherUserIsRefusedOverAUnixSocket) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  const StoreForTest store(Transport::kUnix, "");
  const auto client = store.client();
  const pid_t pid = fork();
  if (pid == 0) {
    if (setuid(65534) != 0) _exit(2);
    int problem = 0;
    const FileDescriptor socket = sockets::connect_unix(store.address().unix_name, problem);
    char byte;
    pollfd waiting{socket.get(), POLLIN, 0};
    poll(&waiting, 1, 60'000);
    _exit(recv(socket.get(), &byte, 1, 0) == 0 ? 0 : 1);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  expect_to_work(store, client);
}

// What listens at the store's address without the secret learns a nonce and no request.
TEST(StoreAttacks, AFalseStoreIsNoticed) {
  StoreAddress address{.secret = kSecret, .context = "a test"};
  const FileDescriptor listener = listen_for_test(Transport::kTcp, address);
  std::string learned;
  std::thread impostor([&] {
    int problem = 0;
    ASSERT_TRUE(sockets::await_readable(listener, in_a_minute()));
    auto accepted = sockets::accept_from(listener, problem);
    ASSERT_EQ(sockets::receive_some(accepted.socket, learned, 256, in_a_minute()), 0);
    const std::string answer = learned + std::string(32, 'x');
    sockets::send_all(accepted.socket, answer, in_a_minute());
    while (sockets::receive_some(accepted.socket, learned, 256, in_a_minute()) == 0) {
    }
  });
  try {
    StoreClient::connect(address, nullptr, 1, std::chrono::minutes(1), milliseconds(0));
    FAIL() << "trusted a false store";
  } catch (const Error& error) {
    EXPECT_NE(error.message().find("doesn't know the secret of this run"), std::string::npos)
        << error.what();
  }
  impostor.join();
  EXPECT_EQ(learned.size(), 40u);
}

TEST(StoreTables, RefusesMoreThanItMayHold) {
  StoreTable table;
  const StoreRequest large{StoreCall::kSet, 0, {"key", std::string(kMostMessage - 32, 'v')}};
  EXPECT_EQ(table.answer(large)->kind, StoreAnswer::kRefused);
  const StoreRequest fits{StoreCall::kSet, 0, {"key", std::string(kMostMessage - 128, 'v')}};
  EXPECT_EQ(table.answer(fits)->kind, StoreAnswer::kDone);
  EXPECT_EQ(table.answer({StoreCall::kSet, 0, {std::string(5000, 'k'), "v"}})->kind,
            StoreAnswer::kRefused);
  EXPECT_EQ(table.answer({StoreCall::kAppend, 0, {"key", std::string(256, 'v')}})->kind,
            StoreAnswer::kRefused);
  EXPECT_EQ(table.answer({StoreCall::kSet, 0, {"other", std::string(1 << 20, 'v')}})->kind,
            StoreAnswer::kDone);
  EXPECT_EQ(table.answer({StoreCall::kGet, 0, {"key", "other"}})->kind, StoreAnswer::kRefused);
  EXPECT_EQ(table.answer({StoreCall::kSet, 0, {"most", "9223372036854775807"}})->kind,
            StoreAnswer::kDone);
  EXPECT_EQ(table.answer({StoreCall::kAdd, 0, {"most", "1"}})->kind, StoreAnswer::kRefused);
}

}  // namespace
}  // namespace fsdp::comm
