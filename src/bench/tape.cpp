// The cost of recording for recomputation: the time of a forward alone, without a policy and with
// one that records every block (docs/recompute.md). Backward runs in between and isn't timed.
//
// The two alternate in one process, so that a slow period affects both. After each switch one step
// isn't timed: the engine checks the parameters again.
#include <chrono>

#include "bench/train.h"
#include "fsdp/recompute.h"
#include "train/device.h"
#include "train/training.h"

namespace fsdp::bench {
namespace {

using std::chrono::steady_clock;

constexpr int kTurn = 4;  // timed forwards between two switches

struct Forwards {
  std::vector<double> whole, host;  // seconds; `host`: until the host has launched everything
  double loss = 0;
};

void time_forward(Forwards& found, const Workload& work, const Sharded& sharded, at::Device device,
                  bool counts) {
  train::synchronize(device);
  auto start = steady_clock::now();
  auto since = [&] { return std::chrono::duration<double>(steady_clock::now() - start).count(); };
  at::Tensor loss = work.loss();
  double host = since();
  train::synchronize(device);
  double whole = since();
  if (counts) {
    found.host.push_back(host);
    found.whole.push_back(whole);
    found.loss = loss.item<double>();
  }
  loss.backward();
  sharded.zero_grad();
}

}  // namespace

Json time_tape(const TrainBench& options, const World& world) {
  Workload work = make_workload(options.shape, world, options.init == "device");
  Sharded sharded =
      shard_workload(work, world,
                     {.strategy = train::parse_strategy(options.strategy),
                      .mixed_precision = row_precision(options.shape, world, options.grad_dtype)});
  const RecomputePolicy policy(work.wrap);
  const int turns = (options.steps + kTurn - 1) / kTurn;
  Forwards plain, recorded;
  for (int i = 0; i < options.warmup; ++i)
    time_forward(plain, work, sharded, world.device(), /*counts=*/false);
  for (int turn = 0; turn < turns; ++turn)
    for (bool records : {false, true}) {
      if (records)
        apply_activation_checkpointing(sharded, policy);
      else if (turn > 0)
        remove_activation_checkpointing(sharded);
      for (int i = -1; i < kTurn; ++i)
        time_forward(records ? recorded : plain, work, sharded, world.device(), i >= 0);
    }
  const double without = median(plain.whole), with = median(recorded.whole);
  Json line = {{"ours", options.worker},
               {"world", world.size()},
               {"step_ms", with * 1e3},  // the key that rounds are sorted by
               {"forward_ms", without * 1e3},
               {"recorded_forward_ms", with * 1e3},
               {"forward_host_ms", median(plain.host) * 1e3},
               {"recorded_forward_host_ms", median(recorded.host) * 1e3},
               {"more_percent", (with / without - 1) * 100},
               {"loss", plain.loss},
               {"recorded_loss", recorded.loss}};
  if (!world.device().is_cpu()) line["gpu"] = train::device_name(world.device());
  return line;
}

}  // namespace fsdp::bench
