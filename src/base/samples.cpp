#include "base/samples.h"

#include <algorithm>

namespace fsdp::base {

double seconds_of(const std::function<void()>& work) {
  const Stopwatch watch;
  work();
  return watch.seconds();
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double median_of(int rounds, int warmup, const std::function<double()>& once) {
  std::vector<double> values;
  for (int i = 0; i < warmup; ++i) once();
  for (int i = 0; i < rounds; ++i) values.push_back(once());
  return median(values);
}

void Samples::fill(nlohmann::ordered_json& line) const {
  for (const auto& [name, values] : all) line[name] = fsdp::median(values);
}

}  // namespace fsdp::base
