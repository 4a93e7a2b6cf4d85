// fsdp bench offload: the time that offload costs and the memory it saves, on one model: without
// it, with optimizer state in host memory, and with everything there.
//
// Each variant gets its own ranks, which run this command again with --worker (offload_rank.cpp);
// rank 0 prints one JSON object. Steps are timed first; then LibTorch's profiler splits more steps
// into parts. Named rows, which have goals on a GPU, are in offload_rows.cpp.
#include "bench/offload.h"

#include <iostream>
#include <sstream>

#include "base/subprocess.h"
#include "bench/benchmarks.h"
#include "bench/flags.h"

namespace fsdp::bench {
namespace {

std::string percent(int64_t hundredths) {
  const std::string rest = std::to_string(hundredths % 100);
  return std::to_string(hundredths / 100) + "." + (rest.size() < 2 ? "0" : "") + rest;
}

Json measure_offload(const OffloadBench& options, const std::string& which) {
  std::vector<std::string> program = worker_flags(options, which);
  for (const std::string& flag : flags_of(options.shape)) program.push_back(flag);
  return run_ranks({options.ranks, options.threads, program, which}).front();
}

int run_offload_parent(const OffloadBench& options) {
  Table table({{"offload", "offload", Table::kLeft},
               {"device_bytes", "device"},
               {"host_bytes", "host"},
               {"step_ms", "step ms"},
               {"loss", "loss"}});
  Table parts = parts_table();
  for (const std::string& which : options.which) {
    Json found = measure_offload(options, which);
    auto bytes = [&](const char* key) {
      const double value = found[key].get<double>();
      return Cell{static_cast<int64_t>(value), value == 0 ? "-" : human_bytes(value)};
    };
    table.add({text(which), bytes("device_bytes"), bytes("host_bytes"),
               number(found["step_ms"].get<double>(), 1), number(found["loss"].get<double>(), 6)});
    add_parts(parts, "", which, found);
  }
  table.print(std::cout, options.json);
  if (!options.json) std::cout << "\n";
  parts.print(std::cout, options.json);
  if (options.json) return 0;
  std::cout << "\n"
            << description(options.shape) << "; " << options.ranks << " ranks x " << options.threads
            << " threads, " << options.backend << "\n"
            << (options.device == "cpu"
                    ? "Memory: what the engine holds on rank 0 after backward"
                    : "Memory: the allocator's peak on rank 0's device, and what is on the host")
            << ". Time: rank 0's median of " << options.steps << " steps after " << options.warmup
            << " for warm-up.\nThe parts are from the same number of further steps under the "
               "profiler, which costs time itself.\n";
  return 0;
}

void add_offload_row_flags(CLI::App& command, OffloadBench& options) {
  const char* group = "Named rows";
  command
      .add_option("--rows", options.rows,
                  "Models with goals on a GPU, each with its own settings: all, or some of 953m "
                  "(with and without clipping), mlp")
      ->type_name("NAMES")
      ->group(group);
  command
      .add_flag("--peer", options.peer,
                "Also measure FSDP2 with CPUOffloadPolicy and fused AdamW on the CPU")
      ->group(group);
  command.add_option("--only", options.only, "Measure only ours, or only the peer (FSDP2)")
      ->check(CLI::IsMember({"ours", "peer"}))
      ->group(group);
  add_page_flags(command, options.page, options.keep, options.limit);
}

}  // namespace

std::vector<std::string> worker_flags(const OffloadBench& options, const std::string& worker) {
  std::ostringstream clip, fraction;
  clip << options.clip;
  fraction << options.fraction;
  std::vector<std::string> flags = {own_binary(), "offload",
                                    "--worker",   worker,
                                    "--backend",  options.backend,
                                    "--threads",  std::to_string(options.threads),
                                    "--steps",    std::to_string(options.steps),
                                    "--warmup",   std::to_string(options.warmup),
                                    "--prefetch", std::to_string(options.prefetch),
                                    "--clip",     clip.str(),
                                    "--fraction", fraction.str()};
  if (!options.grad_dtype.empty()) flags.insert(flags.end(), {"--grad-dtype", options.grad_dtype});
  if (!options.init.empty()) flags.insert(flags.end(), {"--init", options.init});
  return flags;
}

Table parts_table(const std::string& of) {
  return Table({{"row", of, Table::kLeft},
                {"offload", "offload", Table::kLeft},
                {"part", "of a step", Table::kLeft},
                {"us", "us"},
                {"percent", "%"}});
}

void add_parts(Table& table, const std::string& row, const std::string& what, const Json& line) {
  if (!line.contains("parts")) return;  // the profiler failed and logged why
  std::array<int64_t, kParts> ns{};
  for (size_t i = 0; i < kParts; ++i) ns[i] = line["parts"][i].get<int64_t>();
  const auto share = shares(ns);
  for (size_t i = 0; i < kParts; ++i)
    table.add({text(row), text(what), text(part_name(i)),
               number(static_cast<double>(ns[i]) / 1e3, 0),
               Cell{static_cast<double>(share[i]) / 100, percent(share[i])}});
}

void add_offload(CLI::App& bench, Action& action) {
  auto options = std::make_shared<OffloadBench>();
  CLI::App* command = bench.add_subcommand(
      "offload", "Time and memory of training steps, without and with offload to host memory");
  add_device(*command, options->device);
  command->add_option("--backend", options->backend,
                      "shm, mpi or nccl; default: shm on the CPU, nccl on a GPU");
  add_count(*command, "--ranks", options->ranks, "Ranks on this host");
  add_count(*command, "--threads", options->threads,
            "Threads per rank; they update what is offloaded");
  add_count(*command, "--steps", options->steps, "Timed steps");
  add_count(*command, "--warmup", options->warmup, "Warm-up steps");
  add_count(*command, "--prefetch", options->prefetch, "Units to gather ahead; each takes memory",
            0);
  command->add_option("--clip", options->clip, "Clip gradients to this norm; 0: don't clip")
      ->capture_default_str();
  command->add_option("--fraction", options->fraction, "Share of the model to offload")
      ->check(CLI::Range(0.0, 1.0).description(""))
      ->capture_default_str();
  command
      ->add_option(
          "--which", options->which,
          "Variants to measure: off, optimizer (masters, gradients and states in host memory), "
          "everything")
      ->delimiter(',')
      ->check(CLI::IsMember({"off", "optimizer", "everything"}))
      ->capture_default_str();
  command
      ->add_option(
          "--grad-dtype", options->grad_dtype,
          "Dtype of gradients until the update: bf16 or fp32; default: fp32, or the row's own")
      ->check(CLI::IsMember({"bf16", "fp32"}));
  command->add_flag("--json", options->json, "One JSON object per line");
  command->add_option("--worker", options->worker, "")->group("");  // a rank of the above
  add_init(*command, options->init);
  add_offload_row_flags(*command, *options);
  add_shape_flags(*command, options->shape);
  command->footer(
      "Examples:\n  fsdp bench offload\n  fsdp bench offload --device cuda --threads 16 --dtype "
      "bf16\n  fsdp bench offload --model mlp --width 1024 --clip 0 --json\n"
      "  fsdp bench offload --device cuda --rows 953m,mlp --peer --write\n"
      "The peer needs a python3 with torch 2.11 (or FSDP_TEST_PYTHON=PYTHON); without one it is "
      "left out.");
  command->callback([options, command, &action] {
    options->steps_given = command->count("--steps") > 0;
    options->warmup_given = command->count("--warmup") > 0;
    options->prefetch_given = command->count("--prefetch") > 0;
    options->clip_given = command->count("--clip") > 0;
    options->threads_given = command->count("--threads") > 0;
    options->write = command->count("--write") > 0;
    if (options->backend.empty()) options->backend = options->device == "cuda" ? "nccl" : "shm";
    action = [options, command] {
      if (!options->worker.empty()) return run_offload_rank(*options);
      require_rows(*command, options->rows);
      return options->rows.empty() ? run_offload_parent(*options) : run_offload_rows(*options);
    };
  });
}

}  // namespace fsdp::bench
