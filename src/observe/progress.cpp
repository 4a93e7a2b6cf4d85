#include "observe/progress.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ostream>
#include <vector>

#include "base/format.h"
#include "base/log.h"
#include "observe/loss_history.h"
#include "observe/throughput.h"

namespace fsdp::observe {
namespace {

constexpr double kMostSilence = 15;        // seconds between lines without a terminal
constexpr int64_t kRows = 10;              // of the history in a run whose length is known
constexpr double kMostRowMs = 5 * 60'000;  // of training between two rows

double steady_seconds() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

std::string memory(double mib) {
  return mib >= 1024 ? formatted("{:.1f} GiB", mib / 1024) : formatted("{:.0f} MiB", mib);
}

// "12/350", padded so that all steps of a run are equally long; "12" if its length isn't known.
std::string step_of(int64_t step, int64_t steps) {
  const std::string total = std::to_string(steps);
  return steps > 0 ? formatted("{:>{}}/{}", step, total.size(), total) : std::to_string(step);
}

// A part of the live line. If there isn't room for all, those of low rank are dropped first.
struct Field {
  int rank;
  std::string text;
  const char* colour = "";
};

std::vector<Field> fields(const StepRecord& record, const ProgressOptions& options,
                          std::optional<double> left_s) {
  std::vector<Field> all = {{9, "step " + step_of(record.step, options.steps)}};
  all.push_back({8, formatted("loss {:.4f}", record.loss), "1"});
  if (record.skipped) all.push_back({8, "skipped", "31"});
  if (record.reward_accuracy)
    all.push_back({7, formatted("right {:.0f}%", 100 * *record.reward_accuracy)});
  if (record.grad_norm) all.push_back({3, formatted("norm {:.3g}", *record.grad_norm)});
  all.push_back({4, formatted("lr {:.2e}", record.lr)});
  all.push_back({6, human_count(record.tokens_per_s) + " tok/s"});
  if (record.tflops > 0) all.push_back({1, formatted("{:.3g} TFLOP/s", record.tflops)});
  if (record.mfu) all.push_back({2, formatted("MFU {:.1f}%", 100 * *record.mfu)});
  all.push_back({0, memory(record.memory_mb)});
  if (left_s) all.push_back({7, "ETA " + human_seconds(*left_s), "36"});
  return all;
}

constexpr size_t kGap = 2;
constexpr size_t kLeastBar = 12, kMostBar = 32;  // with its brackets
constexpr int kBarRank = 5;

size_t width_of(const std::vector<Field>& all) {
  size_t width = 0;
  for (const Field& field : all) width += field.text.size() + (width > 0 ? kGap : 0);
  return width;
}

std::string bar(double done, size_t width) {
  size_t inside = width - 2;
  auto full =
      static_cast<size_t>(std::floor(std::clamp(done, 0.0, 1.0) * static_cast<double>(inside)));
  std::string text(full, '=');
  if (full < inside) text += '>';
  text.resize(inside, ' ');
  return "[" + text + "]";
}

std::string painted(const Field& field, bool colour) {
  if (!colour || !*field.colour) return field.text;
  return formatted("\x1b[{}m{}\x1b[0m", field.colour, field.text);
}

}  // namespace

std::string live_line(const StepRecord& record, const ProgressOptions& options,
                      std::optional<double> left_s) {
  // The last column stays free: some terminals start a new line when it is written.
  // The terminal echoes Ctrl-C as "^C" after the line: that must not wrap.
  size_t room = static_cast<size_t>(std::max(options.width - 3, 1));
  auto all = fields(record, options, left_s);
  bool has_bar = options.steps > 0;
  while (width_of(all) + (has_bar ? kGap + kLeastBar : 0) > room) {
    auto least =
        std::min_element(all.begin(), all.end(), [](auto& a, auto& b) { return a.rank < b.rank; });
    if (has_bar && kBarRank < least->rank) {
      has_bar = false;
    } else if (all.size() > 1) {
      all.erase(least);
    } else {
      all[0].text.resize(std::min(all[0].text.size(), room));
      break;
    }
  }
  if (has_bar) {
    size_t width = std::min(kMostBar, room - width_of(all) - kGap);
    double done = static_cast<double>(record.step) / static_cast<double>(options.steps);
    all.insert(all.begin() + 1, {kBarRank, bar(done, width), "32"});
  }
  std::string line;
  for (const Field& field : all)
    line += (line.empty() ? "" : std::string(kGap, ' ')) + painted(field, options.colour);
  return line;
}

std::string plain_line(const StepRecord& record, const ProgressOptions& options,
                       std::optional<double> left_s) {
  std::string step = std::to_string(record.step);
  if (options.steps > 0) step += formatted("/{}", options.steps);
  const size_t widest = options.steps > 0 ? 2 * std::to_string(options.steps).size() + 1 : 7;
  std::string line = formatted("step {:>{}}  loss {:8.4f}", step, widest, record.loss);
  if (record.reward_accuracy) line += formatted("  right {:3.0f}%", 100 * *record.reward_accuracy);
  if (record.grad_norm) line += formatted("  norm {:8.3g}", *record.grad_norm);
  line += formatted("  lr {:.2e}  {:>6} tok/s", record.lr, human_count(record.tokens_per_s));
  if (record.tflops > 0) line += formatted("  {:6.3g} TFLOP/s", record.tflops);
  if (record.mfu) line += formatted("  MFU {:4.1f}%", 100 * *record.mfu);
  line += formatted("  {:>9}", memory(record.memory_mb));
  if (left_s) line += "  ETA " + human_seconds(*left_s);
  if (record.skipped) line += "  skipped";
  return line;
}

Progress::Progress(std::ostream& out, ProgressOptions options)
    : out_(out), options_(std::move(options)) {
  if (!options_.clock) options_.clock = steady_seconds;
}

Progress::~Progress() {
  finish();
}

void Progress::step(const StepRecord& record) {
  last_ = record;
  changed_ = true;
  ++records_;
  // The first step of a process is slow and says nothing about the rest.
  constexpr double kNew = 0.1;
  smooth_ms_ = records_ <= 2 ? record.step_ms : smooth_ms_ + kNew * (record.step_ms - smooth_ms_);
  undrawn_ms_ += record.step_ms;

  bool is_last = options_.steps > 0 && record.step >= options_.steps;
  if (options_.width > 0) {
    add_to_history(record);
    constexpr double kBetween = 50;  // ms: twenty times a second is as fast as people can see
    if (!drawn_ || is_last || undrawn_ms_ >= kBetween) draw();
    return;
  }
  // Another step like this one would be too late for the line that is due every 15 s.
  bool due = options_.clock() - printed_s_ + record.step_ms / 1000 >= kMostSilence;
  if (records_ == 1 || is_last || record.skipped || record.step % options_.every == 0 || due)
    draw();
}

void Progress::evaluation(int64_t step, double loss, std::optional<double> perplexity) {
  if (options_.width > 0) return line(row("eval", step, loss, "33"));
  line(formatted("evaluation after step {}: loss {:.4f}", step, loss) +
       (perplexity ? formatted(", perplexity {:.2f}", *perplexity) : ""));
}

// A row after the first step, and then one for each tenth of the run, or for five minutes of it,
// with the mean loss of the steps since the row before.
void Progress::add_to_history(const StepRecord& record) {
  row_ms_ += record.step_ms;
  if (std::isfinite(record.loss)) row_loss_ += record.loss, ++row_steps_;
  if (row_steps_ == 0) return;
  bool first = !full_loss_;
  int64_t every = std::max<int64_t>(1, (options_.steps + kRows - 1) / kRows);
  bool due = options_.steps > 0 && record.step % every == 0;
  if (!first && !due && row_ms_ < kMostRowMs) return;
  if (first) full_loss_ = record.loss;
  line(row("step", record.step, row_loss_ / static_cast<double>(row_steps_), "36"));
  row_loss_ = row_ms_ = 0;
  row_steps_ = 0;
}

std::string Progress::row(const char* what, int64_t step, double loss, const char* colour) const {
  return history_row(
      formatted("{} {}", what, step_of(step, options_.steps)), loss, full_loss_.value_or(0),
      {.width = options_.width, .unicode = options_.unicode, .colour = options_.colour}, colour);
}

void Progress::draw() {
  std::optional<double> left_s;
  if (options_.steps > 0 && records_ > 1) {
    double steps = static_cast<double>(std::max<int64_t>(options_.steps - last_->step, 0));
    left_s = steps * smooth_ms_ / 1000;
  }
  if (options_.width > 0) {
    out_ << "\r" << live_line(*last_, options_, left_s) << "\x1b[K" << std::flush;
    drawn_ = true;
    log::set_live_line(true);
  } else {
    out_ << plain_line(*last_, options_, left_s) << "\n" << std::flush;
    printed_s_ = options_.clock();
  }
  changed_ = false;
  undrawn_ms_ = 0;
}

void Progress::clear() {
  if (drawn_) out_ << "\r\x1b[K";
  drawn_ = false;
  log::set_live_line(false);
}

void Progress::line(const std::string& text) {
  bool was_drawn = drawn_;
  clear();
  out_ << text << "\n";
  if (was_drawn) draw();
  out_ << std::flush;
}

void Progress::finish() {
  if (!drawn_) return;
  if (changed_) draw();
  out_ << "\n" << std::flush;
  drawn_ = false;
  log::set_live_line(false);
}

}  // namespace fsdp::observe
