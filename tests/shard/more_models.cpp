#include "shard/more_models.h"

#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformerlayer.h>

#include "fsdp/models.h"

// libtorch_cpu of the aarch64 wheel exports this function compiled with SVE, which kills a process
// on a CPU without SVE when an LSTM is built. This instantiation replaces it.
#ifdef __aarch64__
template void std::vector<at::Tensor>::_M_realloc_insert<at::Tensor&>(
    std::vector<at::Tensor>::iterator, at::Tensor&);
#endif

namespace fsdp::testing {
namespace {

using At = std::vector<int64_t>;  // sizes

at::Tensor parameter(nn::Module& module, const char* name, at::Tensor value) {
  return module.register_parameter(name, value);
}

// Batches of float32 x and y of these sizes.
std::function<Batch(int, int)> regression(At x, At y) {
  return [x, y](int step, int rank) {
    return Batch{step, random_normal(step, rank, 0, x), random_normal(step, rank, 1, y)};
  };
}

// A case whose loss is the mean square of forward(x) - y.
template <typename Holder>
ModelCase regression_case(std::string name, At x, At y, WrapPolicy wrap) {
  auto build = [] {
    Holder model;
    return built(model.ptr(), [model](const Batch& batch) mutable {
      return mean_square(model->forward(batch.x), batch.y);
    });
  };
  return {.name = std::move(name), .build = build, .batch = regression(x, y), .wrap = wrap};
}

// --- a small ResNet with BatchNorm ---

// With bf16 parameters a sharded model casts by itself; the copy it is compared with does it here.
struct Casts {
  bool on = false;

  at::Tensor operator()(nn::Conv2d& conv, const at::Tensor& x) const {
    return conv(on ? x.to(conv->weight.scalar_type()) : x);
  }
  at::Tensor operator()(nn::BatchNorm2d& norm, const at::Tensor& x) const {
    return norm(on ? x.to(norm->weight.scalar_type()) : x);
  }
  at::Tensor operator()(nn::Linear& linear, const at::Tensor& x) const {
    return linear(on ? x.to(linear->weight.scalar_type()) : x);
  }
};

struct ResidualImpl : nn::Module {
  ResidualImpl(int64_t in, int64_t out)
      : first(register_module("first", conv(in, out, 3))),
        second(register_module("second", conv(out, out, 3))),
        first_norm(register_module("first_norm", nn::BatchNorm2d(out))),
        second_norm(register_module("second_norm", nn::BatchNorm2d(out))) {
    if (in != out) shortcut = register_module("shortcut", conv(in, out, 1));
  }

  static nn::Conv2d conv(int64_t in, int64_t out, int64_t kernel) {
    return nn::Conv2d(nn::Conv2dOptions(in, out, kernel).padding(kernel / 2).bias(false));
  }

  at::Tensor forward(at::Tensor x) {
    auto h = run(first_norm, run(first, x)).relu_();
    h = run(second_norm, run(second, h));
    return (h + (shortcut ? run(shortcut, x) : x)).relu_();
  }

  Casts run;
  nn::Conv2d first, second, shortcut{nullptr};
  nn::BatchNorm2d first_norm, second_norm;
};
TORCH_MODULE(Residual);

struct ResNetImpl : nn::Module {
  explicit ResNetImpl(bool casts = false) { run.on = stage1->run.on = stage2->run.on = casts; }

  at::Tensor forward(at::Tensor x) {  // [n, 3, 8, 8]
    x = run(norm, run(stem, x)).relu_();
    return run(head, stage2(stage1(x)).mean({2, 3}));
  }

