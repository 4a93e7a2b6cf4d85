// fsdp bench update: AdamW on the CPU with registers of every width that it has, beside LibTorch's.
//
// Masters are stored as beside bfloat16 parameters: split, or whole with a bfloat16 copy.
// LibTorch's fused AdamW has neither; it is timed on float32, and once more with the copy to
// bfloat16 that training would need. All take turns, so that other load on the machine affects
// each.
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <chrono>
#include <iostream>

#include "base/table.h"
#include "bench/benchmarks.h"
#include "bench/flags.h"
#include "bench/workload.h"
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

// The arrays of all cases. Each case overwrites them or leaves them usable.
struct Arrays {
  explicit Arrays(int64_t numel) {
    const auto full = [&](double value, at::ScalarType type) {
      return at::full({numel}, value, at::TensorOptions(type));
    };
    master = full(1, at::kFloat);
    exp_avg = full(0.01, at::kFloat);
    exp_avg_sq = full(0.01, at::kFloat);
    grad = full(0.01, at::kFloat);
    short_grad = full(0.01, at::kBFloat16);
    low = full(1, at::kBFloat16);
    rest = at::zeros({numel}, at::kShort);
    step = at::full({}, 1, at::TensorOptions(at::kFloat));
  }
  at::Tensor master, exp_avg, exp_avg_sq, grad, short_grad, low, rest, step;
};

std::vector<Case> make_cases(const Arrays& arrays) {
  std::vector<Case> cases;
  const kernels::AdamWStep step{.lr = 1e-5, .step = 10};
  for (const int width : kernels::cpu::widths())
    for (const bool split : {true, false})
      for (const bool is_short : {true, false}) {
        kernels::AdamWTensors t{arrays.master, is_short ? arrays.short_grad : arrays.grad,
                                arrays.exp_avg, arrays.exp_avg_sq, arrays.low};
        if (split) t.master = at::Tensor(), t.rest = arrays.rest;
        cases.push_back({split ? "split master" : "master and copy", is_short ? "bf16" : "fp32",
                         width, (split ? 24 : 26) + (is_short ? 2 : 4),
                         [=] { kernels::cpu::adamw(t, step, 1.0f, width); }});
      }
  const auto fused = [&arrays] {
    at::_fused_adamw_({arrays.master}, {arrays.grad}, {arrays.exp_avg}, {arrays.exp_avg_sq}, {},
                      {arrays.step}, 1e-5, 0.9, 0.999, 0.0, 1e-8, false, false);
  };
  cases.push_back({"LibTorch, fused, and copy", "fp32", 0, 34, [=, &arrays] {
                     fused();
                     arrays.low.copy_(arrays.master);
                   }});
  cases.push_back({"LibTorch, fused", "fp32", 0, 28, fused});
  return cases;
}

int run_update(const UpdateOptions& options) {
  const int used = kernels::cpu::width();
  if (options.threads > 0) at::set_num_threads(options.threads);
  const auto numel = static_cast<int64_t>(options.millions * 1e6);
  const Arrays arrays(numel);
  std::vector<Case> cases = make_cases(arrays);
  for (int round = -1; round < options.rounds; ++round)  // the first is warm-up
    for (Case& one : cases) {
      const auto start = std::chrono::steady_clock::now();
      one.work();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      if (round >= 0) one.seconds.push_back(took.count());
    }
  const double bar = median(cases.back().seconds);
  Table table({{"what", "AdamW", Table::kLeft},
               {"gradient", "gradient", Table::kLeft},
               {"width", "register bytes"},
               {"ms", "ms"},
               {"gb_per_s", "GB/s"},
               {"speedup", "x LibTorch"}});
  for (const Case& one : cases) {
    const double seconds = median(one.seconds);
    table.add({text(one.what), text(one.gradient),
               one.width ? Cell{one.width, std::to_string(one.width)} : Cell{nullptr, ""},
               number(1e3 * seconds, 2),
               number(static_cast<double>(one.bytes * numel) / seconds / 1e9, 1),
               number(bar / seconds, 2)});
  }
  table.print(std::cout, options.json);
  if (options.json) return 0;
  std::cout << "\n"
            << with_separators(numel) << " parameters, " << at::get_num_threads()
            << (at::get_num_threads() == 1 ? " thread" : " threads") << "; medians of "
            << options.rounds
            << " rounds. x LibTorch: speed relative to its fused AdamW. Training uses " << used
            << "-byte registers (FSDP_CPU_WIDTH).\n";
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
  command->add_flag("--json", options->json, "One JSON object per line");
  command->footer(
      "Examples:\n  fsdp bench update --millions 953 --threads 16\n"
      "  fsdp bench update --threads 1 --json");
  command->callback([options, &action] { action = [options] { return run_update(*options); }; });
}

}  // namespace fsdp::bench
