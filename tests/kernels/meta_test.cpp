// Facts about every operator: a dry run on the meta device gives the sizes and dtypes of a real
// run, errors name the tensor that doesn't fit, and no gradient is lost silently.
#include <torch/autograd.h>

#include <map>

#include "fsdp/error.h"
#include "kernels/testing.h"

namespace fsdp::kernels {
namespace {

// The tensors of one case, made on the CPU; they may be moved.
struct Made {
  std::map<std::string, at::Tensor> tensors;
  const at::Tensor& operator[](const std::string& name) const { return tensors.at(name); }
};

Made make(at::ScalarType type) {
  torch::manual_seed(5);
  const auto random = [&](at::IntArrayRef sizes) {
    return torch::randn(sizes, at::kDouble).to(type);
  };
  const auto row = type == at::kDouble ? at::kDouble : at::kFloat;
  Made m;
  m.tensors = {{"x", random({2, 3, 8})},       {"y", random({2, 3, 8})},
               {"half", random({2, 3, 4})},    {"weight", random({8})},
               {"bias", random({8})},          {"gradient", at::zeros({8})},
               {"row", at::ones({2, 3}, row)}, {"cos", at::ones({3, 4})},
               {"sin", at::zeros({3, 4})},     {"q", random({2, 4, 3, 4})},
               {"kv", random({2, 2, 3, 4})},   {"ids", at::randint(8, {2, 3}, at::kLong)},
               {"scale", at::ones({})},        {"table", at::zeros({8, 8})}};
  return m;
}

// Every operator once, with and without its optional arguments.
std::map<std::string, std::vector<at::Tensor>> run_all(const Made& m) {
  std::map<std::string, std::vector<at::Tensor>> results;
  const auto add = [&](const std::string& name, const auto& made) {
    auto& list = results[name];
    std::apply([&](const auto&... each) { (list.push_back(each), ...); }, made);
  };
  const auto norm = [&](const std::string& name, const Normed& made) {
    results[name] = {made.out, made.sum, made.rstd};
    if (made.mean.defined()) results[name].push_back(made.mean);
  };
  const auto grads = [&](const std::string& name, const NormGradients& made) {
    results[name] = {made.x, made.out};
  };
  norm("rms_norm", rms_norm(m["x"], {}, m["weight"], 1e-5));
  norm("rms_norm, residual", rms_norm(m["x"], m["y"], m["weight"], 1e-5));
  norm("layer_norm", layer_norm(m["x"], {}, m["weight"], {}, 1e-5));
  norm("layer_norm, residual", layer_norm(m["x"], m["y"], m["weight"], m["bias"], 1e-5));
  for (bool want : {false, true}) {
    const std::string end = want ? ", out" : "";
    grads("rms_norm_backward" + end,
          rms_norm_backward(m["x"], want ? m["y"] : at::Tensor(), m["y"], m["row"], m["weight"],
                            want ? m["gradient"] : at::Tensor(), false, want));
    grads("layer_norm_backward" + end,
          layer_norm_backward(m["x"], want ? m["y"] : at::Tensor(), m["y"], m["row"], m["row"],
                              m["weight"], m["bias"], want ? m["gradient"] : at::Tensor(),
                              m["gradient"], true, want));
    add("swiglu_backward" + end, swiglu_backward(m["half"], m["x"], want));
    add("gelu_backward" + end, gelu_backward(m["x"], m["y"], want, want));
  }
  rope_(m["x"], m["cos"], m["sin"], 2, false);
  results["rope_pack"] = {rope_pack(m["q"], m["kv"], m["kv"], m["cos"], m["sin"])};
  results["swiglu"] = {swiglu(m["x"])};
  results["gelu"] = {gelu(m["x"], false), gelu(m["x"], true)};
  add("cross_entropy", cross_entropy(m["x"], m["ids"], -100));
  results["cross_entropy_backward"] = {
      cross_entropy_backward(m["row"], m["x"], m["ids"], m["row"], -100)};
  results["cross_entropy_"] = {cross_entropy_(m["y"], m["ids"], m["scale"], -100)};
  embedding_backward(m["x"], m["ids"], m["table"], -1, true);
  fill_random_(m["table"], Distribution::normal(0, 1), 5, 3);
  scale_into(m["half"], m["half"], m["scale"], false);
  return results;
}

TEST(Meta, RunsGiveTheSizesAndDtypesOfRealOnes) {
  for (auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    const Made real = make(type);
    Made meta;
    for (const auto& [name, tensor] : real.tensors) meta.tensors[name] = tensor.to(at::kMeta);
    const auto expected = run_all(real), made = run_all(meta);
    ASSERT_EQ(made.size(), expected.size());
    for (const auto& [name, list] : expected) {
      ASSERT_EQ(made.at(name).size(), list.size()) << name;
      for (size_t i = 0; i < list.size(); ++i) {
        SCOPED_TRACE(name + ", result " + std::to_string(i));
        EXPECT_TRUE(made.at(name)[i].is_meta());
        EXPECT_EQ(describe(made.at(name)[i]), describe(list[i]));
        EXPECT_EQ(made.at(name)[i].strides(), list[i].strides());
      }
    }
  }
}

class OnGpu : public OnDevice {};
INSTANTIATE_TEST_SUITE_P(Devices, OnGpu, ::testing::Values("cuda"),
                         [](const auto& test) { return std::string(test.param); });

TEST_P(OnGpu, ResultsHaveTheSizesAndDtypesOfTheCpus) {
  for (auto type : kDtypes) {
    const Made real = make(type);
    Made moved;
    for (const auto& [name, tensor] : real.tensors) moved.tensors[name] = here(tensor);
    const auto expected = run_all(real), made = run_all(moved);
    for (const auto& [name, list] : expected)
      for (size_t i = 0; i < list.size(); ++i)
        EXPECT_EQ(describe(made.at(name)[i]), describe(list[i])) << name << ", result " << i;
  }
}

// The message of the error that `call` throws.
template <typename Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_FALSE(error.hint().empty());
    return error.message();
  }
  return "no error";
}

