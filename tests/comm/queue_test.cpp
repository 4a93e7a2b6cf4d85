#include "comm/core/queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <stdexcept>
#include <vector>

namespace fsdp::comm {
namespace {

using std::chrono::milliseconds;

std::shared_ptr<Queue::Item> item(std::function<void()> body) {
  auto made = std::make_shared<Queue::Item>();
  made->run = [body = std::move(body)](milliseconds) { body(); };
  made->timeout = milliseconds(10000);
  return made;
}

TEST(Queue, RunsInTheOrderOfIssue) {
  auto owner = std::make_shared<Queue>();
  Queue& queue = *owner;
  std::vector<int> order;
  std::vector<std::shared_ptr<Queue::Item>> items;
  for (int i = 0; i < 100; ++i) {
    items.push_back(item([&order, i] { order.push_back(i); }));
    queue.add(items.back(), i % 3 != 0);
  }
  queue.wait(items.back());
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[i], i);
  queue.close();
}

TEST(Queue, ABlockingItemRunsOnTheCallersThread) {
  auto owner = std::make_shared<Queue>();
  Queue& queue = *owner;
  std::thread::id ran;
  auto blocking = item([&] { ran = std::this_thread::get_id(); });
  queue.add(blocking, false);
  queue.wait(blocking);
  EXPECT_EQ(ran, std::this_thread::get_id());
  queue.close();
}

TEST(Queue, ABackgroundItemRunsWithoutAWait) {
  auto owner = std::make_shared<Queue>();
  Queue& queue = *owner;
  std::promise<std::thread::id> ran;
  queue.add(item([&] { ran.set_value(std::this_thread::get_id()); }), true);
  EXPECT_NE(ran.get_future().get(), std::this_thread::get_id());
  queue.close();
}

TEST(Queue, AFailureReachesWhoWaitsAndTheNextItemRuns) {
  auto owner = std::make_shared<Queue>();
  Queue& queue = *owner;
  auto bad = item([] { throw std::runtime_error("bad"); });
  bool told = false, next_ran = false;
  bad->done = [&](std::exception_ptr failure) { told = failure != nullptr; };
  auto next = item([&] { next_ran = true; });
  queue.add(bad, true);
  queue.add(next, true);
  queue.wait(next);
  EXPECT_TRUE(next_ran);
  EXPECT_THROW(queue.wait(bad), std::runtime_error);
  EXPECT_TRUE(told);
  queue.close();
}

TEST(Queue, AWaitWithALimitEndsWhileTheItemGoesOn) {
  auto owner = std::make_shared<Queue>();
  Queue& queue = *owner;
  std::promise<void> started, release;
  auto slow = item([&] {
    started.set_value();
    release.get_future().wait();
  });
  queue.add(slow, true);
  started.get_future().wait();
  EXPECT_THROW(queue.wait(slow, milliseconds(1)), std::exception);
  release.set_value();
  queue.wait(slow);
  EXPECT_TRUE(queue.finished(*slow));
  queue.close();
}

TEST(Queue, ClosingRunsWhatIsQueued) {
  std::atomic<int> ran = 0;
  auto queue = std::make_shared<Queue>();
  for (int i = 0; i < 20; ++i) queue->add(item([&] { ++ran; }), true);
  queue->close();
  EXPECT_EQ(ran, 20);
}

TEST(Queue, WhatIsCalledAfterAnItemMayUseTheQueueAgain) {
  auto queue = std::make_shared<Queue>();
  bool second_ran = false;
  auto first = item([] {}), second = item([&] { second_ran = true; });
  first->done = [&](std::exception_ptr) {
    queue->wait(first);
    queue->add(second, false);
    queue->wait(second);
  };
  queue->add(first, false);
  queue->wait(first);
  EXPECT_TRUE(second_ran);
}

TEST(Queue, ClosingWaitsForAnItemThatSomebodyElseRuns) {
  auto queue = std::make_shared<Queue>();
  std::promise<void> started, release;
  std::atomic<bool> ended = false;
  queue->add(item([] {}), true);  // the queue has its thread
  auto slow = item([&] {
    started.set_value();
    release.get_future().wait();
    ended = true;
  });
  queue->add(slow, false);
  std::thread runner([&] { queue->wait(slow); });
  started.get_future().wait();
  std::thread closer([&] {
    queue->close();
    EXPECT_TRUE(ended);
  });
  release.set_value();
  runner.join();
  closer.join();
}

}  // namespace
}  // namespace fsdp::comm
