// Bulk data between two hosts, over loopback: what is sent arrives, strangers don't get in, and every
// wait ends.
#include "base/trusted_stream.h"

#include <gtest/gtest.h>

#include <sys/socket.h>

#include <future>
#include <string>

#include "base/deadline.h"
#include "base/sockets.h"
#include "fsdp/error.h"

namespace fsdp {
namespace {

using std::chrono::milliseconds;

class TrustedStreamTest : public testing::Test {
 protected:
  TrustedStreamTest() : listener_(sockets::bind_tcp(0, problem_)) {
    EXPECT_EQ(listen(listener_.get(), SOMAXCONN), 0);
  }

  StreamTerms terms(const std::string& secret = "a secret of this run",
                    milliseconds limit = std::chrono::minutes(1)) const {
    return {secret, "copies", limit, stop_};
  }
  std::future<TrustedStream> accept() {
    return std::async(std::launch::async, [this] { return TrustedStream::accept(listener_, terms()); });
  }
  TrustedStream connect() { return TrustedStream::connect("127.0.0.1", port(), terms()); }
  int port() const { return sockets::port_of(listener_); }

  test::WithDeadline deadline_;
  int problem_ = 0;
  FileDescriptor listener_;
  StopEvent stop_;
};

TEST_F(TrustedStreamTest, WhatIsSentArrives) {
  auto accepted = accept();
  TrustedStream caller = connect(), listener = accepted.get();
  std::string bytes(5'000'001, 'x');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7919 >> 3);
  auto sent = std::async(std::launch::async, [&] {
    caller.send("a line\n");
    caller.send(bytes);
    caller.send("another\n");
  });
  EXPECT_EQ(listener.line(), "a line");
  std::string arrived;
  listener.receive(static_cast<int64_t>(bytes.size()),
                   [&](const char* piece, size_t size) { arrived.append(piece, size); });
  EXPECT_EQ(arrived, bytes);
  EXPECT_EQ(listener.line(), "another");
  sent.get();
  listener.send("answer\n");
  EXPECT_EQ(caller.line(), "answer");
}

TEST_F(TrustedStreamTest, StrangersDontKeepOthersOut) {
  auto accepted = accept();
  std::vector<FileDescriptor> idle;
  std::string problem;
  for (int i = 0; i < 100; ++i)
    idle.push_back(sockets::connect_tcp("127.0.0.1", port(),
                                        std::chrono::steady_clock::now() + milliseconds(5000), problem));
  const auto other = idle[0].get();
  EXPECT_EQ(send(other, "GET / HTTP/1.1\r\n", 16, MSG_NOSIGNAL), 16);
  TrustedStream caller = connect(), listener = accepted.get();
  caller.send("a line\n");
  EXPECT_EQ(listener.line(), "a line");
}

TEST_F(TrustedStreamTest, AnotherSecretIsAnErrorThatSaysSo) {
  auto accepted = std::async(std::launch::async, [this] {
    EXPECT_THROW(TrustedStream::accept(listener_, terms()), Stopped);
  });
  try {
    TrustedStream::connect("127.0.0.1", port(), terms("another secret!!", milliseconds(300)));
    FAIL() << "it was let in";
  } catch (const Error& error) {
    EXPECT_NE(error.message().find("doesn't know the secret of this run"), std::string::npos)
        << error.message();
  }
  stop_.set();
  accepted.get();
}

TEST_F(TrustedStreamTest, ASilentOrClosedOtherSideIsAnError) {
  auto accepted = accept();
  TrustedStream caller = TrustedStream::connect("127.0.0.1", port(),
                                                terms("a secret of this run", milliseconds(200)));
  auto listener = std::make_unique<TrustedStream>(accepted.get());
  EXPECT_THROW(caller.line(), Error);
  listener.reset();
  EXPECT_THROW(caller.line(/*patience=*/true), Error);
}

TEST_F(TrustedStreamTest, TheStopEndsEveryWait) {
  auto accepted = accept();
  TrustedStream caller = connect(), listener = accepted.get();
  auto waits = std::async(std::launch::async, [&] {
    EXPECT_THROW(listener.line(/*patience=*/true), Stopped);
  });
  auto sends = std::async(std::launch::async, [&] {
    const std::string bytes(64 << 20, 'x');  // more than the system takes while nobody reads
    EXPECT_THROW(listener.send(bytes), Stopped);
  });
  stop_.set();
  waits.get();
  sends.get();
}

}  // namespace
}  // namespace fsdp
