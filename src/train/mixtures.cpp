#include "train/mixtures.h"

#include <algorithm>

namespace fsdp::train {
namespace {

int64_t numbers_of(const nn::MoEImpl& mixture) {
  return mixture.options().experts + 2;
}

}  // namespace

Mixtures mixtures_of(const torch::nn::Module& module) {
  Mixtures found;
  for (const auto& one : module.modules(/*include_self=*/false))
    if (auto mixture = std::dynamic_pointer_cast<nn::MoEImpl>(one)) found.all.push_back(mixture);
  return found;
}

int64_t Mixtures::numbers() const {
  int64_t sum = 0;
  for (const auto& mixture : all) sum += numbers_of(*mixture);
  return sum;
}

void Mixtures::count_into(const at::Tensor& tally) const {
  int64_t first = 0;
  for (const auto& mixture : all) {
    mixture->tally_into(tally.narrow(0, first, numbers_of(*mixture)));
    first += numbers_of(*mixture);
  }
}

std::function<void(const at::Tensor&)> Mixtures::balance(double rate) const {
  if (rate == 0 || all.empty() || !all.front()->options().biased) return {};
  return [mixtures = all, rate](const at::Tensor& tally) {
    int64_t first = 0;
    for (const auto& mixture : mixtures) {
      mixture->update_bias(tally.narrow(0, first, mixture->options().experts), rate);
      first += numbers_of(*mixture);
    }
  };
}

ExpertFigures figures_of(const Mixtures& mixtures, const std::vector<double>& tally) {
  ExpertFigures figures;
  double entropy = 0, all_tokens = 0;
  auto at = tally.begin();
  for (const auto& mixture : mixtures.all) {
    const nn::MoEOptions& options = mixture->options();
    std::vector<double> load(at, at + options.experts);
    at += options.experts;
    entropy += *at++;
    const double tokens = *at++, choices = tokens * static_cast<double>(options.route.top_k);
    all_tokens += tokens;
    figures.dropped += choices;
    for (double& one : load) {
      figures.dropped -= one;
      one *= static_cast<double>(options.experts) / std::max(1.0, choices);
    }
    const auto [least, most] = std::minmax_element(load.begin(), load.end());
    figures.least = figures.load.empty() ? *least : std::min(figures.least, *least);
    figures.most = std::max(figures.most, *most);
    figures.load.push_back(std::move(load));
  }
  figures.entropy = entropy / std::max(1.0, all_tokens);
  return figures;
}

}  // namespace fsdp::train
