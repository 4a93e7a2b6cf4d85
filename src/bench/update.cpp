// fsdp bench update: AdamW on the CPU with registers of every width that it has, beside LibTorch's.
//
// Masters are stored as beside bfloat16 parameters: split, or whole with a bfloat16 copy.
// LibTorch's fused AdamW has neither; it is timed on float32, and once more with the copy to
// bfloat16 that training would need. All take turns, so that other load on the machine affects
// each.
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <iostream>

#include "base/format.h"
#include "bench/benchmarks.h"
#include "bench/flags.h"
#include "kernels/cpu/widths.h"
#include "kernels/update.h"

namespace fsdp::bench {
namespace {

struct UpdateOptions {
  double millions = 64;
  int threads = 0;
  int rounds = 9;
  bool json = false;
};

struct Case {
  std::string what, gradient;
  int width = 0;  // 0: LibTorch's own choice
  int bytes = 0;  // per element, read and written
  std::function<void()> work;
  std::vector<double> seconds = {};
};

// All cases share their arrays; each overwrites them or leaves them usable.
std::vector<Case> make_cases(int64_t numel) {
  const auto full = [&](double value, at::ScalarType type) {
    return at::full({numel}, value, at::TensorOptions(type));
  };
  const at::Tensor master = full(1, at::kFloat), low = full(1, at::kBFloat16),
                   rest = at::zeros({numel}, at::kShort);
  const at::Tensor exp_avg = full(0.01, at::kFloat), exp_avg_sq = full(0.01, at::kFloat);
  const at::Tensor grad = full(0.01, at::kFloat), short_grad = full(0.01, at::kBFloat16);
  std::vector<Case> cases;
  const kernels::AdamWStep step{.lr = 1e-5, .step = 10};
  for (const int width : kernels::cpu::widths())
    for (const bool split : {true, false})
      for (const bool is_short : {true, false}) {
        kernels::AdamWTensors t{master, is_short ? short_grad : grad, exp_avg, exp_avg_sq, low};
        if (split) t.master = at::Tensor(), t.rest = rest;
        cases.push_back({split ? "split master" : "master and copy", is_short ? "bf16" : "fp32",
                         width, (split ? 24 : 26) + (is_short ? 2 : 4),
                         [=] { kernels::cpu::adamw(t, step, 1.0f, width); }});
      }
  const auto fused = [=, count = at::full({}, 1, at::TensorOptions(at::kFloat))] {
    at::_fused_adamw_({master}, {grad}, {exp_avg}, {exp_avg_sq}, {}, {count}, 1e-5, 0.9, 0.999, 0.0,
                      1e-8, false, false);
  };
  cases.push_back({"LibTorch, fused, and copy", "fp32", 0, 34, [=] {
                     fused();
                     low.copy_(master);
                   }});
  cases.push_back({"LibTorch, fused", "fp32", 0, 28, fused});
  return cases;
}

int run_update(const UpdateOptions& options) {
  const int used = kernels::cpu::width();
  if (options.threads > 0) at::set_num_threads(options.threads);
  const auto numel = static_cast<int64_t>(options.millions * 1e6);
  std::vector<Case> cases = make_cases(numel);
  for (int round = -1; round < options.rounds; ++round)  // the first is warm-up
    for (Case& one : cases) {
      const double took = seconds_of(one.work);
      if (round >= 0) one.seconds.push_back(took);
    }
  std::vector<Json> lines;
  for (const Case& one : cases) {
    const double seconds = median(one.seconds);
    lines.push_back({{"what", one.what},
                     {"gradient", one.gradient},
                     {"ms", 1e3 * seconds},
                     {"gb_per_s", static_cast<double>(one.bytes * numel) / seconds / 1e9},
                     {"speedup", median(cases.back().seconds) / seconds}});
    if (one.width) lines.back()["width"] = one.width;
  }
  table_of({{"what", "AdamW", kWords},
            {"gradient", "gradient", kWords},
            {"width", "register bytes", 0},
            {"ms", "ms", 2},
            {"gb_per_s", "GB/s", 1},
            {"speedup", "x LibTorch", 2}},
           lines)
      .print(std::cout, options.json);
  if (options.json) return 0;
  std::cout << formatted(
      "\n{} parameters, {}; medians of {} rounds. x LibTorch: speed relative to its fused AdamW. "
      "Training uses {}-byte registers (FSDP_CPU_WIDTH).\n",
      with_separators(numel), counted(at::get_num_threads(), "thread"), options.rounds, used);
  return 0;
}

}  // namespace

void add_update(CLI::App& bench, Action& action) {
  auto options = std::make_shared<UpdateOptions>();
  CLI::App* command = bench.add_subcommand(
      "update",
      "Time AdamW on the CPU with registers of every width, beside LibTorch's fused AdamW");
  command
      ->add_option("--millions", options->millions, "Parameters in millions; each takes 22 bytes")
      ->check(CLI::Range(0.001, 1e6).description(""))
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--threads", options->threads, "CPU threads; default: LibTorch's number")
      ->check(CLI::Range(1, 4096).description(""))
      ->type_name("N");
  add_count(*command, "--rounds", options->rounds, "Rounds; the table shows medians", 1, 1000);
  add_json(*command, options->json);
  command->footer(
      "Examples:\n  fsdp bench update --millions 953 --threads 16\n"
      "  fsdp bench update --threads 1 --json");
  command->callback([options, &action] { action = [options] { return run_update(*options); }; });
}

}  // namespace fsdp::bench
