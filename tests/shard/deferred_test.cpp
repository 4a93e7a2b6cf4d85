// deferred_init against plain construction with the same seed: every parameter and buffer has the
// same bits, and so has the generator afterwards.
#include "comm/modules.h"
#include "fsdp/deferred_init.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <sstream>

#include "fsdp/error.h"
#include "shard/deferred_oracle.h"

// The aarch64 wheel's own copy uses instructions that not every CPU has; this one replaces it.
template void std::vector<at::Tensor>::_M_realloc_insert<at::Tensor&>(
    std::vector<at::Tensor>::iterator, at::Tensor&);

namespace fsdp::shard {
namespace {

// Builds twice and compares: values in reverse order, values in order, then the tensors themselves,
// which get their memory when they are read.
void expect_same(const std::function<Module()>& build) {
  torch::manual_seed(7);
  Module plain = build();
  Tensor plain_generator = generator_state();
  torch::manual_seed(7);
  Module lazy = deferred_init(build);
  EXPECT_TRUE(torch::equal(plain_generator, generator_state()));

  Tensors expected = tensors_of(*plain), actual = tensors_of(*lazy);
  expect_same_handles(expected, actual);
  for (size_t i = actual.size(); i-- > 0;)
    expect_same_bits(expected[i].second, deferred::value(actual[i].second), actual[i].first);
  for (size_t i = 0; i < actual.size(); ++i)
    expect_same_bits(expected[i].second, deferred::value(actual[i].second), actual[i].first);
  EXPECT_TRUE(torch::equal(plain_generator, generator_state()));
  for (const auto& [name, tensor] : actual) EXPECT_TRUE(deferred::is_deferred(tensor)) << name;
  for (size_t i = 0; i < actual.size(); ++i) {
    expect_same_bits(expected[i].second, actual[i].second, actual[i].first);
    EXPECT_FALSE(deferred::is_deferred(actual[i].second));
    EXPECT_FALSE(has_key(actual[i].second));
  }
}

// A module whose constructor is `build`.
struct Custom : nn::Module {
  explicit Custom(const std::function<void(Custom&)>& build) { build(*this); }
  Tensor parameter(const std::string& name, Tensor tensor, bool requires_grad = true) {
    return register_parameter(name, std::move(tensor), requires_grad);
  }
  Tensor buffer(const std::string& name, Tensor tensor) {
    return register_buffer(name, std::move(tensor));
  }
  using nn::Module::register_module;
};

void expect_same_custom(const std::function<void(Custom&)>& build) {
  expect_same([&] { return std::make_shared<Custom>(build); });
}

// --- LibTorch's modules ---

TEST(DeferredInit, LinearIsTheSame) {
  expect_same([] { return nn::Linear(37, 53).ptr(); });
}
TEST(DeferredInit, ConvolutionIsTheSame) {
  expect_same([] { return nn::Conv2d(nn::Conv2dOptions(6, 8, 3).groups(2)).ptr(); });
}
TEST(DeferredInit, EmbeddingWithAPaddingRowIsTheSame) {
  expect_same([] { return nn::Embedding(nn::EmbeddingOptions(101, 16).padding_idx(3)).ptr(); });
}
TEST(DeferredInit, NormsAndTheirBuffersAreTheSame) {
  expect_same([] {
    return nn::Sequential(nn::LayerNorm(nn::LayerNormOptions({12})), nn::BatchNorm2d(5),
                          nn::GroupNorm(2, 4))
        .ptr();
  });
}
TEST(DeferredInit, RecurrentNetworksAreTheSame) {
  expect_same(
      [] { return nn::LSTM(nn::LSTMOptions(10, 14).num_layers(2).bidirectional(true)).ptr(); });
  expect_same([] { return nn::GRU(9, 7).ptr(); });
}
TEST(DeferredInit, AttentionIsTheSame) {
  expect_same([] { return nn::MultiheadAttention(32, 4).ptr(); });
  expect_same([] {
    return nn::MultiheadAttention(
               nn::MultiheadAttentionOptions(32, 4).kdim(8).vdim(6).add_bias_kv(true))
        .ptr();
  });
}
TEST(DeferredInit, TransformersAreTheSame) {
  expect_same([] { return nn::TransformerEncoder(nn::TransformerEncoderLayer(32, 4), 2).ptr(); });
  expect_same([] {
    return nn::Transformer(
               nn::TransformerOptions(16, 2).num_encoder_layers(2).num_decoder_layers(2))
        .ptr();
  });
}

// --- initialisers ---

TEST(DeferredInit, InitialisersAreTheSame) {
  expect_same_custom([](Custom& m) {
    auto make = [&](const std::string& name, at::IntArrayRef sizes) {
      return m.parameter(name, torch::empty(sizes));
    };
    nn::init::orthogonal_(make("orthogonal", {24, 16}));
    nn::init::orthogonal_(make("wide", {8, 30}), 0.5);
    nn::init::xavier_uniform_(make("xavier_uniform", {20, 10}));
    nn::init::xavier_normal_(make("xavier_normal", {20, 10}));
    nn::init::kaiming_normal_(make("kaiming_normal", {20, 10, 3, 3}));
    nn::init::kaiming_uniform_(make("kaiming_uniform", {20, 10}), std::sqrt(5));
    nn::init::sparse_(make("sparse", {20, 10}), 0.3);
    nn::init::dirac_(make("dirac", {8, 8, 3}));
    nn::init::eye_(make("eye", {9, 7}));
    nn::init::constant_(make("constant", {5}), 0.25);
  });
}

TEST(DeferredInit, EveryRandomOperatorIsTheSame) {
  expect_same_custom([](Custom& m) {
    auto make = [&](const std::string& name) {
      return m.parameter(name, torch::empty({33, 9})).data();
    };
    make("normal").normal_(1, 0.5);
    make("uniform").uniform_(-1, 2);
    make("exponential").exponential_();
    make("geometric").geometric_(0.3);
    make("cauchy").cauchy_();
    make("log_normal").log_normal_();
    make("bernoulli").bernoulli_(0.4);
    make("random").random_(0, 100);
    m.buffer("rand", torch::rand({17}));
    m.buffer("randint", torch::randint(50, {17}));
    m.buffer("randperm", torch::randperm(20));
    m.buffer("normal_of", at::normal(torch::zeros({40}), torch::rand({40})));
    m.buffer("poisson", torch::poisson(torch::rand({200}) * 30));
    m.buffer("multinomial", torch::multinomial(torch::rand({30}), 10));
    m.buffer("like", torch::randn_like(torch::rand({31})));
    m.buffer("dropped", torch::dropout(torch::ones({50}), 0.5, true));
  });
}

TEST(DeferredInit, AGeneratorOfTheUsersOwnGoesOnAsItWould) {
  auto generator = std::make_shared<at::Generator>(at::detail::createCPUGenerator(0));
  auto build = [&] {
    generator->set_current_seed(11);
    return std::make_shared<Custom>([&](Custom& m) {
      m.parameter("a", torch::randn({40}, *generator));
      m.parameter("b", torch::empty({40})).data().normal_(0, 1, *generator);
    });
  };
  expect_same(build);
  auto lazy = deferred_init(build);
  Tensor after = generator->get_state();
  build();
  EXPECT_TRUE(torch::equal(after, generator->get_state()));
}

TEST(DeferredInit, AModelThatInitialisesItselfAgainIsTheSame) {
  expect_same_custom([](Custom& m) {
    m.register_module("block", nn::TransformerEncoderLayer(16, 2));
    m.register_module("embedding", nn::Embedding(31, 16));
    torch::NoGradGuard no_grad;
    for (Tensor& p : m.parameters())
      if (p.dim() > 1)
        p.normal_(0, 0.02);
      else
        p.zero_();
  });
}

TEST(DeferredInit, AParameterFromAnExpressionIsTheSame) {
  expect_same_custom([](Custom& m) {
    m.parameter("scaled", torch::randn({30, 7}) * 0.02);
    m.parameter("log", torch::log(torch::arange(1, 17).to(torch::kFloat)));
    m.parameter("mixed", (torch::rand({8}) + torch::linspace(0, 1, 8)).sqrt_().div_(3));
    m.parameter("truncated",
                torch::empty({50}).uniform_(-0.9, 0.9).erfinv_().mul_(std::sqrt(2.)).clamp_(-2, 2));
  });
}

// --- ways to write ---

TEST(DeferredInit, WritesToPartsAreTheSame) {
  using torch::indexing::Slice;
  expect_same_custom([](Custom& m) {
    torch::NoGradGuard no_grad;
    Tensor w = m.parameter("w", torch::randn({6, 8}));
    w[0].fill_(1);
    w.index_put_({Slice(1, 3), Slice()}, torch::rand({8}));
    w.index_put_({torch::tensor({4, 5}), torch::tensor({0, 1})}, 9.0);
    w.narrow(1, 2, 3).mul_(2);
    w.t()[7].normal_();
    w.index({Slice(), 3}).copy_(w.index({Slice(), 4}));
    w.masked_fill_(w > 1.5, -1);
    w.copy_(w.flip(0));
    w.view({-1}).slice(0, 0, 10).zero_();
  });
}

TEST(DeferredInit, EveryWayRoundAutogradIsTheSame) {
  expect_same_custom([](Custom& m) {
    Tensor a = m.parameter("a", torch::empty({9, 4}));
    a.data().normal_();
    Tensor b = m.parameter("b", torch::zeros({4}));
    b.detach().add_(torch::rand({4}));
    Tensor c = m.parameter("c", torch::empty({3}));
    c.set_data(torch::rand({5}));
    Tensor d = m.parameter("d", torch::rand({3}), /*requires_grad=*/false);
    d.requires_grad_(true);
    d.variable_data().mul_(3);
    Tensor e = m.parameter("e", torch::rand({4, 2}).t());
    e.tensor_data().add_(1);
    m.buffer("f", a.detach().sum(0));
    m.buffer("g", torch::rand({3, 5}).transpose_(0, 1).unsqueeze_(0));
  });
}

TEST(DeferredInit, OperatorsOnListsOfTensorsAreTheSame) {
  expect_same_custom([](Custom& m) {
    Tensor a = torch::rand({5}), b = torch::rand({3, 2});
    torch::_foreach_mul_({a, b}, 0.5);
    torch::_foreach_add_({a, b}, torch::_foreach_neg({a.clone(), b.clone()}), 0.25);
    m.buffer("a", a.clone());
    m.buffer("b", b.clone());
    std::vector<Tensor> parts = torch::rand({6, 4}).chunk(3);
    parts[1].fill_(1);
    m.buffer("part", parts[2]);
    m.buffer("joined", torch::cat(parts, 1));
    auto [values, indices] = torch::rand({4, 9}).sort(1);
    m.buffer("values", values);
    m.buffer("indices", indices);
  });
}

TEST(DeferredInit, ReadsSeeWhatWasThereThen) {
  expect_same_custom([](Custom& m) {
    Tensor w = torch::randn({8});
    m.buffer("before", w.clone());
    Tensor view = w.narrow(0, 2, 4);
    w.add_(1);
    m.buffer("between", view * 2);
    w.normal_();
    m.buffer("after", view + 0);
    m.buffer("w", w);
    m.buffer("view", view);
  });
}

TEST(DeferredInit, TensorsThatGrowAreTheSame) {
  expect_same_custom([](Custom& m) {
    Tensor t = torch::rand({4});
    t.resize_({8}).narrow(0, 4, 4).fill_(2);
    m.buffer("resized", t);
    Tensor out = torch::empty({0});
    torch::arange_out(out, 12);
    m.buffer("out", out);
    Tensor set = torch::empty({0});
    set.set_(t);
    m.buffer("set", set);
  });
}

TEST(DeferredInit, RotaryTablesAreTheSame) {
  expect_same_custom([](Custom& m) {
    Tensor inverse = 1.0 / torch::pow(10000.0, torch::arange(0, 16, 2).to(torch::kFloat) / 16);
    Tensor angles = torch::outer(torch::arange(32).to(torch::kFloat), inverse);
    Tensor twice = torch::cat({angles, angles}, -1);
    m.buffer("cos", twice.cos());
    m.buffer("sin", twice.sin());
    m.buffer("complex", torch::polar(torch::ones_like(angles), angles));
    m.buffer("conjugate",
             torch::conj(torch::polar(torch::ones_like(angles), angles)).resolve_conj());
    m.buffer("mask", torch::full({8, 8}, -INFINITY).triu(1));
    m.buffer("stack", torch::stack({angles, angles * 2}).permute({1, 0, 2}).contiguous());
    m.buffer("einsum", torch::einsum("i,j->ij", {torch::arange(4.), inverse}));
  });
}

TEST(DeferredInit, OperatorsWithoutShapesOnMetaTensorsAreTheSame) {
  expect_same_custom([](Custom& m) {
    Tensor x = torch::randn({50});
    m.buffer("nonzero", torch::nonzero(x > 0));
    m.buffer("selected", x.masked_select(x > 0.5));
    m.buffer("unique", std::get<0>(torch::_unique2(torch::randint(9, {40}))));
    m.buffer("bincount", torch::bincount(torch::randint(9, {40})));
    m.buffer("histogram", torch::histc(x, 10));
  });
}

// Custom operators: one has no meta kernel, the meta kernels of the others are wrong about the
// layout of the result and about the memory it aliases.
Tensor halved(const Tensor& x) {
  return x / 2;
}
Tensor transposed_twice(const Tensor& x) {
  return x.t().contiguous().t();
}
Tensor itself(const Tensor& x) {
  return x;
}
Tensor contiguous_shape(const Tensor& x) {
  return torch::empty(x.sizes(), x.options());
}
TORCH_LIBRARY(deferred_test, library) {
  library.def("halved(Tensor x) -> Tensor");
  library.def("transposed_twice(Tensor x) -> Tensor");
  library.def("itself(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(deferred_test, CPU, library) {
  library.impl("halved", &halved);
  library.impl("transposed_twice", &transposed_twice);
  library.impl("itself", &itself);
}
TORCH_LIBRARY_IMPL(deferred_test, Meta, library) {
  library.impl("transposed_twice", &contiguous_shape);
  library.impl("itself", &contiguous_shape);
}

Tensor call(const char* name, const Tensor& x) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Tensor(const Tensor&)>()
      .call(x);
}

TEST(DeferredInit, OperatorsOfAUsersOwnAreTheSame) {
  expect_same_custom(
      [](Custom& m) { m.buffer("halved", call("deferred_test::halved", torch::rand({5}))); });
  torch::manual_seed(7);
  auto [x, twice, same] = deferred_init([] {
    Tensor x = torch::rand({3, 4});
    Tensor twice = call("deferred_test::transposed_twice", x);
    Tensor same = call("deferred_test::itself", x);
    same.add_(1);
    return std::tuple{x, twice, same + x};
  });
  torch::manual_seed(7);
  Tensor expected = torch::rand({3, 4});
  EXPECT_TRUE(torch::equal(deferred::value(twice), expected));
  EXPECT_TRUE(torch::equal(deferred::value(same), expected + 1 + expected));
  EXPECT_TRUE(torch::equal(deferred::value(x), expected));
}

// --- constants and values in a constructor ---

TEST(DeferredInit, ConstantsFromOutsideAreTheSame) {
  expect_same_custom([](Custom& m) {
    std::vector<float> local{1, 2, 3, 4};
    Tensor blob = torch::from_blob(local.data(), {4});
    m.buffer("added", torch::rand({4}) + blob);
    m.parameter("copied", torch::empty({4})).data().copy_(blob);
    m.buffer("listed", torch::rand({3}) * torch::tensor({1.f, 2.f, 3.f}));
    m.buffer("vector", torch::rand({4}) * torch::tensor(local));
    m.buffer("nested", torch::rand({2, 2}) + torch::tensor({{1, 2}, {3, 4}}));
    m.buffer("scalar", torch::tensor(0.5) + torch::zeros({3}));
    std::ranges::fill(local, 100.f);
  });
}

TEST(DeferredInit, ConstantsHaveTheirMemory) {
  fsdp::DeferredScope scope;
  std::vector<int64_t> values{3, 1, 2};
  Tensor t = torch::tensor(values);
  EXPECT_EQ(t.data_ptr<int64_t>()[2], 2);
  EXPECT_EQ(torch::tensor({1., 2.}).to(torch::kFloat).data_ptr<float>()[1], 2);
  EXPECT_EQ(torch::from_blob(values.data(), {3}, torch::kLong).clone().data_ptr<int64_t>()[0], 3);
  EXPECT_FALSE(deferred::is_deferred(t + 1));
}

TEST(DeferredInit, ValuesReadInAConstructorAreThePlainOnes) {
  expect_same_custom([](Custom& m) {
    Tensor scale = torch::rand({3});
    m.parameter("a", torch::full({4}, scale[1].item<float>()));
    if (scale.sum().item<float>() > 1.0) m.buffer("large", torch::ones({1}));
    if (torch::equal(scale, scale.clone())) m.buffer("equal", torch::rand({2}));
    if (torch::allclose(scale, scale + 1)) m.buffer("close", torch::rand({2}));
    int64_t rows = torch::randint(3, 9, {1}).item<int64_t>();
    m.parameter("rows", torch::rand({rows, 2}));
  });
}

TEST(DeferredInit, WritingToATensorWithMemoryHappensAtOnce) {
  Tensor outside = torch::zeros({4});
  torch::manual_seed(7);
  Tensor inside = deferred_init([&] {
    Tensor t = torch::rand({4});
    outside.copy_(t);
    return t;
  });
  EXPECT_TRUE(deferred::is_deferred(inside));
  torch::manual_seed(7);
  EXPECT_TRUE(torch::equal(outside, torch::rand({4})));
}

TEST(DeferredInit, ATensorFromOutsideThatIsChangedLaterIsAnError) {
  Tensor outside = torch::rand({1 << 16});
  Tensor sum = deferred_init([&] { return torch::ones({1 << 16}) + outside; });
  EXPECT_TRUE(torch::equal(deferred::value(sum), outside + 1));
  outside.add_(1);
  try {
    deferred::value(sum);
    FAIL() << "read a tensor that has changed";
  } catch (const Error& error) {
    EXPECT_NE(error.message().find("aten::add"), std::string::npos) << error.what();
    EXPECT_NE(error.hint().find("clone"), std::string::npos);
  }
}

// --- dtypes, sharing, structure ---

TEST(DeferredInit, AModuleCastInsideIsTheSame) {
  expect_same([] {
    nn::Sequential model(nn::Linear(9, 5), nn::LayerNorm(nn::LayerNormOptions({5})),
                         nn::LSTM(5, 6));
    model->to(torch::kBFloat16);
    return model.ptr();
  });
}

TEST(DeferredInit, TheDefaultDtypeIsThatOfTheConstructor) {
  auto build = [] {
    return std::make_shared<Custom>([](Custom& m) {
      m.register_module("linear", nn::Linear(9, 5));
      m.parameter("w", torch::randn({8}) * 0.5);
      m.buffer("uniform", torch::rand({64}));
      m.buffer("steps", torch::linspace(0, 10, 101));
    });
  };
  torch::set_default_dtype(caffe2::TypeMeta::Make<at::BFloat16>());
  torch::manual_seed(7);
  Tensors expected = tensors_of(*build());
  torch::manual_seed(7);
  Module lazy = deferred_init(build);
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
  Tensors actual = tensors_of(*lazy);
  expect_same_handles(expected, actual);
  for (size_t i = 0; i < actual.size(); ++i)
    expect_same_bits(expected[i].second, deferred::value(actual[i].second), actual[i].first);
  EXPECT_EQ(torch::get_default_dtype(), caffe2::TypeMeta::Make<float>());
}

TEST(DeferredInit, InferenceModeInsideIsTheSame) {
  auto build = [] {
    c10::InferenceMode inference;
    return torch::rand({5}).mul_(2) + torch::arange(5);
  };
  torch::manual_seed(7);
  Tensor plain = build();
  torch::manual_seed(7);
  Tensor lazy = deferred_init(build);
  EXPECT_TRUE(lazy.is_inference());
  EXPECT_TRUE(deferred::is_deferred(lazy));
  EXPECT_TRUE(torch::equal(deferred::value(lazy), plain));
}

TEST(DeferredInit, TensorsThatAreMoreThanAStorageAreMadeAtOnce) {
  torch::manual_seed(7);
  Tensor sparse = deferred_init([] { return torch::rand({3, 3}).to_sparse(); });
  torch::manual_seed(7);
  EXPECT_TRUE(torch::equal(sparse.to_dense(), torch::rand({3, 3})));
  Tensor meta = deferred_init([] { return torch::zeros({2}, torch::kMeta) + 1; });
  EXPECT_TRUE(meta.is_meta());
  EXPECT_FALSE(deferred::is_deferred(meta));
}

TEST(DeferredInit, TiedParametersStayTied) {
  auto build = [](Custom& m) {
    Tensor weight = m.register_module("embedding", nn::Embedding(11, 6))->weight;
    m.parameter("head", weight);
    m.buffer("flat", weight.detach().view({-1}));
  };
  expect_same_custom(build);
  Module lazy = deferred_init([&] { return std::make_shared<Custom>(build); });
  Tensors tensors = tensors_of(*lazy);
  ASSERT_EQ(tensors.size(), 3u);
  EXPECT_TRUE(tensors[0].second.is_same(tensors[1].second));
  {
    torch::NoGradGuard no_grad;
    tensors[0].second.fill_(3);
  }
  EXPECT_FALSE(deferred::is_deferred(tensors[2].second));
  EXPECT_EQ(tensors[2].second.sum().item<float>(), 3 * 66);
}

TEST(DeferredInit, ScopesNest) {
  auto build = [] {
    auto inner = deferred_init([] { return nn::Linear(4, 3); });
    nn::Sequential outer(inner, nn::Linear(3, 2));
    return outer.ptr();
  };
  torch::manual_seed(7);
  Module lazy = deferred_init(build);
  for (const Tensor& p : lazy->parameters()) EXPECT_TRUE(deferred::is_deferred(p));
  torch::manual_seed(7);
  nn::Linear first(4, 3);  // as arguments their order would be unspecified
  nn::Sequential plain(first, nn::Linear(3, 2));
  for (size_t i = 0; i < 4; ++i)
    EXPECT_TRUE(torch::equal(plain->parameters()[i], lazy->parameters()[i]));
}

TEST(DeferredInit, AnExceptionInTheConstructorEndsTheScope) {
  struct Broken : nn::Module {
    Broken() {
      register_module("linear", nn::Linear(3, 3));
      throw std::runtime_error("no such checkpoint");
    }
  };
  EXPECT_THROW(deferred_init([] { return std::make_shared<Broken>(); }), std::runtime_error);
  EXPECT_FALSE(deferred::recording());
  Tensor t = torch::ones({2});
  EXPECT_FALSE(deferred::is_deferred(t));
  EXPECT_EQ(t.data_ptr<float>()[1], 1);
}

TEST(DeferredInit, AWrongCallThrowsWhereItIsMade) {
  fsdp::DeferredScope scope;
  Tensor a = torch::rand({3, 4});
  EXPECT_THROW(a.add_(torch::rand({5})), c10::Error);
  EXPECT_THROW(torch::mm(a, a), c10::Error);
  Tensor leaf = torch::rand({3}).requires_grad_();
  EXPECT_THROW(leaf.normal_(), c10::Error);
}

TEST(DeferredInit, AModuleLoadedInsideHasTheLoadedValues) {
  nn::Linear saved(6, 3);
  std::stringstream file;
  torch::save(saved, file);
  nn::Linear loaded = deferred_init([&] {
    nn::Linear linear(6, 3);
    torch::load(linear, file);
    torch::NoGradGuard no_grad;
    linear->bias.mul_(2);
    return linear;
  });
  EXPECT_TRUE(torch::equal(loaded->weight, saved->weight));
  EXPECT_TRUE(torch::equal(loaded->bias, saved->bias * 2));
}

TEST(DeferredInit, ModulesOnAGpuAreTheSame) {
  comm::find_module("cuda");  // loads LibTorch's CUDA library
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
  expect_same_custom([](Custom& m) {
    m.register_module("linear", nn::Linear(70, 50))->to(torch::kCUDA);
    auto on_gpu = torch::TensorOptions(torch::kCUDA);
    m.parameter("expression", torch::randn({300, 7}, on_gpu) * 0.02);
    m.parameter("filled", torch::empty({40, 30}, on_gpu)).data().normal_(0, 0.02);
    m.parameter("partly", torch::zeros({40, 30}, on_gpu)).data()[3].uniform_();
    m.parameter("orthogonal", nn::init::orthogonal_(torch::empty({16, 16}, on_gpu)));
    m.buffer("permutation", torch::randperm(50, on_gpu));
    m.buffer("table", torch::outer(torch::arange(20, on_gpu), torch::rand({8}, on_gpu)).cos());
    m.buffer("constants", torch::rand({3}, on_gpu) + torch::tensor({1.f, 2.f, 3.f}, on_gpu));
    m.buffer("bf16", torch::rand({9}).to(torch::kCUDA, torch::kBFloat16));
    m.buffer("number", torch::full({4}, torch::rand({2}, on_gpu)[1].item<float>(), on_gpu));
  });
  auto build = [] {
    nn::LSTM lstm(10, 14);
    lstm->to(torch::kCUDA);
    return lstm;
  };
  torch::manual_seed(7);
  nn::LSTM plain = build();
  torch::manual_seed(7);
  nn::LSTM lazy = deferred_init(build);
  for (size_t i = 0; i < plain->parameters().size(); ++i)
    EXPECT_TRUE(torch::equal(plain->parameters()[i], deferred::value(lazy->parameters()[i])));
}

}  // namespace
}  // namespace fsdp::shard
