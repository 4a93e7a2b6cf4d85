#include "train/sample.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <limits>
#include <string>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::train {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();

void refuse_sample(const std::string& what, const std::string& hint) {
  throw Error(formatted("can't sample with {}.", what), hint);
}

// cuDNN plans its attention again for every length, and the length grows with each token.
class WithoutCuDNNAttention {
 public:
  WithoutCuDNNAttention() : before_(at::globalContext().userEnabledCuDNNSDP()) {
    at::globalContext().setSDPUseCuDNN(false);
  }
  ~WithoutCuDNNAttention() { at::globalContext().setSDPUseCuDNN(before_); }

 private:
  bool before_;
};

}  // namespace

void check(const SampleOptions& options) {
  if (!(options.temperature >= 0) || !std::isfinite(options.temperature))
    refuse_sample(
        formatted("temperature {:f}", options.temperature),
        "pass 0 (always the most likely token) or more; 1 is the model's own distribution.");
  if (options.top_k < 0) refuse_sample(formatted("top-k {}", options.top_k), "0 keeps all tokens.");
  if (!(options.top_p > 0 && options.top_p <= 1))
    refuse_sample(formatted("top-p {:f}", options.top_p),
                  "pass a probability above 0 and at most 1.");
  if (options.tokens < 0) refuse_sample(formatted("{} tokens", options.tokens), "pass 0 or more.");
}

int64_t draw(const at::Tensor& logits, const SampleOptions& options, at::Generator& random) {
  at::Tensor scores = logits.detach().to(at::kCPU, at::kDouble).reshape({-1});
  if (options.temperature == 0) return scores.argmax().item<int64_t>();
  scores = scores / options.temperature;
  if (options.top_k > 0 && options.top_k < scores.numel()) {
    at::Tensor least = std::get<0>(scores.topk(options.top_k)).min();
    scores = scores.masked_fill(scores < least, kNever);
  }
  if (options.top_p < 1) {
    auto [sorted, places] = scores.sort(/*dim=*/-1, /*descending=*/true);
    at::Tensor chances = at::softmax(sorted, -1);
    // The probability before a token decides, so that the most likely token always stays.
    at::Tensor before = chances.cumsum(-1) - chances;
    at::Tensor dropped = places.masked_select(before >= options.top_p);
    scores.index_fill_(0, dropped, kNever);
  }
  at::Tensor chances = at::softmax(scores, -1);
  if (!std::isfinite(chances.sum().item<double>()))
    throw Error("the model's logits aren't finite.",
                "training diverged before this checkpoint: see the losses in metrics.jsonl.");
  return at::multinomial(chances, 1, /*replacement=*/false, random).item<int64_t>();
}

void generate(models::CausalLMImpl& model, at::Device device, std::vector<int64_t> prompt,
              const SampleOptions& options, const std::function<bool(int64_t)>& on_token,
              const std::function<int64_t(int64_t)>& agree) {
  check(options);
  if (prompt.empty()) throw Error("a prompt needs at least one token.", "pass some text.");
  torch::NoGradGuard no_grad;
  WithoutCuDNNAttention plain;
  bool was_training = model.is_training();
  model.eval();
  at::Generator random = at::detail::createCPUGenerator(options.seed);
  models::KVCache cache(model.layers());
  int64_t room = model.max_tokens() > 0 ? model.max_tokens() : std::numeric_limits<int64_t>::max();
  std::vector<int64_t> next = std::move(prompt);
  if (static_cast<int64_t>(next.size()) > room)  // keep its end, which matters most
    next.erase(next.begin(), next.end() - room);
  std::vector<int64_t> seen;  // the tokens in the cache
  const int64_t limit = model.cache_limit();
  for (int64_t made = 0; made < options.tokens && cache.tokens() < room; ++made) {
    const auto all = static_cast<int64_t>(seen.size() + next.size());
    if (limit > 0 && cache.tokens() > 0 && cache.tokens() <= limit && all > limit) {
      cache.reset();
      next.insert(next.begin(), seen.begin(), seen.end());
      seen.clear();
    }
    if (limit > 0) seen.insert(seen.end(), next.begin(), next.end());
    at::Tensor ids = at::tensor(next, at::kLong).unsqueeze(0).to(device);
    at::Tensor logits = model.logits({.ids = ids, .cache = &cache});  // [1, tokens, vocab]
    int64_t token = draw(logits.select(0, 0).select(0, -1), options, random);
    if (agree) token = agree(token);
    if (!on_token(token)) break;
    next = {token};
  }
  model.train(was_training);
}

}  // namespace fsdp::train