TEST(Checks, NameTheOperatorTheTensorAndWhatWasExpected) {
  const auto m = make(at::kFloat);
  const auto x = m["x"], weight = m["weight"];
  EXPECT_EQ(refusal([&] { rms_norm(x, m["half"], weight, 1e-5); }),
            "rms_norm: residual is [2, 3, 4] Float on cpu, expected the same as x, [2, 3, 8] Float "
            "on cpu.");
  EXPECT_EQ(refusal([&] { rms_norm(x, {}, weight.to(at::kHalf), 1e-5); }),
            "rms_norm: weight is [8] Half on cpu, expected 8 elements of Float on cpu.");
  EXPECT_EQ(refusal([&] {
              swiglu(at::ones({2, 3}));
            }),
            "swiglu: gate_up is [2, 3] Float on cpu, expected an even last dimension: the gate, "
            "then up.");
}

TEST(Checks, RefuseWhatDoesNotFit) {
  const auto m = make(at::kFloat);
  const auto x = m["x"], weight = m["weight"], row = m["row"];
  const auto refuses = [](const std::string& begin, const auto& call) {
    const auto message = refusal(call);
    EXPECT_EQ(message.substr(0, begin.size()), begin) << message;
  };
  refuses("rms_norm: x", [&] { rms_norm(x.transpose(1, 2), {}, at::ones({3}), 1e-5); });
  refuses("rms_norm: x", [&] { rms_norm(x.to(at::kInt), {}, weight, 1e-5); });
  refuses("rms_norm: x", [&] { rms_norm(at::ones({3, 0}), {}, at::ones({0}), 1e-5); });
  refuses("rms_norm: eps", [&] { rms_norm(x, {}, weight, -1); });
  refuses("layer_norm: bias", [&] { layer_norm(x, {}, weight, at::ones({7}), 1e-5); });
  refuses("rms_norm_backward: rstd",
          [&] { rms_norm_backward(x, {}, x, at::ones({5}), weight, {}, false, false); });
  refuses("rms_norm_backward: grad_weight",
          [&] { rms_norm_backward(x, {}, x, row, weight, at::ones({9}), false, false); });
  refuses("layer_norm_backward: grad_bias", [&] {
    layer_norm_backward(x, {}, x, row, row, weight, {}, {}, at::ones({8}, at::kLong), false, false);
  });
  refuses("rope_: 3 heads", [&] { rope_(x, m["cos"], m["sin"], 3, false); });
  refuses("rope_: cos", [&] { rope_(x, at::ones({4, 4}), m["sin"], 1, false); });
  refuses("rope_: cos", [&] { rope_(x, at::ones({3, 5}), at::ones({3, 5}), 1, false); });
  refuses("rope_: sin", [&] { rope_(x, m["cos"], at::ones({3, 2}), 1, false); });
  refuses("rope_: x", [&] {
    rope_(at::ones({1, 3, 8}).expand({2, 3, 8}), m["cos"], m["sin"], 1, false);
  });
  refuses("rope_pack: v", [&] { rope_pack(m["q"], m["kv"], m["q"], m["cos"], m["sin"]); });
  refuses("swiglu_backward: grad", [&] { swiglu_backward(x, x, false); });
  refuses("gelu: x", [&] { gelu(x.transpose(0, 1), false); });
  refuses("gelu_backward: grad", [&] { gelu_backward(m["half"], x, false, false); });
  refuses("cross_entropy: targets", [&] { cross_entropy(x, m["ids"].to(at::kInt), -100); });
  refuses("cross_entropy: targets", [&] { cross_entropy(x, at::ones({5}, at::kLong), -100); });
  refuses("cross_entropy: logits", [&] { cross_entropy(at::ones({8, 3}).t(), m["ids"], -100); });
  refuses("cross_entropy_: scale", [&] { cross_entropy_(x, m["ids"], at::ones({2}), -100); });
  refuses("cross_entropy_backward: log_sum",
          [&] { cross_entropy_backward(row, x, m["ids"], at::ones({5}), -100); });
  refuses("embedding_backward: grad_weight", [&] {
    embedding_backward(x, m["ids"], at::ones({8, 7}), -1, false);
  });
  refuses("embedding_backward: ids",
          [&] { embedding_backward(x, at::ones({5}, at::kLong), m["table"], -1, false); });
  refuses("scale_into: target", [&] { scale_into(x, m["half"], {}, false); });
}

TEST(Graph, IsNotRecordedWithoutGradMode) {
  const auto x = torch::randn({3, 8}).requires_grad_();
  const auto weight = torch::ones({8}).requires_grad_();
  torch::NoGradGuard none;
  EXPECT_FALSE(rms_norm(x, {}, weight, 1e-5).out.requires_grad());
}

TEST(Graph, ThatNobodyRecordsIsAnErrorInBackwardAndNotAMissingGradient) {
  const auto x = torch::randn({3, 8}).requires_grad_();
  const auto out = swiglu(x);
  EXPECT_TRUE(out.requires_grad());
  try {
    out.sum().backward();
    ADD_FAILURE() << "no error";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("fsdp::swiglu"), std::string::npos) << error.what();
  }
}

TEST(Graph, KnowsThatATensorWasWrittenInPlace) {
  const auto x = torch::randn({1, 3, 8}).requires_grad_();
  const auto y = x * 2, z = y * y;  // keeps y for backward
  {
    torch::NoGradGuard none;
    rope_(y, at::ones({3, 4}), at::zeros({3, 4}), 2, false);
  }
  EXPECT_THROW(z.sum().backward(), c10::Error);
}

}  // namespace
}  // namespace fsdp::kernels
