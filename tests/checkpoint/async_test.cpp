// Saves in the background. The seam blocks the writing thread until a test releases it, so nothing
// here depends on the speed of a disk.
#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/seams.h"
#include "checkpoint/files.h"
#include "checkpoint/trained.h"
#include "shard/world.h"

namespace fsdp::testing::async {
namespace {

using checkpoint::AsyncSave;
using checkpoint::IfBusy;

std::mutex gate_mutex;
std::condition_variable gate_moved;
bool gate_open = true;

int wait_at_gate(const char* call, const checkpoint::files::Path&) {
  if (std::string(call) != "create") return 0;
  std::unique_lock lock(gate_mutex);
  gate_moved.wait(lock, [] { return gate_open; });
  return 0;
}

class Gate {  // closed until open() or destruction
 public:
  Gate() { set(false); }
  ~Gate() { open(); }
  void open() { set(true); }

 private:
  static void set(bool open) {
    std::lock_guard lock(gate_mutex);
    gate_open = open;
    gate_moved.notify_all();
  }

  const WithSeams waiting_{{.files = wait_at_gate}};
};

AsyncSave save_async(const std::filesystem::path& dir, const Trained& trained,
                     const checkpoint::SaveOptions& options = {}) {
  return checkpoint::save_async(dir, trained.sharded, trained.optimizer.get(), options);
}

TEST(Async, SavesTheStateAtTheTimeOfTheCall) {
  for (const std::string name : {"transformer", "odd", "lora"}) {
    SCOPED_TRACE(name);
    SharedFolder folder;
    auto trained = make_trained(name, {});
    for (int64_t round : {1, 2}) {  // the second reuses the memory of the first
      trained.train(2);
      const auto expected = snapshot(trained);
      const std::string dir = "step-" + std::to_string(round);
      Gate gate;
      const AsyncSave saving = save_async(folder / dir, trained, {.extra = {{"round", round}}});
      EXPECT_FALSE(saving.done());
      EXPECT_GT(saving.blocked().count(), 0);
      trained.train(2);
      EXPECT_NE(checkpoint::latest(folder.path()), folder / dir);
      gate.open();
      saving.wait();
      EXPECT_TRUE(saving.done());
      EXPECT_EQ(checkpoint::latest(folder.path()), folder / dir);
      auto loaded = make_trained(name, {}, Rule::kAdamW, 8);
      const auto result = checkpoint::load(folder / dir, loaded.sharded, loaded.optimizer.get());
      EXPECT_EQ(std::get<int64_t>(result.extra.at("round")), round);
      expect_equal(snapshot(loaded), expected);
      test_world().comm().barrier();
    }
  }
}

TEST(Async, TheFilesAreThoseOfASynchronousSave) {
  SharedFolder folder;
  auto trained = make_trained("transformer", {});
  trained.train(1);
  save_async(folder / "a", trained).wait();
  checkpoint::save(folder / "b", trained.sharded, trained.optimizer.get());
  test_world().comm().barrier();
  for (const auto& entry : std::filesystem::directory_iterator(folder / "a")) {
    const auto name = entry.path().filename();
    EXPECT_TRUE(checkpoint::files::read_whole(entry.path(), 1 << 30) ==
                checkpoint::files::read_whole(folder / "b" / name, 1 << 30))
        << name;
  }
  test_world().comm().barrier();
}

TEST(Async, ASecondSaveWaitsOrIsRefused) {
  SharedFolder folder;
  auto trained = make_trained("mlp", {});
  {
    Gate gate;
    const AsyncSave first = save_async(folder / "step-1", trained);
    expect_error([&] { save_async(folder / "step-2", trained, {.if_busy = IfBusy::REFUSE}); },
                 {"step-2", "isn't finished"});
    gate.open();
    const AsyncSave second = save_async(folder / "step-2", trained);
    EXPECT_TRUE(first.done());
    second.wait();
  }
  EXPECT_EQ(checkpoint::list(folder.path()).size(), 2u);
  save_async(folder / "step-3", trained, {.keep_last = 1});
  checkpoint::save(folder / "step-4", trained.sharded, nullptr, {.keep_last = 2});  // waits too
  EXPECT_EQ(checkpoint::list(folder.path()).size(), 2u);
  EXPECT_EQ(checkpoint::latest(folder.path()), folder / "step-4");
  test_world().comm().barrier();
}

TEST(Async, ASecondSaveIsSkippedOrQueued) {
  SharedFolder folder;
  auto trained = make_trained("mlp", {});
  trained.train(1);
  const auto first_state = snapshot(trained);
  Gate gate;
  const AsyncSave first = save_async(folder / "step-1", trained);
  trained.train(1);
  const AsyncSave skipped = save_async(folder / "step-2", trained, {.if_busy = IfBusy::SKIP});
  EXPECT_TRUE(skipped.skipped() && skipped.done());
  const auto third_state = snapshot(trained);
  const AsyncSave third = save_async(folder / "step-3", trained, {.if_busy = IfBusy::QUEUE});
  EXPECT_FALSE(third.skipped() || third.done() || first.done());
  trained.train(1);
  gate.open();
  third.wait();
  EXPECT_TRUE(first.done());
  EXPECT_EQ(third.progress().written, third.progress().bytes);
  EXPECT_EQ(checkpoint::list(folder.path()), (std::vector{folder / "step-1", folder / "step-3"}));
  for (const auto& [name, state] : {std::pair("step-1", first_state), {"step-3", third_state}}) {
    auto loaded = make_trained("mlp", {}, Rule::kAdamW, 8);
    checkpoint::load(folder / name, loaded.sharded, loaded.optimizer.get());
    expect_equal(snapshot(loaded), state);
  }
  test_world().comm().barrier();
}

TEST(Async, NothingIsQueuedWithoutRoomInThePool) {
  SharedFolder folder;
  auto trained = make_trained("mlp", {});
  trained.train(1);
  const auto room = checkpoint::prepare_async(trained.sharded, trained.optimizer.get(), 1);
  EXPECT_EQ(room.pool, 8 << 20);  // one slot
  EXPECT_GT(room.bytes, 0);
  Gate gate;
  const AsyncSave first = save_async(folder / "step-1", trained);
  EXPECT_TRUE(save_async(folder / "step-2", trained, {.if_busy = IfBusy::QUEUE}).skipped());
  gate.open();
  first.wait();
}

// Three linears with 12 bytes per parameter: more than one slot, also on four ranks.
TEST(Async, AStateLargerThanThePoolFlowsThroughIt) {
  SharedFolder folder;
  torch::manual_seed(1);
  const auto make = [] {
    torch::nn::Sequential model;
    for (int i = 0; i < 3; ++i) model->push_back(torch::nn::Linear(1024, 1024));
    return model;
  };
  auto module = make(), fresh = make();
  const ShardOptions options{.wrap = wrap::modules<torch::nn::LinearImpl>(),
                             .device = test_device()};
  const Sharded sharded = fully_shard(module, options), loaded = fully_shard(fresh, options);
  AdamW optimizer(sharded, {}), other(loaded, {});
  const auto train = [&] {
    module->forward(at::ones({1, 1024}, at::TensorOptions().device(test_device())))
        .square()
        .sum()
        .backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  train();
  const auto room = checkpoint::prepare_async(sharded, &optimizer, 1);
  EXPECT_LT(room.pool, room.bytes);
  for (int round = 0; round < 2; ++round) {
    const auto expected = sharded.full_state_dict();
    const auto saving = checkpoint::save_async(folder / "step", sharded, &optimizer);
    train();
    saving.wait();
    EXPECT_EQ(saving.progress().written, saving.progress().bytes);
    checkpoint::load(folder / "step", loaded, &other);
    for (const auto& [name, tensor] : loaded.full_state_dict())
      EXPECT_TRUE(at::equal(tensor, expected.at(name))) << name;
    test_world().comm().barrier();
  }
}

int failing_rank = 0;

int no_memory(const char* call, const checkpoint::files::Path&) {
  return std::string(call) == "copy" && rank() == failing_rank ? ENOMEM : 0;
}

TEST(Async, FallsBackToASynchronousSaveWithoutMemoryForTheCopy) {
  SharedFolder folder;
  auto trained = make_trained("transformer", {});
  trained.train(1);
  const auto expected = snapshot(trained);
  for (failing_rank = 0; failing_rank < world_size(); ++failing_rank) {
    const auto dir = folder / ("step-" + std::to_string(failing_rank));
    const AsyncSave saving = [&] {
      const WithSeams short_of_memory({.files = no_memory});
      return save_async(dir, trained);
    }();
    EXPECT_TRUE(saving.done());
    EXPECT_EQ(checkpoint::latest(folder.path()), dir);
    saving.wait();
    auto loaded = make_trained("transformer", {}, Rule::kAdamW, 8);
    checkpoint::load(dir, loaded.sharded, loaded.optimizer.get());
    expect_equal(snapshot(loaded), expected);
  }
  failing_rank = 0;
  save_async(folder / "step-9", trained).wait();  // with memory again
  EXPECT_EQ(checkpoint::latest(folder.path()), folder / "step-9");
  test_world().comm().barrier();
}

std::string copy_failure;

int fail_to_copy(const char* call, const checkpoint::files::Path&) {
  TORCH_CHECK(std::string(call) != "copy" || rank() != failing_rank, copy_failure);
  return 0;
}

TEST(Async, FallsBackOnlyIfMemoryIsShort) {
  SharedFolder folder;
  auto trained = make_trained("transformer", {});
  trained.train(1);
  failing_rank = world_size() - 1;
  const WithSeams failing({.files = fail_to_copy});
  copy_failure = "CUDA error: an illegal memory access was encountered";
  expect_error([&] { save_async(folder / "step-1", trained); }, {"illegal memory access"});
  EXPECT_TRUE(checkpoint::list(folder.path()).empty());
  test_world().comm().barrier();
  for (const char* failure : {"CUDA error: out of memory",
                              "DefaultCPUAllocator: not enough memory: you tried to allocate"}) {
    copy_failure = failure;
    EXPECT_TRUE(save_async(folder / "step-2", trained).done());
    EXPECT_EQ(checkpoint::latest(folder.path()), folder / "step-2");
  }
  failing_rank = 0;
  test_world().comm().barrier();
}

int no_space(const char* call, const checkpoint::files::Path&) {
  return std::string(call) == "create" && rank() == failing_rank ? ENOSPC : 0;
}

void wait_quietly(const AsyncSave& saving) {
  while (!saving.done()) {
  }
}

// Trains until a step throws; returns the number of steps before it, and its message.
std::pair<int64_t, std::string> train_until_error(Trained& trained) {
  for (int64_t steps = 0;; ++steps) {
    try {
      trained.train(1);
    } catch (const Error& error) {
      trained.optimizer->zero_grad();
      return {steps, error.what()};
    }
  }
}

TEST(Async, AFailureSurfacesAtTheNextStepOnEveryRankAndNothingIsLost) {
  SharedFolder folder;
  auto trained = make_trained("mlp", {});
  save_async(folder / "step-1", trained).wait();
  for (failing_rank = 0; failing_rank < world_size(); ++failing_rank) {
    SCOPED_TRACE("rank " + std::to_string(failing_rank));
    std::optional<WithSeams> full(std::in_place, Seams{.files = no_space});
    AsyncSave saving = save_async(folder / "step-2", trained);
    const auto [steps, error] = train_until_error(trained);  // the same step on every rank
    full.reset();
    EXPECT_TRUE(contains(error, "step-2") && contains(error, "No space left")) << error;
    const at::Tensor mine =
        at::full({1}, steps, at::TensorOptions(at::kLong).device(test_device()));
    at::Tensor all = at::empty({world_size()}, mine.options());
    test_world().comm().all_gather(all, mine);
    EXPECT_TRUE(all.eq(steps).all().item<bool>()) << all;
    expect_error([&] { saving.wait(); }, {"No space left"});
    trained.train(1);  // reported already, so this doesn't throw again
    test_world().comm().barrier();
    EXPECT_EQ(checkpoint::latest(folder.path()), folder / "step-1");
    test_world().comm().barrier();
    // Without a step, the next save reports it.
    full.emplace(Seams{.files = no_space});
    wait_quietly(save_async(folder / "step-2", trained));
    full.reset();
    test_world().comm().barrier();
    expect_error([&] { save_async(folder / "step-3", trained); }, {"No space left"});
    test_world().comm().barrier();
  }
  save_async(folder / "step-2", trained).wait();
  EXPECT_EQ(checkpoint::latest(folder.path()), folder / "step-2");
  test_world().comm().barrier();
}

TEST(Async, DestroyingAModelWaitsForItsSave) {
  SharedFolder folder;
  {
    auto trained = make_trained("mlp", {});
    save_async(folder / "step-1", trained);
  }
  EXPECT_EQ(checkpoint::latest(folder.path()), folder / "step-1");
  test_world().comm().barrier();
}

}  // namespace
}  // namespace fsdp::testing::async
