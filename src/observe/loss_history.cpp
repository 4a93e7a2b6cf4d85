#include "observe/loss_history.h"

#include <langinfo.h>
#include <locale.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/format.h"

namespace fsdp::observe {
namespace {

constexpr size_t kLeastPoints = 8;
constexpr int kLabel = 9, kLeastColumns = 16, kMostColumns = 72;  // the label includes the axis

std::string in_colour(const std::string& text, const char* colour, bool on) {
  return on && *colour ? formatted("\x1b[{}m{}\x1b[0m", colour, text) : text;
}

std::string utf8_of(char32_t code) {  // U+0800 to U+FFFF
  return {static_cast<char>(0xE0 | code >> 12), static_cast<char>(0x80 | (code >> 6 & 0x3F)),
          static_cast<char>(0x80 | (code & 0x3F))};
}

}  // namespace

// The curve on a grid of dots. A cell of the terminal is 2 by 4 dots with Braille, else one.
class LossPlot {
 public:
  LossPlot(const LossHistory& history, const PlotOptions& options)
      : history_(history),
        options_(options),
        columns_(std::min(options.width - 1 - kLabel, kMostColumns)),
        dots_wide_(options.unicode ? 2 : 1),
        dots_high_(options.unicode ? 4 : 1),
        on_(static_cast<size_t>(columns_ * dots_wide_ * options.height * dots_high_)),
        marks_(static_cast<size_t>(columns_ * options.height)) {
    std::vector<double> losses = curve();
    auto widen = [&](double loss) { low_ = std::min(low_, loss), high_ = std::max(high_, loss); };
    for (double loss : losses) widen(loss);
    for (const auto& point : history.evaluations_) widen(point.loss);
    draw(losses);
    for (const auto& point : history.evaluations_)
      marks_[cell(x_of(point.step) / dots_wide_, y_of(point.loss) / dots_high_)] = true;
  }

  std::string text() const {
    std::string out = title();
    for (int row = 0; row < options_.height; ++row) {
      out += label(row);
      size_t bare = out.size();
      for (int column = 0; column < columns_; ++column) out += shown(row, column);
      size_t end = out.find_last_not_of(' ');
      out.resize(std::max(bare, end + 1));
      out += "\n";
    }
    return out + axis();
  }

 private:
  size_t cell(int column, int row) const { return static_cast<size_t>(row * columns_ + column); }
  size_t dot(int x, int y) const { return static_cast<size_t>(y * columns_ * dots_wide_ + x); }

  int x_of(double step) const {
    double all = std::max(1.0, double(history_.last_step_ - history_.first_step_));
    double share = (step - double(history_.first_step_)) / all;
    return std::clamp(static_cast<int>(share * (columns_ * dots_wide_ - 1) + 0.5), 0,
                      columns_ * dots_wide_ - 1);
  }
  int y_of(double loss) const {
    double share = high_ > low_ ? (high_ - loss) / (high_ - low_) : 0.5;
    return std::clamp(static_cast<int>(share * (options_.height * dots_high_ - 1) + 0.5), 0,
                      options_.height * dots_high_ - 1);
  }

  // The mean loss at each x, linear between points.
  std::vector<double> curve() const {
    const auto& points = history_.training_;
    std::vector<double> losses;
    size_t next = 0;
    for (int x = 0; x < columns_ * dots_wide_; ++x) {
      double sum = 0;
      int count = 0;
      for (; next < points.size() && x_of(points[next].step) <= x; ++next, ++count)
        sum += points[next].loss;
      double loss = count > 0 ? sum / count : points[std::max<size_t>(next, 1) - 1].loss;
      if (count == 0 && next > 0 && next < points.size()) {
        double from = x_of(points[next - 1].step), to = x_of(points[next].step);
        loss += (points[next].loss - loss) * (x - from) / (to - from);
      }
      losses.push_back(loss);
    }
    return losses;
  }

  void draw(const std::vector<double>& losses) {
    int last = y_of(losses.front());
    for (size_t x = 0; x < losses.size(); ++x) {
      int y = y_of(losses[x]);
      int from = std::min(y, last + (y > last)), to = std::max(y, last - (y < last));
      for (int dots = from; dots <= to; ++dots)  // a vertical line where the curve jumps
        on_[dot(static_cast<int>(x), dots)] = true;
      last = y;
    }
  }

