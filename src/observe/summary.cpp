#include "observe/summary.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/format.h"
#include "base/table.h"
#include "observe/throughput.h"

namespace fsdp::observe {
namespace {

struct Part {
  const char* name;
  double seconds;
  int tenths = 0;  // of a percent
};

// Rounds so that the shares add up to 1000 tenths: the remainder of rounding down goes to the parts
// that lost most.
void share_out(std::vector<Part>& parts) {
  double total = 0;
  for (const Part& part : parts) total += part.seconds;
  if (total <= 0) return;
  int left = 1000;
  std::vector<std::pair<double, Part*>> lost;
  for (Part& part : parts) {
    double exact = 1000 * part.seconds / total;
    part.tenths = static_cast<int>(std::floor(exact));
    left -= part.tenths;
    lost.emplace_back(exact - part.tenths, &part);
  }
  std::stable_sort(lost.begin(), lost.end(), [](auto& a, auto& b) { return a.first > b.first; });
  for (int i = 0; i < left; ++i) ++lost[static_cast<size_t>(i)].second->tenths;
}

std::string row(const std::string& name, const std::string& value, bool colour) {
  return formatted("{}  {:<22}{}{}\n", colour ? "\x1b[1m" : "", name, colour ? "\x1b[0m" : "",
                   value);
}

}  // namespace

std::string describe(const RunSummary& run, bool colour) {
  double known = run.compute_s + run.comm_s + run.data_s + run.checkpoint_s + run.evaluation_s;
  // Clocks are read at different times, so the parts may add up to slightly more than the total.
  double total = std::max(run.total_s, known);
  std::vector<Part> parts = {{"compute", run.compute_s},
                             {"exposed communication", run.comm_s},
                             {"data", run.data_s},
                             {"checkpoints", run.checkpoint_s},
                             {"evaluation", run.evaluation_s},
                             {"other", total - known}};
  share_out(parts);

  std::string out = formatted("The run took {}:\n", human_seconds(total));
  for (const Part& part : parts) {
    out += row(part.name,
               formatted("{:10.1f} s  {:3}.{} %", part.seconds, part.tenths / 10, part.tenths % 10),
               colour);
  }
  std::string steps = with_separators(run.steps);
  if (run.skipped > 0)
    steps += formatted(", {} of them skipped (not finite)", with_separators(run.skipped));
  out += row("steps", steps, colour);
  if (run.tokens > 0) {
    double training_s = run.compute_s + run.comm_s + run.data_s;
    std::string text = with_separators(run.tokens);
    if (training_s > 0)
      text += formatted(", {} tokens/s while training",
                        human_count(static_cast<double>(run.tokens) / training_s));
    out += row("tokens", text, colour);
  }
  if (run.tflops) {
    std::string text = formatted("{:.3g} TFLOP/s", *run.tflops);
    if (run.mfu) text += formatted(", {:.1f} % of the device's peak", 100 * *run.mfu);
    out += row("per device", text, colour);
  }
  out += row("peak memory", human_bytes(run.peak_memory_mb * 1024 * 1024) + " (rank 0)", colour);
  if (run.last_loss) {
    std::string text = formatted("{:.4f}", *run.last_loss);
    if (run.first_loss) text = formatted("{:.4f} -> {}", *run.first_loss, text);
    out += row("loss", text, colour);
  }
  if (run.eval_loss) {
    std::string text = formatted("loss {:.4f}", *run.eval_loss);
    if (run.has_perplexity) text += formatted(", perplexity {:.4g}", std::exp(*run.eval_loss));
    out += row("evaluation", text, colour);
  }
  return out;
}

}  // namespace fsdp::observe
