// Times and medians.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/namespace.h"

namespace fsdp::base {

struct Stopwatch {
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
};
double seconds_of(const std::function<void()>& work);
double median(std::vector<double> values);  // the larger of the middle two; 0 if there are none
// The median of `rounds` calls, after `warmup` that don't count.
double median_of(int rounds, int warmup, const std::function<double()>& once);

// Values of several rounds by name, and their medians.
struct Samples {
  std::map<std::string, std::vector<double>> all = {};

  void add(const std::string& name, double value) { all[name].push_back(value); }
  double median(const std::string& name) { return fsdp::median(all[name]); }
  void fill(nlohmann::ordered_json& line) const;  // a field for each name
};

}  // namespace fsdp::base