  Casts run;
  nn::Conv2d stem = register_module("stem", ResidualImpl::conv(3, 6, 3));
  nn::BatchNorm2d norm = register_module("norm", nn::BatchNorm2d(6));
  Residual stage1 = register_module("stage1", Residual(6, 6));
  Residual stage2 = register_module("stage2", Residual(6, 10));
  nn::Linear head = register_module("head", nn::Linear(10, 5));
};
TORCH_MODULE(ResNet);

ModelCase resnet() {
  auto build = [](bool casts) {
    ResNet model(casts);
    return built(model.ptr(), [model](const Batch& batch) mutable {
      return mean_square(model(batch.x), batch.y);
    });
  };
  return {.name = "resnet",
          .build = [build] { return build(false); },
          .build_casting = [build] { return build(true); },
          .batch = regression({4, 3, 8, 8}, {4, 5}),
          .wrap = wrap::modules<Residual>()};
}

// --- an LSTM ---

struct ReaderImpl : nn::Module {
  static constexpr int64_t kVocabulary = 23;

  at::Tensor forward(at::Tensor ids) {  // [batch, tokens]
    return head(std::get<0>(lstm(embedding(ids))));
  }

  nn::Embedding embedding = register_module("embedding", nn::Embedding(kVocabulary, 12));
  nn::LSTM lstm =
      register_module("lstm", nn::LSTM(nn::LSTMOptions(12, 10).num_layers(2).batch_first(true)));
  nn::Linear head = register_module("head", nn::Linear(10, kVocabulary));
};
TORCH_MODULE(Reader);

ModelCase lstm() {
  auto build = [] {
    Reader model;
    return built(model.ptr(), [model](const Batch& batch) mutable {
      return nn::functional::cross_entropy(model(batch.x).flatten(0, 1).to(at::kFloat),
                                           batch.y.flatten());
    });
  };
  auto batch = [](int step, int rank) {
    int64_t below = ReaderImpl::kVocabulary;
    return Batch{step, random_integers(step, rank, 0, below, {2, 5}),
                 random_integers(step, rank, 1, below, {2, 5})};
  };
  return {.name = "lstm", .build = build, .batch = batch, .wrap = wrap::names({"lstm", "head"})};
}

// --- torch's own encoder layers, with dropout ---

struct EncoderImpl : nn::Module {
  EncoderImpl() {
    for (int i = 0; i < 2; ++i) {
      layers->push_back(nn::TransformerEncoderLayer(
          nn::TransformerEncoderLayerOptions(16, 2).dim_feedforward(24).dropout(0.1)));
    }
  }

  at::Tensor forward(at::Tensor x) {  // [tokens, batch, 8]
    x = in(x);
    for (const auto& layer : *layers)
      x = layer->as<nn::TransformerEncoderLayer>()->forward(x, {}, {});
    return out(x);
  }

  nn::Linear in = register_module("in", nn::Linear(8, 16));
  nn::ModuleList layers = register_module("layers", nn::ModuleList());
  nn::Linear out = register_module("out", nn::Linear(16, 3));
};
TORCH_MODULE(Encoder);

// --- the language models of src/models ---

template <typename Model, typename Block, typename Config>
ModelCase language_model(std::string name, Config config,
                         double bf16_tolerance = 2 * kBf16Epsilon) {
  auto build = [config] {
    Model model(config);
    return built(model.ptr(),
                 [model](const Batch& batch) mutable { return model->forward(batch.x, batch.y); });
  };
  auto batch = [vocab = config.vocab](int step, int rank) {
    return Batch{step, random_integers(step, rank, 0, vocab, {2, 7}),
                 random_integers(step, rank, 1, vocab, {2, 7})};
  };
  // In a sharded model adjacent weights are one product, which may sum in another order. The copy
  // rounds each gradient of a tied weight to bf16 and their sum again; our layers sum in float32.
  return {.name = std::move(name),
          .build = build,
          .batch = batch,
          .wrap = wrap::modules<Block>(),
          .tolerance = 4e-6,
          .bf16_tolerance = bf16_tolerance};
}

std::vector<ModelCase> language_models() {
  using namespace models;
  LlamaConfig llama{.vocab = 29, .dim = 16, .layers = 3, .heads = 4, .kv_heads = 2, .ffn = 20};
  LlamaConfig tied = llama;
  tied.tied = true;
  LlamaConfig gemma3 = of_family(Family::kGemma3, tied);
  gemma3.window = 3;
  gemma3.full_every = 2;
  gemma3.local_rope_base = 100;
  GPT2Config gpt2{.vocab = 29, .max_tokens = 9, .dim = 16, .layers = 3, .heads = 4};
  // Norms after attention and feed-forward bring the rounding of small results to full size.
  const double kNormed = 8 * kBf16Epsilon;
  return {language_model<Llama, LlamaBlock>("llama", llama),
          language_model<Llama, LlamaBlock>("llama_tied", tied),
          language_model<Llama, LlamaBlock>("qwen2", qwen2(llama)),
          language_model<Decoder, DecoderBlock>("olmo2", of_family(Family::kOlmo2, llama), kNormed),
          language_model<Decoder, DecoderBlock>("gemma3", gemma3, kNormed),
          language_model<GPT2, GPT2Block>("gpt2", gpt2)};
}

// --- a module called several times in one forward ---

struct ReusedImpl : nn::Module {
  at::Tensor forward(at::Tensor x) {  // [n, 12]
    for (int i = 0; i < 3; ++i) {
      x = shared(x).tanh();
      x = (i % 2 ? left(x) : right(x)).tanh();
    }
    return shared(x);
  }

