// The store as its clients see it: every call of c10d's interface, waits, several threads, and what
// happens when its process is gone or silent. store_attack_test.cpp has its enemies.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <thread>

#include "base/secret.h"
#include "comm/store.h"
#include "comm/store_parts.h"

namespace fsdp::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Keys = std::vector<std::string>;

class Stores : public ::testing::TestWithParam<Transport> {
 protected:
  StoreForTest store{GetParam(), secret::random()};
};

INSTANTIATE_TEST_SUITE_P(Over, Stores, ::testing::Values(Transport::kUnix, Transport::kTcp),
                         [](const auto& info) {
                           return info.param == Transport::kUnix ? "Unix" : "Tcp";
                         });

TEST_P(Stores, AnswersEveryCall) {
  const auto rank_0 = store.client(), rank_1 = store.client();
  const std::string bytes("a value\0\xff", 9);
  rank_0->set("key", bytes);
  EXPECT_EQ(rank_1->get_to_str("key"), bytes);
  rank_1->set("key", "another");
  EXPECT_EQ(rank_0->get_to_str("key"), "another");
  EXPECT_TRUE(rank_0->check({"key"}));
  EXPECT_FALSE(rank_0->check({"key", "missing"}));
  EXPECT_EQ(rank_0->add("count", 3), 3);
  EXPECT_EQ(rank_1->add("count", -5), -2);
  EXPECT_EQ(rank_1->get_to_str("count"), "-2");
  EXPECT_EQ(rank_0->getNumKeys(), 2);
  EXPECT_TRUE(rank_1->deleteKey("key"));
  EXPECT_FALSE(rank_1->deleteKey("key"));
  EXPECT_EQ(rank_0->compareSet("first", "", "mine"), "mine");
  EXPECT_EQ(rank_1->compareSet("first", "", "theirs"), "mine");
  EXPECT_EQ(rank_1->compareSet("first", "mine", "theirs"), "theirs");
  EXPECT_EQ(rank_1->compareSet("none", "expected", "desired"), "expected");
  EXPECT_FALSE(rank_1->check({"none"}));
  rank_0->append("list", {'a'});
  rank_1->append("list", {'b', 'c'});
  EXPECT_EQ(rank_0->get_to_str("list"), "abc");
  rank_0->multiSet({"x", "y"}, {{1}, {2, 3}});
  EXPECT_EQ(rank_1->multiGet({"y", "x"}), (std::vector<std::vector<uint8_t>>{{2, 3}, {1}}));
  EXPECT_TRUE(rank_0->hasExtendedApi());
  Keys keys = rank_1->listKeys();
  std::sort(keys.begin(), keys.end());
  EXPECT_EQ(keys, (Keys{"count", "first", "list", "x", "y"}));
}

TEST_P(Stores, AValueMayHaveMegabytes) {
  const std::string large(4 << 20, 'v');
  store.client()->set("large", large);
  EXPECT_EQ(store.client()->get_to_str("large"), large);
  // Beyond the limit it is an error, and the client stays usable.
  const auto client = store.client();
  EXPECT_THROW(client->set("larger", std::string(9 << 20, 'v')), Error);
  EXPECT_THROW(client->set("larger", std::string(kMostMessage - 40, 'v')), Error);
  EXPECT_EQ(client->add("count", 1), 1);
  client->set("word", "x");
  EXPECT_THROW(client->add("word", 1), Error);
}

TEST_P(Stores, AWaitEndsWhenTheLastKeyIsSet) {
  const auto waits = store.client(), sets = store.client();
  std::thread waiter([&] {
    waits->wait({"a", "b", "c"});
    waits->set("seen", "yes");
  });
  for (const char* key : {"b", "c", "a"}) sets->set(key, "");
  EXPECT_EQ(sets->get_to_str("seen"), "yes");  // waits for it
  waiter.join();
}

