// StepTime as text and as JSON, and what to try next.
#include <algorithm>
#include <sstream>

#include "base/format.h"
#include "base/table.h"
#include "observe/step_time.h"

namespace fsdp::observe {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kWorthIt = 0.10;  // of the step, for advice
constexpr double kAttentionHeavy = 0.4;
constexpr double kSlowProducts = 0.4;  // of the peak
constexpr size_t kMostAdvice = 3;
constexpr size_t kShownName = 70;  // characters of a kernel's name in text

std::string as_percent(double share) {
  return formatted("{:.0f} %", 100 * share);
}

Cell share_cell(double ms, double whole) {
  return whole > 0 ? Cell{ms / whole, formatted("{:.1f} %", 100 * ms / whole)} : text("-");
}

std::string printed(const Table& table) {
  std::stringstream out;
  table.print(out, /*json=*/false);
  return out.str();
}

std::string family_table(const StepTime& time, const StepSettings& settings) {
  Table table({{"family", "where the time went", Table::kLeft},
               {"ms", "ms"},
               {"share", "share"},
               {"calls", "calls"},
               {"tflops", "TFLOP/s"}});
  for (const FamilyTime& family : time.families) {
    std::string speed;
    if (family.tflops > 0) speed = formatted("{:.3g}", family.tflops);
    if (family.tflops > 0 && settings.peak_tflops)
      speed += formatted(" of {:.4g} ({})", *settings.peak_tflops,
                         as_percent(family.tflops / *settings.peak_tflops));
    table.add({text(family.name), base::number(family.ms, 3), share_cell(family.ms, time.traced_ms),
               Cell{family.calls, family.calls > 0 ? with_separators(family.calls) : ""},
               Cell{family.tflops, speed}});
  }
  std::string out = printed(table);
  if (time.communication_ms > 0)
    out += formatted("communication: {:.3f} ms, of which {:.3f} ms hidden behind computation\n",
                     time.communication_ms, time.hidden_ms);
  return out;
}

std::string unit_time_table(const StepTime& time) {
  Table table({{"unit", "unit", Table::kLeft},
               {"forward_ms", "forward ms"},
               {"backward_ms", "backward ms"},
               {"update_ms", "update ms"},
               {"exposed_ms", "exposed ms"}});
  auto cell = [](double ms) { return ms > 0 ? base::number(ms, 3) : text("-"); };
  for (const UnitTime& unit : time.units)
    table.add({text(unit.name), cell(unit.forward_ms), cell(unit.backward_ms), cell(unit.update_ms),
               cell(unit.exposed_ms)});
  return printed(table);
}

std::string kernel_table(const StepTime& time) {
  Table table({{"kernel", time.gpu ? "longest kernels" : "longest operators", Table::kLeft},
               {"family", "family", Table::kLeft},
               {"ms", "ms"},
               {"share", "share"},
               {"calls", "calls"}});
  for (const KernelTime& kernel : time.kernels) {
    const bool cut = kernel.name.size() > kShownName;
    table.add({text(cut ? kernel.name.substr(0, kShownName - 3) + "..." : kernel.name),
               text(kernel.family), base::number(kernel.ms, 3),
               share_cell(kernel.ms, time.traced_ms),
               Cell{kernel.calls, with_separators(kernel.calls)}});
  }
  return printed(table);
}

}  // namespace