  nn::Linear shared = register_module("shared", nn::Linear(12, 12));
  nn::Linear left = register_module("left", nn::Linear(12, 12));
  nn::Linear right = register_module("right", nn::Linear(12, 12));
};
TORCH_MODULE(Reused);

// --- branches: which units are used changes from step to step ---

struct BranchesImpl : nn::Module {
  at::Tensor forward(at::Tensor x, int step) {  // [n, 12]
    x = in(x).tanh();
    at::Tensor sum = x;
    if (step % 3 != 1) sum = sum + left->forward(x);
    if (step % 3 != 0) sum = sum + right->forward(x);
    return out(sum);
  }

  nn::Linear in = register_module("in", nn::Linear(12, 12));
  nn::Sequential left =
      register_module("left", nn::Sequential(nn::Linear(12, 20), nn::Linear(20, 12)));
  nn::Sequential right =
      register_module("right", nn::Sequential(nn::Linear(12, 7), nn::Linear(7, 12)));
  nn::Linear out = register_module("out", nn::Linear(12, 5));
};
TORCH_MODULE(Branches);

ModelCase branches() {
  auto build = [] {
    Branches model;
    return built(model.ptr(), [model](const Batch& batch) mutable {
      return mean_square(model->forward(batch.x, batch.step), batch.y);
    });
  };
  // Momentum and decay distinguish a zero gradient from no gradient.
  return {.name = "branches",
          .build = build,
          .batch = regression({4, 12}, {4, 5}),
          .wrap = wrap::names({"left", "right"}),
          .momentum = 0,
          .weight_decay = 0};
}

// --- views of weights kept across other layers ---

struct KeptViewImpl : nn::Module {
  KeptViewImpl() {
    for (int i = 0; i < 5; ++i) middle->push_back(nn::Linear(12, 12));
  }

  at::Tensor forward(at::Tensor x) {  // [n, 12]
    auto transposed = first->weight.t();
    auto half = first->bias.slice(0, 0, 6);
    x = first(x);
    for (const auto& layer : *middle) x = layer->as<nn::Linear>()->forward(x).tanh();
    return x.matmul(transposed).narrow(1, 0, 6) + half;
  }

  nn::Linear first = register_module("first", nn::Linear(12, 12));
  nn::ModuleList middle = register_module("middle", nn::ModuleList());
};
TORCH_MODULE(KeptView);

// --- frozen and LoRA-style parameters in one unit, and a unit that is frozen as a whole ---

struct LoraLinearImpl : nn::Module {
  LoraLinearImpl(int64_t in, int64_t out, int64_t inner)
      : weight(parameter(*this, "weight", at::randn({out, in}) / 4)),
        a(parameter(*this, "a", at::randn({inner, in}) / 4)),
        b(parameter(*this, "b", at::randn({out, inner}) / 4)) {
    weight.set_requires_grad(false);
  }

  at::Tensor forward(at::Tensor x) {
    return at::linear(x, weight) + at::linear(at::linear(x, a), b);
  }