TEST_P(Stores, AWaitEndsAtItsDeadline) {
  const auto client = store.client();
  ::testing::internal::CaptureStderr();
  EXPECT_THROW(client->wait({"never"}, milliseconds(30)), StoreTimeout);
  client->setTimeout(milliseconds(20));
  try {
    client->get("never");
    FAIL() << "a value that nobody set";
  } catch (const StoreTimeout& error) {
    EXPECT_NE(error.message().find("never"), std::string::npos);
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");  // no stack traces
  EXPECT_EQ(client->add("count", 1), 1);
}

TEST_P(Stores, ALongWaitHoldsUpNobodyWithTheSameClient) {
  const auto client = store.client();
  std::thread waiter([&] { client->wait({"late"}); });
  for (int i = 1; i <= 100; ++i) EXPECT_EQ(client->add("count", 1), i);
  client->set("late", "");
  waiter.join();
}

TEST_P(Stores, CountsEveryCallOfManyThreads) {
  constexpr int kThreads = 8, kCalls = 200;
  const auto shared = store.client();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      const auto client = t % 2 ? shared : store.client();
      const std::string mine = "thread/" + std::to_string(t) + "/",
                        next = "thread/" + std::to_string((t + 1) % kThreads) + "/";
      for (int i = 0; i < kCalls; ++i) {
        client->set(mine + std::to_string(i), std::to_string(i));
        EXPECT_EQ(client->get_to_str(next + std::to_string(i)), std::to_string(i));
        client->add("calls", 1);
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(shared->add("calls", 0), kThreads * kCalls);
}

TEST_P(Stores, AClientLearnsAtOnceThatItsProcessIsGone) {
  const auto client = store.client();
  std::string error;
  std::thread waiter([&] {
    try {
      client->wait({"never"}, seconds(600));
    } catch (const StoreGone& gone) {
      error = gone.message();
    }
  });
  while (client->add("until the other waits", 1) < 20) std::this_thread::yield();
  store.end();
  waiter.join();
  EXPECT_NE(error.find("is gone"), std::string::npos) << error;
  EXPECT_THROW(client->set("key", "value"), StoreGone);
  BoundedStore bounded(client);
  EXPECT_THROW(bounded.get("key"), StoreGone);
  try {
    await_keys(client, {"never"}, seconds(600), "rank 1: a test");
    FAIL() << "a key of a store that is gone";
  } catch (const Error& failure) {
    EXPECT_NE(failure.message().find("rank 1: a test: the rendezvous store is gone"),
              std::string::npos);
  }
}

TEST(SilentStores, CallsOfAWatchdogEnd) {
  const SilentStore silent(Transport::kTcp);
  BoundedStore bounded(silent.client());
  EXPECT_THROW(bounded.set("key", "value"), StoreSilent);
  for (int i = 0; i < 5; ++i) EXPECT_THROW(bounded.get("key"), StoreSilent);
}

TEST_P(Stores, AClientOfAnotherSecretOrWorldIsRefused) {
  for (const bool secret : {true, false}) {
    StoreAddress address = store.address();
    (secret ? address.secret : address.context) += "!";
    try {
      StoreClient::connect(address, nullptr, 1, std::chrono::minutes(1), milliseconds(0));
      FAIL() << "a client that doesn't belong to the store";
    } catch (const Error& error) {
      EXPECT_NE(error.message().find("could not reach the store"), std::string::npos);
      EXPECT_NE(error.message().find("secret of this run"), std::string::npos) << error.what();
      EXPECT_EQ(std::string(error.what()).find(address.secret), std::string::npos);
    }
  }
  EXPECT_EQ(store.client()->add("count", 1), 1);
}

TEST(StoreAddresses, AMissingStoreIsAnErrorThatNamesIt) {
  StoreAddress nobody{.unix_name = "fsdp-test-nobody-" + secret::random()};
  try {
    StoreClient::connect(nobody, nullptr, 3, milliseconds(30));
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(error.message().find("rank 3 could not reach the store of rank 0 at @fsdp-test"),
              std::string::npos);
    EXPECT_NE(error.message().find("refused"), std::string::npos);
  }
}

}  // namespace
}  // namespace fsdp::comm
