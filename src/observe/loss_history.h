// LossHistory: the loss curve of a run in bounded memory, and its plot in text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::observe {

struct PlotOptions {
  int width = 80;        // columns; the plot stays below it
  int height = 10;       // rows of the curve
  bool unicode = false;  // Braille dots and box lines; else ASCII
  bool colour = false;   // SGR colours
};

class LossHistory {
 public:
  // In the order of the steps. Losses that aren't finite are left out.
  void step(int64_t step, double loss);
  void evaluation(int64_t step, double loss);

  // Lines with a title and axes, each ending in "\n". "" if there are too few steps or columns for
  // a curve.
  std::string plot(const PlotOptions& options) const;

 private:
  static constexpr size_t kMost = 1024;  // points; when full, neighbours are merged

  struct Point {
    double step = 0, loss = 0;  // means of `steps` steps
    int64_t steps = 1;
  };
  friend class LossPlot;

  std::vector<Point> training_, evaluations_;
  int64_t per_point_ = 1;  // steps in a complete point
  int64_t evaluated_ = 0, stride_ = 1;
  int64_t first_step_ = 0, last_step_ = 0;
};

// A row for a value: "step  35/350  loss 3.4102  ########", the bar as long as loss / full. No
// wider than options.width - 1; a bar that would be too short is left out. `colour`: SGR code of
// the bar.
std::string history_row(const std::string& title, double loss, double full,
                        const PlotOptions& options, const char* colour);

// Whether the user's locale is UTF-8.
bool locale_is_utf8();

}  // namespace fsdp::observe
