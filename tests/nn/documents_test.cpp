// Attention within documents: against the whole matrix of scores in float64.
#include "fsdp/error.h"
#include "nn/testing.h"

namespace fsdp::nn {
namespace {

class Documents : public Layers {};
INSTANTIATE_TEST_SUITE_P(Settings, Documents, ::testing::ValuesIn(settings()), setting_name);

constexpr int64_t kRows = 2, kQueries = 4, kKeys = 2, kDim = 8;

// Documents of these lengths, with an empty one behind the first and two at the end.
at::Tensor starts_of(const std::vector<int64_t>& lengths) {
  std::vector<int32_t> starts = {0};
  for (int64_t length : lengths) starts.push_back(starts.back() + static_cast<int32_t>(length));
  starts.insert(starts.begin() + 1, starts[1]);
  starts.insert(starts.end(), 2, starts.back());
  return at::tensor(starts, at::kInt);
}

// bool [rows, 1, tokens, tokens]
at::Tensor seen_within(const std::vector<int64_t>& lengths, int64_t tokens, int64_t window) {
  std::vector<int64_t> numbers;
  for (size_t i = 0; i < lengths.size(); ++i)
    numbers.insert(numbers.end(), static_cast<size_t>(lengths[i]), static_cast<int64_t>(i));
  at::Tensor number = at::tensor(numbers, at::kLong).view({kRows, 1, tokens});
  at::Tensor distance = at::arange(tokens).unsqueeze(1) - at::arange(tokens);
  at::Tensor near = distance.ge(0).logical_and(distance.lt(window > 0 ? window : tokens));
  return number.unsqueeze(-1).eq(number.unsqueeze(-2)).logical_and(near);
}

at::Tensor whole_matrix(const Tensors& in, const at::Tensor& seen, double scale) {
  at::Tensor k = in[1].repeat_interleave(kQueries / kKeys, 1),
             v = in[2].repeat_interleave(kQueries / kKeys, 1);
  at::Tensor scores = at::matmul(in[0], k.transpose(-1, -2)) * scale;
  scores = scores.masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity());
  return at::matmul(scores.softmax(-1), v);
}

// One document, many, single tokens; windows below, of and above a document's length.
TEST_P(Documents, SeeOnlyThemselves) {
  const std::vector<int64_t> one = {150, 150}, some = {3, 70, 1, 76, 130, 20}, pairs(150, 2);
  for (const std::vector<int64_t>& lengths : {one, some, pairs})
    for (int64_t window : {0, 2, 70, 200}) {
      SCOPED_TRACE(std::to_string(lengths.size()) + " documents, window " + std::to_string(window));
      at::Tensor starts = starts_of(lengths), seen = seen_within(lengths, 150, window);
      compare(
          [&](const Tensors& in) {
            return Tensors{attention(in[0], in[1], in[2],
                                     {.causal = true,
                                      .scale = 0.3,
                                      .window = window,
                                      .documents = starts.to(in[0].device())})};
          },
          [&](const Tensors& in) { return Tensors{whole_matrix(in, seen, 0.3)}; },
          {random({kRows, kQueries, 150, kDim}), random({kRows, kKeys, 150, kDim}),
           random({kRows, kKeys, 150, kDim})});
    }
}

// What isn't needed isn't computed: keys of other documents may be anything, even NaN.
TEST(DocumentBlocks, DoNotReadOtherDocuments) {
  at::Tensor q = at::randn({1, 1, 300, kDim}), keys = q.clone();
  AttentionOptions options{.causal = true, .documents = starts_of({100, 200})};
  at::Tensor expected = attention(q, q, q, options).narrow(2, 100, 200);
  keys.narrow(2, 0, 100).fill_(std::numeric_limits<float>::quiet_NaN());
  at::Tensor out = attention(q, keys, keys, options);
  EXPECT_TRUE(at::equal(out.narrow(2, 100, 200), expected));
  EXPECT_TRUE(out.narrow(2, 0, 100).isnan().all().item<bool>());
}

TEST(DocumentBlocks, ThatCannotBeMeantAreRefused) {
  at::Tensor q = at::randn({2, 1, 8, kDim});
  auto refused = [&](const at::Tensor& starts, bool causal = true, const at::Tensor& mask = {}) {
    try {
      attention(q, q, q, {.causal = causal, .mask = mask, .documents = starts});
      return std::string();
    } catch (const Error& error) {
      return error.message();
    }
  };
  auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_EQ(refused(starts_of({8, 3, 5})), "");
  EXPECT_TRUE(has(refused(starts_of({9, 7})), "a document 0 of 9 tokens from token 0 on"));
  EXPECT_TRUE(has(refused(starts_of({8, 4})), "don't end where the batch does"));
  EXPECT_TRUE(has(refused(starts_of({8, 8}).to(at::kLong)), "aren't an int32"));
  EXPECT_TRUE(has(refused(starts_of({8, 8}), false), "is causal"));
  EXPECT_TRUE(has(refused(starts_of({8, 8}), true, at::ones({8, 8}, at::kBool)), "no mask"));
}

}  // namespace
}  // namespace fsdp::nn
