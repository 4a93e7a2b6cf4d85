// fsdp bench train: the time of a training step, sharded by us, by PyTorch's FSDP2, and not
// sharded: as many independent processes side by side, in C++ (the same model code) and in Python.
//
// All run in one invocation, in alternating rounds, so that a slow period of the machine affects
// each. The command launches its own ranks, which run it again with --worker (train_rank.cpp); rank
// 0 prints one JSON object, and the parent makes the table. Named rows (--rows all), which have
// goals on a GPU, are in train_rows.cpp.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <map>

#include "base/log.h"
#include "base/subprocess.h"
#include "base/table.h"
#include "bench/benchmarks.h"
#include "bench/flags.h"
#include "bench/measured.h"
#include "bench/train.h"
#include "fsdp/error.h"
#include "train/training.h"

namespace fsdp::bench {
namespace {

struct TrainRow {
  Shape shape;
  double goal = 0;  // largest step time as a multiple of that without FSDP; 0: no goal
};

// Who is measured, and the result of each round.
struct Contender {
  std::string key, title;
  std::function<Json(const TrainRow& row, const std::string& what)> measure;
  std::vector<Json> rounds = {};

  double middle(const char* field) const {
    std::vector<double> values;
    for (const Json& round : rounds)
      if (round.contains(field)) values.push_back(round[field].get<double>());
    return values.empty() ? std::nan("") : median(values);
  }
  double extreme(bool largest) const {
    std::vector<double> values;
    for (const Json& round : rounds) values.push_back(round["step_ms"].get<double>());
    auto [low, high] = std::minmax_element(values.begin(), values.end());
    return largest ? *high : *low;
  }
};

std::vector<TrainRow> train_rows_of(const TrainBench& options, bool model_given) {
  if (model_given && options.rows.empty()) return {{options.shape}};
  Shape llama, mlp;
  mlp.model = "mlp";
  mlp.batch = 8;
  return {{llama, 1.0}, {mlp, 0.9}};
}

std::vector<std::string> train_common_flags(const TrainBench& options) {
  return {"--device", options.device,
          "--steps",  std::to_string(options.steps),
          "--warmup", std::to_string(options.warmup),
          "--clip",   std::to_string(options.clip)};
}

Json measure_cpp(const TrainBench& options, const std::string& worker, const TrainRow& row,
                 const std::string& what) {
  std::vector<std::string> program = {own_binary(), "train",
                                      "--worker",   worker,
                                      "--threads",  std::to_string(options.threads),
                                      "--strategy", options.strategy};
  append(program, train_common_flags(options));
  append(program, flags_of(row.shape));
  if (!options.activations.empty()) append(program, {"--activations", options.activations});
  if (options.keep_last > 0) append(program, {"--keep-last", std::to_string(options.keep_last)});
  if (!options.init.empty()) append(program, {"--init", options.init});
  if (!options.backend.empty()) append(program, {"--backend", options.backend});
  return run_ranks({options.ranks, options.threads, program, what}).front();
}

Json measure_python(const TrainBench& options, const std::string& python, const std::string& mode,
                    const TrainRow& row, const std::string& what) {
  bool keeps = train::parse_strategy(options.strategy) == ShardingStrategy::SHARD_GRAD_OP;
  std::vector<std::string> program = {
      python, peer_script("peer_fsdp2.py"), "--mode", mode, "--reshard", keeps ? "0" : "1"};
  append(program, train_common_flags(options));
  append(program, peer_flags_of(row.shape));
  if (mode != "none") append(program, peer_recomputes(options.activations));
  append(program, {"--init", options.init.empty() ? "cpu" : options.init});
  Ranks ranks = {options.ranks, options.threads, program, what};
  bool share = options.device == "cuda" && options.ranks > 1;
  return (share ? run_peers_on_gpu(ranks) : run_ranks(ranks)).front();
}

// In the order in which they run within a round.
std::vector<Contender> contenders(const TrainBench& options) {
  auto wanted = [&](const char* kind) { return options.only.empty() || options.only == kind; };
  auto cpp = [&options](const char* worker) {
    return [&options, worker](const TrainRow& row, const std::string& what) {
      return measure_cpp(options, worker, row, what);
    };
  };
  ShardingStrategy strategy = train::parse_strategy(options.strategy);
  std::vector<Contender> all;
  if (wanted("ours"))
    all.push_back({"ours", std::string("fsdp.cpp, ") + name(strategy), cpp("ours")});
  if (wanted("none")) all.push_back({"none_cpp", "no FSDP, C++", cpp("none")});
  auto python = wanted("none") || wanted("peer")
                    ? python_with_torch("FSDP2 and no FSDP in Python are")
                    : std::nullopt;
  if (!python) return all;
  auto python_in = [&options, python](const char* mode) {
    return [&options, python, mode](const TrainRow& row, const std::string& what) {
      return measure_python(options, *python, mode, row, what);
    };
  };
  if (wanted("none")) all.push_back({"none_python", "no FSDP, Python", python_in("none")});
  if (wanted("peer") && strategy == ShardingStrategy::NO_SHARD)
    all.push_back({"ddp", "PyTorch's DDP", python_in("ddp")});
  else if (wanted("peer") && strategy == ShardingStrategy::HYBRID_SHARD)
    log::info("FSDP2 is left out: the peer script has no HYBRID_SHARD.");
  else if (wanted("peer"))
    all.push_back({"fsdp2", "PyTorch's FSDP2", python_in("fsdp2")});
  return all;
}

// The faster of C++ and Python; NaN if neither ran.
double without_fsdp(const std::vector<Contender>& all) {
  double best = std::nan("");
  for (const Contender& one : all)
    if (one.key.starts_with("none")) best = std::fmin(best, one.middle("step_ms"));
  return best;
}

void add_train_rows(Table& table, const TrainBench& options, const TrainRow& row,
                    const std::vector<Contender>& all) {
  double none = without_fsdp(all);
  for (const Contender& one : all) {
    double ms = one.middle("step_ms"), ratio = ms / none;
    bool has_goal = one.key == "ours" && row.goal > 0;
    Cell times = maybe(ratio, 3);
    if (has_goal && !std::isnan(ratio)) times.colour = ratio <= row.goal ? "32" : "31";
    Cell range = text(number(one.extreme(false), 1).text + "-" + number(one.extreme(true), 1).text);
    table.add(
        {text(title(row.shape)),
         text(one.title),
         {options.ranks, std::to_string(options.ranks) + " x " + std::to_string(options.threads)},
         {options.threads, ""},
         number(ms, 1),
         range,
         times,
         has_goal ? Cell{row.goal, "<= " + number(row.goal, 1).text} : Cell{nullptr, ""},
         maybe(one.middle("forward_ms"), 1),
         maybe(one.middle("backward_ms"), 1),
         maybe(one.middle("clip_ms"), 1),
         maybe(one.middle("update_ms"), 1),
         maybe(one.middle("loss0"), 4),
         maybe(one.middle("loss"), 4),
         maybe(one.middle("maxrss_mb"), 0)});
  }
}

// Ours and FSDP2 start with the same weights and data, so their losses must agree.
void compare_losses(const TrainBench& options, const TrainRow& row,
                    const std::vector<Contender>& all) {
  double ours = std::nan(""), peer = std::nan("");
  for (const Contender& one : all) {
    if (one.key == "ours") ours = one.middle("loss");
    if (one.key == "fsdp2" || one.key == "ddp") peer = one.middle("loss");
  }
  double allowed = (row.shape.dtype == "fp32" ? 1e-3 : 2e-2) * std::abs(peer);
  if (std::abs(ours - peer) > allowed)
    log::warn("after " + std::to_string(options.warmup + options.steps) + " steps of " +
              title(row.shape) + " the losses differ: ours " + number(ours, 6).text +
              ", PyTorch's " + number(peer, 6).text + ".");
}

int run_train_parent(const TrainBench& options, bool model_given) {
  train::parse_strategy(options.strategy);  // refuse before anything starts
  std::vector<Contender> all = contenders(options);
  if (all.empty()) throw Error("there is nothing to measure.", "leave out --only.");
  bool cpu = options.device == "cpu";
  Table table({{"model", "model", Table::kLeft},
               {"what", "what", Table::kLeft},
               {"ranks", "ranks x threads"},
               {"threads", ""},
               {"step_ms", "step ms"},
               {"range", "over rounds", Table::kLeft},
               {"times_none", options.only.empty() ? "x no FSDP" : ""},
               {"goal", options.only.empty() && !model_given ? "goal" : "", Table::kLeft},
               {"forward_ms", "forward"},
               {"backward_ms", "backward"},
               {"clip_ms", "clip"},
               {"update_ms", "update"},
               {"first_loss", "first loss"},
               {"last_loss", "last loss"},
               {"peak_rss_mb", cpu ? "peak MiB" : ""}});
  std::vector<TrainRow> rows = train_rows_of(options, model_given);
  for (const TrainRow& row : rows) {
    for (Contender& one : all) one.rounds.clear();
    for (int round = 1; round <= options.rounds; ++round)
      for (Contender& one : all)
        one.rounds.push_back(
            one.measure(row, title(row.shape) + ", round " + std::to_string(round) + " of " +
                                 std::to_string(options.rounds) + ", " + one.title));
    add_train_rows(table, options, row, all);
    compare_losses(options, row, all);
  }
  table.print(std::cout, options.json);
  if (options.json) return 0;
  std::cout << "\n";
  for (const TrainRow& row : rows) std::cout << description(row.shape) << "\n";
  std::cout << "step ms: rank 0's median of " << options.steps << " steps after " << options.warmup
            << " for warm-up, then the median of " << options.rounds
            << " rounds; the same for the other columns.\nno FSDP: " << options.ranks
            << " independent processes side by side; ratios are to the faster of the two.\nA step: "
               "forward, backward, clip"
            << (options.clip > 0 ? "" : " (off)") << ", AdamW, zero_grad"
            << (cpu ? ".\n" : "; the parts are host time, the step includes the device's time.\n");
  return 0;
}

void add_train_row_flags(CLI::App& command, TrainBench& options) {
  const char* group = "Named rows";
  command.add_flag("--peer", options.peer, "Also measure FSDP2, in its best variant")->group(group);
  command
      .add_option(
          "--mode", options.modes,
          "How we train: eager, graph (one CUDA graph per step), plain (no FSDP), tape (the "
          "cost of recording a forward for recomputation); default: the row's own")
      ->delimiter(',')
      ->check(CLI::IsMember({"eager", "graph", "plain", "tape"}))
      ->group(group);
  command
      .add_option("--grad-dtype", options.grad_dtype,
                  "Dtype of gradients until the update: bf16 or fp32; default: the row's own")
      ->check(CLI::IsMember({"bf16", "fp32"}))
      ->group(group);
  add_page_flags(command, options.page, options.keep, options.limit);
}

}  // namespace

void add_train(CLI::App& bench, Action& action) {
  auto options = std::make_shared<TrainBench>();
  CLI::App* command = bench.add_subcommand(
      "train", "Time training steps beside PyTorch's FSDP2, and beside no sharding");
  add_device(*command, options->device);
  command
      ->add_option(
          "--rows", options->rows,
          "cpu: a Llama of 13.8M and an MLP of 8 x 2048, which have goals on the CPU (the default "
          "if no flag of the model is given); all: every row with a goal on a GPU; or some of "
          "these: 182m, 953m, mlp, 117m, qwen0.5b, qwen1.5b, qwen3b, 3.6b, "
          "3.6b-selective, 3.6b-feed_forward, 3.6b-full, 3.6b-keep8, 3.6b-offload")
      ->type_name("NAMES");
  command
      ->add_option("--strategy", options->strategy,
                   "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD (compared with DDP) or HYBRID_SHARD")
      ->capture_default_str();
  command->add_option("--backend", options->backend,
                      "shm, mpi or nccl; default: shm on the CPU, nccl on a GPU");
  add_count(*command, "--ranks", options->ranks, "Ranks on this host; a named row has its own");
  add_count(*command, "--threads", options->threads, "Threads per rank");
  add_count(*command, "--steps", options->steps, "Timed steps");
  add_count(*command, "--warmup", options->warmup, "Warm-up steps");
  add_count(*command, "--rounds", options->rounds, "Rounds; each runs everything once");
  command->add_option("--clip", options->clip, "Clip gradients to this norm; 0: don't clip")
      ->check(CLI::Range(0.0, 1e30).description(""))
      ->capture_default_str();
  command
      ->add_option(
          "--activations", options->activations,
          "Recomputation, as activations.mode of fsdp train: none, selective, feed_forward, "
          "full or offload; default: none, or the row's own")
      ->check(CLI::IsMember({"none", "selective", "feed_forward", "full", "offload"}));
  add_count(*command, "--keep-last", options->keep_last,
            "Blocks at the end that --activations doesn't recompute", 0);
  command
      ->add_option("--only", options->only,
                   "Measure only ours, only none (no FSDP), or only the peer (FSDP2)")
      ->check(CLI::IsMember({"ours", "none", "peer"}));
  command->add_flag("--json", options->json, "One JSON object per line");
  command->add_option("--worker", options->worker, "")->group("");  // a rank of the above
  add_init(*command, options->init);
  add_train_row_flags(*command, *options);
  add_shape_flags(*command, options->shape);
  command->footer(
      "Examples:\n  fsdp bench train\n  fsdp bench train --ranks 4 --threads 4\n"
      "  fsdp bench train --model mlp --width 4096 --batch 8 --only ours --rounds 1\n"
      "  fsdp bench train --device cuda --ranks 1 --model llama --layers 24 --dim 768 --heads 12 "
      "\\\n"
      "    --seq 256 --batch 1 --vocab 8192 --dtype bf16\n"
      "  fsdp bench train --device cuda --rows all --peer --write\n"
      "  fsdp bench train --device cuda --rows 182m,953m --mode graph\n"
      "  fsdp bench train --device cuda --rows 3.6b-selective,3.6b-full --peer\n"
      "FSDP2 needs a python3 with torch 2.11 (or FSDP_TEST_PYTHON=PYTHON); without one it is left "
      "out.");
  command->callback([options, command, &action] {
    if (options->backend.empty()) options->backend = options->device == "cuda" ? "nccl" : "shm";
    auto in_model = [](const CLI::Option* option) {
      return option->get_group() == "The model" && option->count() > 0;
    };
    auto given = command->get_options(in_model);
    bool model_given = !given.empty() || options->device == "cuda";
    options->steps_given = command->count("--steps") > 0;
    options->warmup_given = command->count("--warmup") > 0;
    options->rounds_given = command->count("--rounds") > 0;
    options->keep_last_given = command->count("--keep-last") > 0;
    options->ranks_given = command->count("--ranks") > 0;
    options->write = command->count("--write") > 0;
    action = [options, command, model_given] {
      if (!options->worker.empty()) return run_rank(*options);
      require_rows(*command, options->rows == "cpu" ? "" : options->rows);
      if (!options->rows.empty() && options->rows != "cpu") return run_rows(*options);
      return run_train_parent(*options, model_given);
    };
  });
}

}  // namespace fsdp::bench