  at::Tensor weight, a, b;
};
TORCH_MODULE(LoraLinear);

struct LoraImpl : nn::Module {
  LoraImpl() {
    for (auto& p : frozen->parameters()) p.set_requires_grad(false);
  }

  at::Tensor forward(at::Tensor x) {  // [n, 10]
    return second(frozen(first(x).tanh()).tanh());
  }

  LoraLinear first = register_module("first", LoraLinear(10, 14, 3));
  nn::Linear frozen = register_module("frozen", nn::Linear(14, 11));
  LoraLinear second = register_module("second", LoraLinear(11, 6, 2));
};
TORCH_MODULE(Lora);

// --- parameters of odd sizes and layouts ---

struct OddImpl : nn::Module {
  OddImpl() {
    at::NoGradGuard no_grad;
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  }

  at::Tensor forward(at::Tensor x) {  // [n, 13]
    x = prime(x).tanh();              // [n, 17]
    x = x * scale + x.mm(few_rows.t()).mm(few_rows) + one_row;
    auto image = x.view({-1, 1, 1, 17}).expand({-1, 3, 3, 17});
    auto seen = conv(image).mean({1, 2, 3});  // [n]
    return x.mm(transposed) + seen.unsqueeze(1) + at::linear(x, empty).sum() + single;
  }

  nn::Linear prime = register_module("prime", nn::Linear(13, 17));
  nn::Conv2d conv = register_module("conv", nn::Conv2d(3, 5, 3));
  at::Tensor few_rows = parameter(*this, "few_rows", at::randn({2, 17}) / 4);
  at::Tensor one_row = parameter(*this, "one_row", at::randn({1, 17}));
  at::Tensor empty = parameter(*this, "empty", at::empty({0, 17}));
  at::Tensor scale = parameter(*this, "scale", at::randn({}));
  at::Tensor single = parameter(*this, "single", at::randn({1}));
  at::Tensor transposed = parameter(*this, "transposed", (at::randn({11, 17}) / 4).t());
};
TORCH_MODULE(Odd);

// --- parameters of three dtypes ---

struct MixedTypesImpl : nn::Module {
  MixedTypesImpl() { low->to(at::kBFloat16); }

  at::Tensor forward(at::Tensor x) {  // [n, 10]
    x = in(x).tanh();
    x = x.to(at::kDouble).mm(wide).tanh().to(at::kFloat);
    x = low(x.to(at::kBFloat16)).to(at::kFloat).tanh();
    return out(x);
  }

  nn::Linear in = register_module("in", nn::Linear(10, 12));
  at::Tensor wide = parameter(*this, "wide", at::randn({12, 12}, at::kDouble) / 4);
  nn::Linear low = register_module("low", nn::Linear(12, 12));
  nn::Linear out = register_module("out", nn::Linear(12, 5));
};
TORCH_MODULE(MixedTypes);

}  // namespace

std::vector<ModelCase> more_model_cases() {
  std::vector<ModelCase> all = {
      resnet(),
      lstm(),
      regression_case<Encoder>("encoder", {5, 2, 8}, {5, 2, 3},
                               wrap::types({"TransformerEncoderLayer"})),
      regression_case<Reused>("reused", {4, 12}, {4, 12}, wrap::modules<nn::Linear>()),
      branches(),
      regression_case<KeptView>("kept_view", {4, 12}, {4, 6}, wrap::modules<nn::Linear>()),
      regression_case<Lora>("lora", {4, 10}, {4, 6}, wrap::names({"first", "frozen", "second"})),
      regression_case<Odd>("odd", {4, 13}, {4, 11}, wrap::names({"prime", "conv"})),
      regression_case<MixedTypes>("mixed_types", {4, 10}, {4, 5}, wrap::names({"low"}))};
  all.back().bf16 = false;
  all.back().tolerance = 1.0 / 128;  // that of its bf16 layer, whose gradients are summed in bf16
  for (auto& model : language_models()) all.push_back(std::move(model));
  return all;
}

}  // namespace fsdp::testing
