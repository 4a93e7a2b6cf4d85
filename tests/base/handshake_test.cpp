// Two sides that know one secret get through, and nobody else does.
#include "base/handshake.h"

#include <gtest/gtest.h>

namespace fsdp {
namespace {

using Role = Handshake::Role;

const std::string kSecret = "a secret of this run";

// Passes messages between both until neither has more, `step` bytes at a time.
void converse(Handshake& caller, Handshake& listener, size_t step = 1000) {
  std::string to_listener, to_caller;
  for (bool more = true; more;) {
    to_listener += caller.outgoing();
    to_caller += listener.outgoing();
    more = !to_listener.empty() || !to_caller.empty();
    for (auto [side, waiting] : {std::pair(&listener, &to_listener), {&caller, &to_caller}}) {
      std::string received;
      while (!waiting->empty() && side->problem().empty()) {
        received += waiting->substr(0, step);
        waiting->erase(0, step);
        side->take(received);
      }
      waiting->clear();
    }
  }
}

TEST(Handshake, SidesThatKnowOneSecretTrustEachOther) {
  for (const std::string& secret : {kSecret, std::string()})
    for (const size_t step : {1, 7, 1000}) {
      Handshake caller(Role::kCaller, secret, "store"), listener(Role::kListener, secret, "store");
      converse(caller, listener, step);
      EXPECT_TRUE(caller.done() && listener.done()) << step;
      EXPECT_EQ(caller.problem() + listener.problem(), "");
    }
}

TEST(Handshake, LeavesWhatFollowsIt) {
  Handshake caller(Role::kCaller, kSecret, "store"), listener(Role::kListener, kSecret, "store");
  std::string sent = caller.outgoing();
  listener.take(sent);
  std::string answer = listener.outgoing();
  caller.take(answer);
  sent = caller.outgoing() + "the first request";
  listener.take(sent);
  EXPECT_TRUE(listener.done());
  EXPECT_EQ(sent, "the first request");
}

TEST(Handshake, AnotherSecretOrContextIsRefusedByBoth) {
  for (const auto& [secret, context] :
       {std::pair<std::string, std::string>{"another secret!!", "store"},
        {"", "store"},
        {kSecret, "launchers"}}) {
    Handshake caller(Role::kCaller, secret, context), listener(Role::kListener, kSecret, "store");
    converse(caller, listener);
    EXPECT_FALSE(caller.done() || listener.done());
    EXPECT_NE(caller.problem().find("secret of this run"), std::string::npos) << caller.problem();
  }
}

// Without the proof of a listener, a caller says nothing but its nonce.
TEST(Handshake, ACallerProvesNothingToAFalseListener) {
  Handshake caller(Role::kCaller, kSecret, "store"), wrong(Role::kListener, "guessed", "store");
  std::string sent = caller.outgoing();
  EXPECT_EQ(sent.size(), 40u);
  wrong.take(sent);
  std::string answer = wrong.outgoing();
  caller.take(answer);
  EXPECT_EQ(caller.outgoing(), "");
  EXPECT_FALSE(caller.done());
}

TEST(Handshake, ARepeatedProofIsWorthless) {
  Handshake caller(Role::kCaller, kSecret, "store"), listener(Role::kListener, kSecret, "store");
  std::string first = caller.outgoing(), recorded = first;
  listener.take(first);
  std::string answer = listener.outgoing();
  const std::string mirrored = answer;
  caller.take(answer);
  recorded += caller.outgoing();
  Handshake other(Role::kListener, kSecret, "store");  // what a caller said, said again
  other.take(recorded);
  EXPECT_FALSE(other.done());
  EXPECT_NE(other.problem(), "");
  Handshake fooled(Role::kListener, kSecret, "store");  // a listener's own words, sent back to it
  std::string nonce = mirrored.substr(0, 40);
  fooled.take(nonce);
  std::string own = fooled.outgoing().substr(40);
  fooled.take(own);
  EXPECT_FALSE(fooled.done());
}

TEST(Handshake, AnotherProtocolIsRefusedAtItsFirstByte) {
  for (std::string words :
       {"\x16\x03\x01", "GET / HTTP/1.1\r\n", "{\"type\":\"hello\"}\n", "fsdp/2"}) {
    Handshake listener(Role::kListener, kSecret, "store");
    listener.take(words);
    EXPECT_NE(listener.problem().find("another protocol"), std::string::npos);
    EXPECT_EQ(listener.outgoing(), "");
  }
  // c10d's TCPStore greets with a zero and a magic number.
  std::string greeting("\0\x07\xef\x09\x3c", 5);
  Handshake listener(Role::kListener, kSecret, "store");
  listener.take(greeting);
  EXPECT_NE(listener.problem(), "");
}

}  // namespace
}  // namespace fsdp
