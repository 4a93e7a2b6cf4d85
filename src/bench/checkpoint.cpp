// fsdp bench checkpoint: saves and loads a sharded model with its AdamW state. Beside it, in the
// same run and directory: a plain write of the same bytes, a copy in memory, and PyTorch's
// distributed checkpoint (bench/peers/peer_dcp.py).
//
// Everything is timed as the peer times itself: sync(2) and a barrier before and after each save;
// medians over rounds. Our loads verify checksums.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/randn.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <initializer_list>

#include "base/regular_file.h"
#include "bench/harness.h"
#include "fsdp/checkpoint.h"
#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "train/device.h"

namespace fsdp::bench {
namespace {

namespace fs = std::filesystem;

struct CheckpointRow {
  Machine on = {.ranks = 2};
  std::string dir;
  int64_t width = 4096, layers = 8;
  int rounds = 5;
  bool alone = false, json = false;  // for the parent only
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(CheckpointRow, on, dir, width, layers, rounds)

// The simplest way: one write from memory, then fsync.
void plain_write(const fs::path& path, const at::Tensor& bytes) {
  std::FILE* file = std::fopen(place_of_file(path).c_str(), "wbe");
  const bool well = file && std::setvbuf(file, nullptr, _IONBF, 0) == 0 &&
                    std::fwrite(bytes.const_data_ptr(), bytes.nbytes(), 1, file) == 1 &&
                    ::fsync(::fileno(file)) == 0;
  const int why = errno;
  if (file) std::fclose(file);
  if (!well)
    throw Error(formatted("{}: writing failed: {}.", path, std::strerror(why)),
                "choose another directory with --dir.");
}

void remove_round(const World& world, std::initializer_list<fs::path> dirs) {
  world.comm().barrier();
  for (const fs::path& dir : dirs)
    if (world.rank() == 0) fs::remove_all(dir);
  world.comm().barrier();
}

Lines time_checkpoints(const CheckpointRow& row, const World& world) {
  torch::manual_seed(0);
  torch::nn::Sequential model;
  for (int i = 0; i < row.layers; ++i) model->push_back(torch::nn::Linear(row.width, row.width));
  const auto sharded = fully_shard(
      model, {.wrap = wrap::modules<torch::nn::LinearImpl>(), .device = world.device()});
  AdamW optimizer(sharded, {});
  const auto device = at::TensorOptions().device(world.device());
  const auto step = [&] {
    model->forward(at::randn({1, row.width}, device)).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  step();
  checkpoint::prepare_async(sharded, &optimizer);

  const fs::path folder = row.dir, saved = folder / "save", later = folder / "async",
                 plain = folder / formatted("plain-{}", world.rank());
  Samples seconds;
  // Of all ranks. With `disk`, it is idle before and after.
  const auto time = [&](const char* what, bool disk, const Work& work) {
    if (disk) ::sync();
    world.comm().barrier();
    const Stopwatch watch;
    work();
    if (disk) ::sync();
    world.comm().barrier();
    seconds.add(what, watch.seconds());
  };
  int64_t bytes = 0;
  at::Tensor source, target;
  for (int round = -1; round < row.rounds; ++round) {  // the first is warm-up
    if (round == 0) seconds = {{{"first_blocked_s", seconds.all["blocked_s"]}}};
    time("save_s", true, [&] { checkpoint::save(saved, sharded, &optimizer); });
    if (!source.defined()) {
      for (const auto& file : fs::directory_iterator(saved)) bytes += file.file_size();
      source = at::empty({bytes / world.size()}, at::kByte).random_();
      target = at::empty_like(source).fill_(1);
    }
    time("plain_s", true, [&] { plain_write(plain, source); });
    fs::remove(plain);
    time("copy_s", false,
         [&] { std::memcpy(target.data_ptr(), source.const_data_ptr(), source.nbytes()); });
    checkpoint::AsyncSave saving;
    time("async_s", true, [&] {
      saving = checkpoint::save_async(later, sharded, &optimizer);
      step();  // its update waits for the copy
      saving.wait();
    });
    seconds.add("blocked_s", std::chrono::duration<double>(saving.blocked()).count());
    time("load_s", false, [&] {
      checkpoint::load(saved, sharded, &optimizer);
      train::synchronize(world.device());
    });
    remove_round(world, {saved, later});
  }
  Json line = {{"bytes", bytes}};
  seconds.fill(line);
  return {line};
}

// Null if no Python has torch.
Json run_dcp(const CheckpointRow& row) {
  const auto python = python_with_torch("PyTorch's checkpoints are");
  if (!python) return nullptr;
  Strings program = peer_program(*python, "peer_dcp.py",
                                 formatted("--width {} --layers {} --dir", row.width, row.layers));
  program.push_back(row.dir + "/peer");
  return run_ranks({row.on.ranks, row.on.threads, program, "PyTorch's distributed checkpoint"})
      .front();
}

// One line per figure. Ratios with a goal: at least that much of the other's speed, or at most that
// many times its duration.
Lines checkpoint_lines(const Json& ours, const Json& peer) {
  Lines lines;
  const auto add = [&](const char* what, const Json& of, const char* key) {
    const double seconds = of[key], rate = of["bytes"].get<double>() / seconds / 1e9;
    lines.push_back({{"what", what}, {"seconds", seconds}, {"gb_per_s", rate}});
    return rate;
  };
  const auto goal = [&](double ratio, double goal, bool at_most, const char* of) {
    lines.back().update(
        {{"ratio", ratio},
         {"ratio_good", at_most ? ratio <= goal : ratio >= goal},
         {"goal", goal},
         {"goal_text", formatted("{} {:.1f} x {}", at_most ? "<=" : ">=", goal, of)}});
  };
  const bool beside = !peer.is_null();
  double theirs = 0;
  const double plain = add("plain write and fsync", ours, "plain_s");
  if (beside) theirs = add("save: PyTorch DCP", peer, "save_s");
  const double save = add("save", ours, "save_s");
  goal(save / plain, 0.9, /*at_most=*/false, "the plain write");
  if (beside) {
    add("save", ours, "save_s");
    goal(save / theirs, 1.5, /*at_most=*/false, "DCP");
  }
  add("save_async, until on disk", ours, "async_s");
  const double copy = add("plain copy in memory", ours, "copy_s");
  const double blocked = add("save_async: training blocked", ours, "blocked_s");
  goal(copy / blocked, 1.2, /*at_most=*/true, "the copy");
  lines.back()["ratio"] = copy / add("  the first time", ours, "first_blocked_s");
  if (beside) theirs = add("load: PyTorch DCP", peer, "load_s");
  const double load = add("load, checksums verified", ours, "load_s");
  if (beside) goal(load / theirs, 1.0, /*at_most=*/false, "DCP");
  return lines;
}

int run_checkpoint(CheckpointRow row) {
  const fs::path where = row.dir.empty() ? fs::current_path() : fs::path(row.dir);
  const fs::path folder = where / formatted(".bench-checkpoint-{}", ::getpid());
  fs::create_directories(folder);
  const std::shared_ptr<void> at_the_end(nullptr, [&](void*) {
    std::error_code problem;
    fs::remove_all(folder, problem);
  });
  row.dir = folder.string();
  const Json ours = run_ours("checkpoint", row, "saving and loading").front();
  return print("what; seconds=s .3; gb_per_s=GB/s .2; ratio .2; goal",
               checkpoint_lines(ours, row.alone ? Json() : run_dcp(row)),
               {formatted("{} ranks ({}, {} threads per rank), {} linears of {} x {} with AdamW "
                          "state, {}; medians of {} rounds.",
                          row.on.ranks, row.on.backend, row.on.threads, row.layers, row.width,
                          row.width, human_bytes(ours["bytes"]), row.rounds),
                "A save ends when sync(2) returns. Loads read from the page cache."},
               row.json);
}

}  // namespace

void add_checkpoint(CLI::App& bench, cli::Action& action) {
  auto row = std::make_shared<CheckpointRow>();
  Flags flags(bench, "checkpoint",
              "Time saves, async saves and loads, beside a plain write, a copy and PyTorch's DCP",
              row->json,
              "  fsdp bench checkpoint\n  fsdp bench checkpoint --dir /mnt/fast --layers 32\n"
              "  fsdp bench checkpoint --device cuda --ranks 1 --alone");
  flags.place(row->on);
  flags.number("--threads", row->on.threads, "Threads per rank");
  flags.any("--dir", row->dir, "Directory on the disk to measure; default: the current one", "DIR");
  flags.number("--width", row->width, "Width of each linear");
  flags.number("--layers", row->layers, "Number of linears");
  flags.number("--rounds", row->rounds, "Rounds; the table shows medians");
  flags.flag("--alone", row->alone, "Without PyTorch");
  flags.runs(action, row, run_checkpoint, time_checkpoints);
}

}  // namespace fsdp::bench
