// fsdp bench update: AdamW on the CPU with registers of every width that it has, beside LibTorch's.
//
// Masters are stored as beside bfloat16 parameters: split, or whole with a bfloat16 copy.
// LibTorch's fused AdamW has neither; it is timed on float32, and once more with the copy to
// bfloat16 that training would need. All take turns, so that other load on the machine affects
// each.
#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "bench/harness.h"
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
  Json line;
  int bytes;  // per element, read and written
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
  const kernels::AdamWStep step = {.lr = 1e-5, .step = 10};
  std::vector<Case> cases;
  for (const int width : kernels::cpu::widths())
    for (const bool split : {true, false})
      for (const bool is_short : {true, false}) {
        kernels::AdamWTensors t{master, is_short ? short_grad : grad, exp_avg, exp_avg_sq, low};
        if (split) t.master = at::Tensor(), t.rest = rest;
        const Json line = {{"what", split ? "split master" : "master and copy"},
                           {"gradient", is_short ? "bf16" : "fp32"},
                           {"width", width}};
        cases.push_back({line, (split ? 24 : 26) + (is_short ? 2 : 4),
                         [=] { kernels::cpu::adamw(t, step, 1.0f, width); }});
      }
  for (const bool copies : {true, false}) {
    const kernels::AdamWTensors t{master, grad, exp_avg, exp_avg_sq, copies ? low : at::Tensor()};
    const Json line = {{"what", copies ? "LibTorch, fused, and copy" : "LibTorch, fused"},
                       {"gradient", "fp32"}};
    const auto fused = [=] { kernels::aten::adamw({&t, 1}, {&step, 1}, /*factor=*/{}); };
    cases.push_back({line, copies ? 34 : 28, fused});
  }
  return cases;
}

int run_update(UpdateOptions options) {
  const int used = kernels::cpu::width();
  if (options.threads > 0) at::set_num_threads(options.threads);
  const auto numel = static_cast<int64_t>(options.millions * 1e6);
  std::vector<Case> cases = make_cases(numel);
  for (int round = -1; round < options.rounds; ++round)  // the first is warm-up
    for (Case& one : cases) {
      const double took = seconds_of(one.work);
      if (round >= 0) one.seconds.push_back(took);
    }
  Lines lines;
  for (const Case& one : cases) {
    const double seconds = median(one.seconds);
    Json& line = lines.emplace_back(one.line);
    line["ms"] = 1e3 * seconds;
    line["gb_per_s"] = static_cast<double>(one.bytes * numel) / seconds / 1e9;
    line["speedup"] = median(cases.back().seconds) / seconds;
  }
  return print(
      "what=AdamW; gradient; width=register bytes .0; ms .2; gb_per_s=GB/s .1; "
      "speedup=x LibTorch .2",
      lines,
      {formatted("{} parameters, {}; medians of {} rounds. x LibTorch: speed relative to "
                 "its fused AdamW. Training uses {}-byte registers (FSDP_CPU_WIDTH).",
                 with_separators(numel), count_of(at::get_num_threads(), "thread"), options.rounds,
                 used)},
      options.json);
}

}  // namespace

void add_update(CLI::App& bench, cli::Action& action) {
  auto options = std::make_shared<UpdateOptions>();
  Flags flags(bench, "update",
              "Time AdamW on the CPU with registers of every width, beside LibTorch's fused AdamW",
              options->json,
              "  fsdp bench update --millions 953 --threads 16\n"
              "  fsdp bench update --threads 1 --json");
  flags.number("--millions", options->millions, "Parameters in millions; each takes 22 bytes", 1e-3,
               1e6);
  flags.number("--threads", options->threads, "CPU threads; default: LibTorch's number", 1, 4096)
      ->default_str("");
  flags.number("--rounds", options->rounds, "Rounds; the table shows medians", 1, 1000);
  flags.runs(action, options, run_update);
}

}  // namespace fsdp::bench