  std::string shown(int row, int column) const {
    if (marks_[cell(column, row)]) return in_colour("o", "33", options_.colour);
    if (!options_.unicode) return on_[dot(column, row)] ? "*" : " ";
    static constexpr int kBits[4][2] = {{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
    char32_t code = 0x2800;
    for (int y = 0; y < 4; ++y)
      for (int x = 0; x < 2; ++x)
        if (on_[dot(2 * column + x, 4 * row + y)]) code += kBits[y][x];
    return code == 0x2800 ? " " : in_colour(utf8_of(code), "36", options_.colour);
  }

  std::string title() const {
    std::string curve = options_.unicode ? utf8_of(0x28FF) : "*";
    return formatted("Loss ({} training{}):\n", in_colour(curve, "36", options_.colour),
                     history_.evaluations_.empty()
                         ? ""
                         : formatted(", {} evaluation", in_colour("o", "33", options_.colour)));
  }

  std::string label(int row) const {
    const bool last = row == options_.height - 1, labelled = row == 0 || last;
    std::string number = labelled ? formatted("{:.4g}", last ? low_ : high_) : "";
    return formatted("{:>7.7} {}", number, options_.unicode ? labelled ? "┤" : "│" : "|");
  }

  std::string axis() const {
    std::string line = std::string(kLabel - 1, ' ') + (options_.unicode ? "└" : "+");
    for (int i = 0; i < columns_; ++i) line += options_.unicode ? "─" : "-";
    std::string from = formatted("step {}", history_.first_step_);
    std::string to = formatted("{}", history_.last_step_);
    int gap = std::max(1, columns_ - static_cast<int>(from.size() + to.size()));
    return formatted("{}\n{:{}}{}{:{}}{}\n", line, "", kLabel, from, "", gap, to);
  }

  const LossHistory& history_;
  PlotOptions options_;
  int columns_, dots_wide_, dots_high_;
  std::vector<bool> on_;     // dots of the curve
  std::vector<bool> marks_;  // cells with an evaluation
  double low_ = std::numeric_limits<double>::infinity(), high_ = -low_;
};

void LossHistory::step(int64_t step, double loss) {
  if (!std::isfinite(loss)) return;
  if (training_.empty()) first_step_ = step;
  last_step_ = step;
  if (!training_.empty() && training_.back().steps < per_point_) {
    Point& point = training_.back();
    ++point.steps;
    point.loss += (loss - point.loss) / static_cast<double>(point.steps);
    point.step += (static_cast<double>(step) - point.step) / static_cast<double>(point.steps);
    return;
  }
  if (training_.size() == kMost) {
    for (size_t i = 0; i < kMost / 2; ++i) {  // all are complete: each is `per_point_` steps
      const Point &a = training_[2 * i], &b = training_[2 * i + 1];
      training_[i] = {(a.step + b.step) / 2, (a.loss + b.loss) / 2, a.steps + b.steps};
    }
    training_.resize(kMost / 2);
    per_point_ *= 2;
  }
  training_.push_back({static_cast<double>(step), loss});
}

void LossHistory::evaluation(int64_t step, double loss) {
  if (!std::isfinite(loss)) return;
  // Of many evaluations one in `stride_` is kept, and the last.
  if (evaluated_ % stride_ != 0) evaluations_.pop_back();
  if (evaluations_.size() == kMost) {
    for (size_t i = 0; i < kMost / 2; ++i) evaluations_[i] = evaluations_[2 * i + 1];
    evaluations_.resize(kMost / 2);
    stride_ *= 2;
  }
  evaluations_.push_back({static_cast<double>(step), loss});
  ++evaluated_;
}

std::string LossHistory::plot(const PlotOptions& options) const {
  if (training_.size() < kLeastPoints || options.width - 1 - kLabel < kLeastColumns) return "";
  return LossPlot(*this, options).text();
}

std::string history_row(const std::string& title, double loss, double full,
                        const PlotOptions& options, const char* colour) {
  constexpr int kMostBar = 48, kLeastBar = 8;
  std::string row = formatted("{}  loss {:.4f}", title, loss);
  int room = options.width - 1;
  int bar = std::min(room - static_cast<int>(row.size()) - 2, kMostBar);
  if (bar >= kLeastBar && std::isfinite(loss) && full > 0) {
    auto length = static_cast<int>(std::clamp(loss / full, 0.0, 1.0) * bar + 0.5);
    std::string blocks;
    for (int i = 0; i < length; ++i) blocks += options.unicode ? "█" : "#";
    if (length > 0) row += "  " + in_colour(blocks, colour, options.colour);
    return row;
  }
  row.resize(std::min(row.size(), static_cast<size_t>(std::max(room, 1))));
  return row;
}

bool locale_is_utf8() {
  locale_t locale = newlocale(LC_CTYPE_MASK, "", nullptr);
  if (!locale) return false;
  bool utf8 = std::string(nl_langinfo_l(CODESET, locale)) == "UTF-8";
  freelocale(locale);
  return utf8;
}

}  // namespace fsdp::observe
