#include "train/sample.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/nn/functional.h"

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

namespace {

// The logits of the last position: [batch, vocab]. Those of a whole prompt could be gigabytes.
at::Tensor last_logits(models::CausalLMImpl& model, const models::TextInputs& inputs) {
  return nn::linear(model.hidden(inputs).select(1, -1), model.head());
}

}  // namespace

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
    int64_t token = draw(last_logits(model, {.ids = ids, .cache = &cache})[0], options, random);
    if (agree) token = agree(token);
    if (!on_token(token)) break;
    next = {token};
  }
  model.train(was_training);
}

namespace {

// One by one, for models that can't be padded or whose caches have limits.
std::vector<Continuation> generate_each(models::CausalLMImpl& model, at::Device device,
                                        const std::vector<std::vector<int64_t>>& prompts,
                                        SampleOptions options, const std::set<int64_t>& ends) {
  std::vector<Continuation> made;
  for (const auto& prompt : prompts) {
    Continuation& one = made.emplace_back();
    generate(model, device, prompt, options, [&](int64_t token) {
      one.ended = ends.contains(token);
      if (!one.ended) one.tokens.push_back(token);
      return !one.ended;
    });
    ++options.seed;
  }
  return made;
}

// The prompts and which of their tokens are real, with padding before them.
models::TextInputs padded(const std::vector<std::vector<int64_t>>& prompts, at::Device device) {
  size_t longest = 0;
  for (const auto& prompt : prompts) longest = std::max(longest, prompt.size());
  const auto rows = static_cast<int64_t>(prompts.size()), columns = static_cast<int64_t>(longest);
  at::Tensor ids = at::zeros({rows, columns}, at::kLong),
             real = at::zeros({rows, columns}, at::kBool);
  for (int64_t row = 0; row < rows; ++row) {
    const auto& prompt = prompts[static_cast<size_t>(row)];
    const auto tokens = static_cast<int64_t>(prompt.size());
    ids[row].narrow(0, columns - tokens, tokens).copy_(at::tensor(prompt, at::kLong));
    real[row].narrow(0, columns - tokens, tokens).fill_(true);
  }
  return {.ids = ids.to(device), .padding = real.to(device)};
}

}  // namespace

std::vector<Continuation> generate_batch(models::CausalLMImpl& model, at::Device device,
                                         const std::vector<std::vector<int64_t>>& prompts,
                                         const SampleOptions& given, const std::set<int64_t>& ends,
                                         uint64_t first) {
  check(given);
  SampleOptions options = given;
  options.seed += first;
  for (const auto& prompt : prompts)
    if (prompt.empty()) throw Error("a prompt needs at least one token.", "pass some text.");
  if (prompts.size() < 2 || model.max_tokens() > 0 || model.cache_limit() > 0)
    return generate_each(model, device, prompts, options, ends);
  torch::NoGradGuard no_grad;
  WithoutCuDNNAttention plain;
  const bool was_training = model.is_training();
  model.eval();
  std::vector<Continuation> made(prompts.size());
  std::vector<at::Generator> random;
  for (size_t i = 0; i < prompts.size(); ++i)
    random.push_back(at::detail::createCPUGenerator(options.seed + i));
  models::KVCache cache(model.layers());
  models::TextInputs inputs = padded(prompts, device);
  inputs.cache = &cache;
  size_t writing = options.tokens > 0 ? prompts.size() : 0;
  while (writing > 0) {
    const at::Tensor logits = last_logits(model, inputs).cpu();
    std::vector<int64_t> next(prompts.size(), 0);  // of those that are done, anything
    for (size_t i = 0; i < prompts.size(); ++i) {
      Continuation& one = made[i];
      if (one.ended || static_cast<int64_t>(one.tokens.size()) == options.tokens) continue;
      next[i] = draw(logits[static_cast<int64_t>(i)], options, random[i]);
      one.ended = ends.contains(next[i]);
      if (!one.ended) one.tokens.push_back(next[i]);
      if (one.ended || static_cast<int64_t>(one.tokens.size()) == options.tokens) --writing;
    }
    inputs = {.ids = at::tensor(next, at::kLong).unsqueeze(1).to(device), .cache = &cache};
  }
  model.train(was_training);
  return made;
}

}  // namespace fsdp::train
