// fsdp bench checkpoint: saves and loads a sharded model with its AdamW state. Beside it, in the
// same run and directory: a plain write of the same bytes, a copy in memory, and PyTorch's
// distributed checkpoint (bench/peers/peer_dcp.py).
//
// Everything is timed as the peer times itself: sync(2) and a barrier before and after each save;
// medians over rounds. Our loads verify checksums.
//
// The command launches its own ranks, which run it again with --worker; rank 0 prints JSON.
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

#include "base/subprocess.h"
#include "base/table.h"
#include "bench/benchmarks.h"
#include "bench/flags.h"
#include "bench/workload.h"
#include "fsdp/checkpoint.h"
#include "fsdp/error.h"
#include "fsdp/optim.h"
#include "train/device.h"

namespace fsdp::bench {
namespace {

namespace fs = std::filesystem;
using std::chrono::steady_clock;

struct CheckpointOptions {
  std::string device = "cpu", backend, dir;
  int ranks = 2;
  int threads = 1;
  int64_t width = 4096, layers = 8;
  int rounds = 5;
  bool json = false, worker = false, alone = false;
};

// --- a rank ---

double seconds_on_disk(const std::function<void()>& work) {
  const auto start = steady_clock::now();
  work();
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

// All ranks start together on an idle disk; the time ends when all are done and it is idle again.
double seconds_with_sync(const World& world, const std::function<void()>& work) {
  ::sync();
  world.comm().barrier();
  return seconds_on_disk([&] {
    work();
    ::sync();
    world.comm().barrier();
  });
}

double seconds_together(const World& world, const std::function<void()>& work) {
  world.comm().barrier();
  return seconds_on_disk([&] {
    work();
    world.comm().barrier();
  });
}

[[noreturn]] void throw_io(const fs::path& file) {
  throw Error(file.string() + ": writing failed: " + std::strerror(errno) + ".",
              "choose another directory with --dir.");
}

// The simplest way: large writes from memory, then fsync.
void plain_write(const fs::path& file, const at::Tensor& bytes) {
  const int out = ::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  const auto* data = static_cast<const char*>(bytes.const_data_ptr());
  for (int64_t at = 0; out >= 0 && at < bytes.numel();) {
    const auto part = std::min<int64_t>(bytes.numel() - at, 64 << 20);
    const ssize_t written = ::write(out, data + at, static_cast<size_t>(part));
    if (written <= 0) throw_io(file);
    at += written;
  }
  if (out < 0 || ::fsync(out) < 0 || ::close(out) < 0) throw_io(file);
}

struct Timed {
  std::vector<double> plain, save, load, blocked, first_blocked, whole, copy;
};

int64_t bytes_in(const fs::path& dir) {
  int64_t sum = 0;
  for (const auto& entry : fs::directory_iterator(dir))
    sum += static_cast<int64_t>(entry.file_size());
  return sum;
}

int run_checkpoint_worker(const CheckpointOptions& options) {
  World world = init({.backend = options.backend});
  torch::manual_seed(0);
  torch::nn::Sequential model;
  for (int64_t i = 0; i < options.layers; ++i)
    model->push_back(torch::nn::Linear(options.width, options.width));
  auto sharded = fully_shard(
      model, {.wrap = wrap::modules<torch::nn::LinearImpl>(), .device = world.device()});
  AdamW optimizer(sharded, {});
  const auto device = at::TensorOptions().device(world.device());
  model->forward(at::randn({1, options.width}, device)).sum().backward();
  optimizer.step();
  optimizer.zero_grad();
  checkpoint::prepare_async(sharded, &optimizer);

  const fs::path folder = fs::path(options.dir);
  const auto dir = [&](const char* kind, int round) {
    return folder / (kind + std::to_string(round));
  };
  Timed timed;
  const auto save_async = [&](const fs::path& to, std::vector<double>& blocked) {
    checkpoint::AsyncSave saving;
    timed.whole.push_back(seconds_with_sync(world, [&] {
      saving = checkpoint::save_async(to, sharded, &optimizer);
      saving.wait();
    }));
    blocked.push_back(std::chrono::duration<double>(saving.blocked()).count());
  };
  int64_t bytes = 0;
  at::Tensor source, target;
  for (int round = -1; round < options.rounds; ++round) {  // the first is warm-up
    if (round == 0) timed = {.first_blocked = timed.first_blocked};
    timed.save.push_back(seconds_with_sync(
        world, [&] { checkpoint::save(dir("save-", round), sharded, &optimizer); }));
    bytes = bytes_in(dir("save-", round));
    if (!source.defined()) {
      source = at::empty({bytes / world.size()}, at::kByte).random_();
      target = at::empty_like(source).fill_(1);
    }
    const auto file = folder / ("plain-" + std::to_string(world.rank()));
    timed.plain.push_back(seconds_with_sync(world, [&] { plain_write(file, source); }));
    fs::remove(file);
    timed.copy.push_back(seconds_together(
        world, [&] { std::memcpy(target.data_ptr(), source.const_data_ptr(), source.nbytes()); }));
    save_async(dir("async-", round), round < 0 ? timed.first_blocked : timed.blocked);
    timed.load.push_back(seconds_together(world, [&] {
      checkpoint::load(dir("save-", round), sharded, &optimizer);
      train::synchronize(world.device());
    }));
    world.comm().barrier();
    if (world.rank() == 0)
      for (const char* kind : {"save-", "async-"}) fs::remove_all(dir(kind, round));
    world.comm().barrier();
  }
  if (world.rank() == 0)
    std::cout << Json{{"bytes", bytes},
                      {"plain_s", median(timed.plain)},
                      {"save_s", median(timed.save)},
                      {"load_s", median(timed.load)},
                      {"copy_s", median(timed.copy)},
                      {"blocked_s", median(timed.blocked)},
                      {"first_blocked_s", median(timed.first_blocked)},
                      {"async_s", median(timed.whole)}}
                     .dump()
              << std::endl;
  world.comm().barrier();
  return 0;
}

// --- the parent ---

struct Folder {  // removed at the end
  fs::path path;
  ~Folder() {
    std::error_code problem;
    fs::remove_all(path, problem);
  }
};

std::optional<Json> run_peer(const CheckpointOptions& options) {
  const auto python = python_with_torch("PyTorch's checkpoints are");
  const std::string script = peer_script("peer_dcp.py");
  if (!python || script.empty()) return std::nullopt;
  return run_ranks({options.ranks,
                    options.threads,
                    {*python, script, "--width", std::to_string(options.width), "--layers",
                     std::to_string(options.layers), "--dir", options.dir + "/peer"},
                    "PyTorch's distributed checkpoint"})
      .front();
}

int run_checkpoint_parent(CheckpointOptions options) {
  fs::path where = options.dir.empty() ? fs::current_path() : fs::path(options.dir);
  fs::create_directories(where);
  const Folder folder{where / (".bench-checkpoint-" + std::to_string(::getpid()))};
  fs::create_directories(folder.path);
  options.dir = folder.path.string();
  const std::vector<std::string> program = {own_binary(),
                                            "checkpoint",
                                            "--worker",
                                            "--backend",
                                            options.backend,
                                            "--dir",
                                            options.dir,
                                            "--width",
                                            std::to_string(options.width),
                                            "--layers",
                                            std::to_string(options.layers),
                                            "--rounds",
                                            std::to_string(options.rounds)};
  const Json ours =
      run_ranks({options.ranks, options.threads, program, "saving and loading"}).front();
  std::optional<Json> peer;
  if (!options.alone) peer = run_peer(options);

  Table table({{"what", "what", Table::kLeft},
               {"seconds", "s"},
               {"gb_per_s", "GB/s"},
               {"ratio", "ratio"},
               {"goal", "goal", Table::kLeft}});
  const double bytes = ours["bytes"].get<double>();
  const auto row = [&](const std::string& what, double seconds, double size,
                       std::optional<double> ratio = {}, std::optional<double> goal = {},
                       const std::string& against = "", bool at_most = false) {
    Cell shown = ratio ? number(*ratio, 2) : Cell{nullptr, ""};
    const bool met = goal && (at_most ? *ratio <= *goal : *ratio >= *goal);
    if (goal) shown.colour = met ? "32" : "31";
    Cell target{nullptr, against};
    if (goal)
      target = {*goal, std::string(at_most ? "<= " : ">= ") + number(*goal, 1).text + against};
    table.add({text(what), number(seconds, 3), number(size / seconds / 1e9, 2), shown, target});
  };
  const auto of = [](const Json& json, const char* key) { return json[key].get<double>(); };
  row("plain write and fsync", of(ours, "plain_s"), bytes);
  if (peer) row("save: PyTorch DCP", of(*peer, "save_s"), of(*peer, "bytes"));
  const double speed = bytes / of(ours, "save_s");
  row("save", of(ours, "save_s"), bytes, of(ours, "plain_s") / of(ours, "save_s"), 0.9,
      " x the plain write");
  if (peer)
    row("save", of(ours, "save_s"), bytes, speed / (of(*peer, "bytes") / of(*peer, "save_s")), 1.5,
        " x DCP");
  row("save_async, until on disk", of(ours, "async_s"), bytes);
  row("plain copy in memory", of(ours, "copy_s"), bytes);
  row("save_async: training blocked", of(ours, "blocked_s"), bytes,
      of(ours, "blocked_s") / of(ours, "copy_s"), 1.2, " x the copy", /*at_most=*/true);
  row("  the first time", of(ours, "first_blocked_s"), bytes,
      of(ours, "first_blocked_s") / of(ours, "copy_s"));
  if (peer) row("load: PyTorch DCP", of(*peer, "load_s"), of(*peer, "bytes"));
  const double load = bytes / of(ours, "load_s");
  if (peer)
    row("load, checksums verified", of(ours, "load_s"), bytes,
        load / (of(*peer, "bytes") / of(*peer, "load_s")), 1.0, " x DCP");
  else
    row("load, checksums verified", of(ours, "load_s"), bytes);
  table.print(std::cout, options.json);
  if (options.json) return 0;
  std::cout << "\n"
            << options.ranks << " ranks (" << options.backend << ", " << options.threads
            << " threads per rank), " << options.layers << " linears of " << options.width << " x "
            << options.width << " with AdamW state, " << human_bytes(bytes) << "; medians of "
            << options.rounds
            << " rounds.\nA save ends when sync(2) returns. Loads read from the page cache.\n";
  return 0;
}

}  // namespace

void add_checkpoint(CLI::App& bench, Action& action) {
  auto options = std::make_shared<CheckpointOptions>();
  CLI::App* command = bench.add_subcommand(
      "checkpoint",
      "Time saves, async saves and loads, beside a plain write, a copy and PyTorch's DCP");
  add_device(*command, options->device);
  command->add_option("--backend", options->backend,
                      "shm, mpi or nccl; default: shm on the CPU, nccl on a GPU");
  command
      ->add_option("--dir", options->dir,
                   "Directory on the disk to measure; default: the current one")
      ->type_name("DIR");
  add_count(*command, "--ranks", options->ranks, "Ranks on this host");
  add_count(*command, "--threads", options->threads, "Threads per rank");
  add_count(*command, "--width", options->width, "Width of each linear");
  add_count(*command, "--layers", options->layers, "Number of linears");
  add_count(*command, "--rounds", options->rounds, "Rounds; the table shows medians");
  command->add_flag("--alone", options->alone, "Without PyTorch");
  command->add_flag("--json", options->json, "One JSON object per line");
  command->add_flag("--worker", options->worker, "")->group("");  // a rank of the above
  command->footer(
      "Examples:\n  fsdp bench checkpoint\n  fsdp bench checkpoint --dir /mnt/fast --layers 32\n"
      "  fsdp bench checkpoint --device cuda --ranks 1 --alone");
  command->callback([options, &action] {
    if (options->backend.empty()) options->backend = options->device == "cuda" ? "nccl" : "shm";
    action = [options] {
      return options->worker ? run_checkpoint_worker(*options) : run_checkpoint_parent(*options);
    };
  });
}

}  // namespace fsdp::bench
