// fsdp bench checkpoint: saves and loads a sharded model with its AdamW state. Beside it, in the
// same run and directory: a plain write of the same bytes, a copy in memory, and PyTorch's
// distributed checkpoint (bench/peers/peer_dcp.py).
//
// Everything is timed as the peer times itself: sync(2) and a barrier before and after each save;
// medians over rounds. Our loads verify checksums.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/randn.h>
#include <fcntl.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <iostream>

#include "base/format.h"
#include "bench/benchmarks.h"
#include "bench/flags.h"
#include "fsdp/checkpoint.h"
#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "train/device.h"

namespace fsdp::bench {
namespace {

namespace fs = std::filesystem;

struct CheckpointRow {
  Place on = {.ranks = 2};
  std::string dir;
  int64_t width = 4096, layers = 8;
  int rounds = 5;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(CheckpointRow, on, dir, width, layers, rounds)

// --- a rank ---

// All ranks start together; the time ends when all are done. With `disk` it is idle before and
// after.
double seconds_together(const World& world, bool disk, const std::function<void()>& work) {
  if (disk) ::sync();
  world.comm().barrier();
  return seconds_of([&] {
    work();
    if (disk) ::sync();
    world.comm().barrier();
  });
}

// The simplest way: large writes from memory, then fsync.
void plain_write(const fs::path& file, const at::Tensor& bytes) {
  const int out = ::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  const auto* data = static_cast<const char*>(bytes.const_data_ptr());
  bool well = out >= 0;
  for (int64_t at = 0; well && at < bytes.numel();) {
    const auto part = std::min<int64_t>(bytes.numel() - at, 64 << 20);
    const ssize_t written = ::write(out, data + at, static_cast<size_t>(part));
    well = written > 0;
    at += written;
  }
  if (!well || ::fsync(out) < 0 || ::close(out) < 0)
    throw Error(formatted("{}: writing failed: {}.", file, std::strerror(errno)),
                "choose another directory with --dir.");
}

int64_t bytes_in(const fs::path& dir) {
  int64_t sum = 0;
  for (const auto& entry : fs::directory_iterator(dir))
    sum += static_cast<int64_t>(entry.file_size());
  return sum;
}

std::vector<Json> time_checkpoints(const CheckpointRow& row, const World& world) {
  torch::manual_seed(0);
  torch::nn::Sequential model;
  for (int64_t i = 0; i < row.layers; ++i)
    model->push_back(torch::nn::Linear(row.width, row.width));
  const auto sharded = fully_shard(
      model, {.wrap = wrap::modules<torch::nn::LinearImpl>(), .device = world.device()});
  AdamW optimizer(sharded, {});
  const auto device = at::TensorOptions().device(world.device());
  model->forward(at::randn({1, row.width}, device)).sum().backward();
  optimizer.step();
  optimizer.zero_grad();
  checkpoint::prepare_async(sharded, &optimizer);

  const fs::path folder = row.dir, saved = folder / "save", later = folder / "async",
                 plain = folder / ("plain-" + std::to_string(world.rank()));
  Samples seconds;
  const auto time = [&](const char* what, bool disk, const std::function<void()>& work) {
    seconds.add(what, seconds_together(world, disk, work));
  };
  int64_t bytes = 0;
  at::Tensor source, target;
  for (int round = -1; round < row.rounds; ++round) {  // the first is warm-up
    if (round == 0) seconds = {{{"first_blocked_s", seconds.all["blocked_s"]}}};
    time("save_s", true, [&] { checkpoint::save(saved, sharded, &optimizer); });
    bytes = bytes_in(saved);
    if (!source.defined()) {
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
      saving.wait();
    });
    seconds.add("blocked_s", std::chrono::duration<double>(saving.blocked()).count());
    time("load_s", false, [&] {
      checkpoint::load(saved, sharded, &optimizer);
      train::synchronize(world.device());
    });
    world.comm().barrier();
    for (const fs::path& dir : {saved, later})
      if (world.rank() == 0) fs::remove_all(dir);
    world.comm().barrier();
  }
  Json line = {{"bytes", bytes}};
  seconds.fill(line);
  return {line};
}

// --- the parent ---

struct Folder {  // removed at the end
  fs::path path;
  ~Folder() {
    std::error_code problem;
    fs::remove_all(path, problem);
  }
};

// Null if no Python has torch.
Json run_dcp(const CheckpointRow& row) {
  const auto python = python_with_torch("PyTorch's checkpoints are");
  if (!python) return nullptr;
  const auto program = peer_program(*python, "peer_dcp.py",
                                    {"--width", std::to_string(row.width), "--layers",
                                     std::to_string(row.layers), "--dir", row.dir + "/peer"});
  return run_ranks({row.on.ranks, row.on.threads, program, "PyTorch's distributed checkpoint"})
      .front();
}

// One line per figure. Ratios with a goal: at least that much of the other's speed, or at most that
// many times its duration.
std::vector<Json> checkpoint_lines(const Json& ours, const Json& peer) {
  std::vector<Json> lines;
  const auto add = [&](const std::string& what, const Json& of, const char* key) {
    const double seconds = of[key];
    lines.push_back({{"what", what},
                     {"seconds", seconds},
                     {"gb_per_s", of["bytes"].get<double>() / seconds / 1e9}});
  };
  const auto ratio = [&](double value) { lines.back()["ratio"] = value; };
  const auto goal = [&](double value, double goal, bool at_most, const std::string& of) {
    ratio(value);
    lines.back()["ratio_good"] = at_most ? value <= goal : value >= goal;
    lines.back()["goal"] = goal;
    lines.back()["goal_text"] = formatted("{} {:.1f}{}", at_most ? "<=" : ">=", goal, of);
  };
  const auto second = [&](const char* key) { return ours[key].get<double>(); };
  const auto times_dcp = [&](const char* key) {
    return ours["bytes"].get<double>() / second(key) /
           (peer["bytes"].get<double>() / peer[key].get<double>());
  };
  add("plain write and fsync", ours, "plain_s");
  if (!peer.is_null()) add("save: PyTorch DCP", peer, "save_s");
  add("save", ours, "save_s");
  goal(second("plain_s") / second("save_s"), 0.9, false, " x the plain write");
  if (!peer.is_null()) {
    add("save", ours, "save_s");
    goal(times_dcp("save_s"), 1.5, false, " x DCP");
  }
  add("save_async, until on disk", ours, "async_s");
  add("plain copy in memory", ours, "copy_s");
  add("save_async: training blocked", ours, "blocked_s");
  goal(second("blocked_s") / second("copy_s"), 1.2, true, " x the copy");
  add("  the first time", ours, "first_blocked_s");
  ratio(second("first_blocked_s") / second("copy_s"));
  if (!peer.is_null()) add("load: PyTorch DCP", peer, "load_s");
  add("load, checksums verified", ours, "load_s");
  if (!peer.is_null()) goal(times_dcp("load_s"), 1.0, false, " x DCP");
  return lines;
}

int run_checkpoint(CheckpointRow row, bool alone, bool json) {
  const fs::path where = row.dir.empty() ? fs::current_path() : fs::path(row.dir);
  const Folder folder{where / (".bench-checkpoint-" + std::to_string(::getpid()))};
  fs::create_directories(folder.path);
  row.dir = folder.path.string();
  const Json ours = run_ours("checkpoint", row, "saving and loading").front();
  table_of({{"what", "what", kWords},
            {"seconds", "s", 3},
            {"gb_per_s", "GB/s", 2},
            {"ratio", "ratio", 2},
            {"goal", "goal", kWords}},
           checkpoint_lines(ours, alone ? Json() : run_dcp(row)))
      .print(std::cout, json);
  if (json) return 0;
  std::cout << formatted(
      "\n{} ranks ({}, {} threads per rank), {} linears of {} x {} with AdamW state, {}; medians "
      "of "
      "{} rounds.\nA save ends when sync(2) returns. Loads read from the page cache.\n",
      row.on.ranks, row.on.backend, row.on.threads, row.layers, row.width, row.width,
      human_bytes(ours["bytes"]), row.rounds);
  return 0;
}

}  // namespace

void add_checkpoint(CLI::App& bench, Action& action) {
  struct Flags {
    CheckpointRow row;
    bool alone = false, json = false;
  };
  auto flags = std::make_shared<Flags>();
  CheckpointRow& row = flags->row;
  CLI::App* command = bench.add_subcommand(
      "checkpoint",
      "Time saves, async saves and loads, beside a plain write, a copy and PyTorch's DCP");
  add_place_flags(*command, row.on);
  command
      ->add_option("--dir", row.dir, "Directory on the disk to measure; default: the current one")
      ->type_name("DIR");
  add_count(*command, "--width", row.width, "Width of each linear");
  add_count(*command, "--layers", row.layers, "Number of linears");
  add_count(*command, "--rounds", row.rounds, "Rounds; the table shows medians");
  command->add_flag("--alone", flags->alone, "Without PyTorch");
  add_json(*command, flags->json);
  command->footer(
      "Examples:\n  fsdp bench checkpoint\n  fsdp bench checkpoint --dir /mnt/fast --layers 32\n"
      "  fsdp bench checkpoint --device cuda --ranks 1 --alone");
  set_action<CheckpointRow>(
      *command, action, row.on,
      [flags] { return run_checkpoint(flags->row, flags->alone, flags->json); }, time_checkpoints);
}

}  // namespace fsdp::bench