std::vector<std::string> what_next(const StepTime& time, const StepSettings& settings) {
  std::vector<std::pair<double, std::string>> found;  // by the share of the step that it is about
  auto add = [&](double share, const std::string& line) { found.emplace_back(share, line); };
  const double gaps = time.share("host gaps");
  const double exposed = time.share("communication, exposed");
  if (gaps > kWorthIt && !settings.graphed)
    add(gaps, formatted("The GPU is idle for {} of the step: replay steps as CUDA graphs "
                        "(--train.graph on), or compute more at once (--train.micro_batch).",
                        as_percent(gaps)));
  if (exposed > kWorthIt && settings.hosts > 1 && settings.strategy == "full_shard")
    add(exposed, formatted("{} of the step waits for communication: shard within a host only "
                           "(--shard.strategy hybrid_shard).",
                           as_percent(exposed)));
  else if (exposed > kWorthIt)
    add(exposed, formatted("{} of the step waits for communication: gather further ahead "
                           "(--shard.forward_prefetch 2 --shard.backward_prefetch 2), or compute "
                           "more per gather (--train.micro_batch).",
                           as_percent(exposed)));
  if (exposed > kWorthIt && settings.precision != "fp32" && settings.reduce == "fp32")
    add(exposed / 2, "Gradients are reduced in fp32: --shard.reduce bf16 halves their bytes.");
  const double products = time.share("products"), attention = time.share("attention");
  double tflops = 0;
  for (const FamilyTime& family : time.families) tflops = std::max(tflops, family.tflops);
  if (settings.peak_tflops && tflops > 0 && tflops < kSlowProducts * *settings.peak_tflops &&
      products > kWorthIt)
    add(products,
        formatted("Products reach {} of the peak: larger ones are faster "
                  "(--train.micro_batch, --data.seq){}.",
                  as_percent(tflops / *settings.peak_tflops),
                  settings.precision == "fp32" ? ", and so is --shard.precision bf16" : ""));
  if (attention > kAttentionHeavy)
    add(attention, formatted("Attention takes {} of the step, and grows with the square of "
                             "--data.seq; --data.document_mask true limits it to documents.",
                             as_percent(attention)));
  const double update = time.share("optimizer");
  if (update > 2 * kWorthIt)
    add(update,
        formatted("The optimizer takes {} of the step: more samples per step (--train.batch) "
                  "spread it.",
                  as_percent(update)));
  const double copies = time.share("copies");
  if (copies > kWorthIt)
    add(copies, formatted("Copies take {} of the step: look for casts and .contiguous() in the "
                          "trace; offload (--offload.*) copies, too.",
                          as_percent(copies)));
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  if (found.size() > kMostAdvice) found.resize(kMostAdvice);
  std::vector<std::string> lines;
  for (auto& [share, line] : found) lines.push_back(std::move(line));
  return lines;
}

std::string describe(const StepTime& time, const StepSettings& settings) {
  std::string out =
      formatted("step {} of rank {}, traced: {:.3f} ms", time.step, time.rank, time.traced_ms);
  if (settings.step_ms > 0) out += formatted(" ({:.3f} ms without the tracer)", settings.step_ms);
  out += "\n" + family_table(time, settings) + "\n" + unit_time_table(time) + "\n" +
         kernel_table(time);
  const std::vector<std::string> next = what_next(time, settings);
  if (!next.empty()) out += "\nwhat to try next:\n";
  for (size_t i = 0; i < next.size(); ++i) out += formatted("  {}. {}\n", i + 1, next[i]);
  return out;
}

Json to_json(const StepTime& time, const StepSettings& settings) {
  Json json = {{"step", time.step},           {"rank", time.rank},
               {"world", time.world},         {"gpu", time.gpu ? 1 : 0},
               {"traced_ms", time.traced_ms}, {"step_ms", settings.step_ms},
               {"graphed", settings.graphed}, {"hidden_ms", time.hidden_ms}};
  if (settings.peak_tflops) json["peak_tflops"] = *settings.peak_tflops;
  json["families"] = Json::array();
  for (const FamilyTime& family : time.families)
    json["families"].push_back({{"name", family.name},
                                {"ms", family.ms},
                                {"calls", family.calls},
                                {"tflops", family.tflops}});
  json["units"] = Json::array();
  for (const UnitTime& unit : time.units)
    json["units"].push_back({{"name", unit.name},
                             {"forward_ms", unit.forward_ms},
                             {"backward_ms", unit.backward_ms},
                             {"update_ms", unit.update_ms},
                             {"exposed_ms", unit.exposed_ms}});
  json["kernels"] = Json::array();
  for (const KernelTime& kernel : time.kernels)
    json["kernels"].push_back({{"name", kernel.name},
                               {"family", kernel.family},
                               {"ms", kernel.ms},
                               {"calls", kernel.calls},
                               {"longest_ms", kernel.longest_ms}});
  json["advice"] = what_next(time, settings);
  json["timeline"] = time.timeline;
  return json;
}

}  // namespace fsdp::observe
