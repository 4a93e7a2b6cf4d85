// An embedding's gradient against a sum in float64.
#include "fsdp/error.h"
#include "kernels/testing.h"

namespace fsdp::kernels {
namespace {

class Embedding : public OnDevice {
 protected:
  // Runs one case; grad_weight starts with random values.
  void expect_right(const at::Tensor& grad, const at::Tensor& ids, int64_t vocab,
                    at::ScalarType type, int64_t padding, bool accumulate) {
    const int64_t dim = grad.size(-1);
    const auto weight = random({vocab, dim}, type);
    auto expected = accumulate ? exact(weight).detach() : at::zeros({vocab, dim}, at::kDouble);
    const auto flat = ids.flatten().cpu();
    const auto kept = flat == padding;
    const auto rows = exact(grad).detach().reshape({-1, dim});
    expected.index_add_(0, flat, rows.masked_fill(kept.unsqueeze(-1), 0));
    embedding_backward(grad, ids, weight, padding, accumulate);
    EXPECT_TRUE(near(weight, expected, 8));
  }
};
FSDP_ON_EVERY_DEVICE(Embedding);

TEST_P(Embedding, GradientIsRightForEveryShapeAndDtype) {
  struct Size {
    int64_t rows, vocab, dim;
  };
  for (auto type : kDtypes)
    for (auto gradient : kDtypes)
      for (bool accumulate : {false, true})
        for (const auto& s : {Size{0, 4, 8}, Size{1, 1, 1}, Size{5, 3, 7}, Size{64, 1000, 33},
                              Size{300, 7, 128}, Size{100, 50, 1030}}) {
          SCOPED_TRACE(::testing::Message() << type << " into " << gradient << " " << s.rows << " "
                                            << s.vocab << " " << s.dim << " " << accumulate);
          expect_right(random({s.rows, s.dim}, type), integers(s.vocab, {s.rows}), s.vocab,
                       gradient, -1, accumulate);
        }
}

TEST_P(Embedding, LeavesPaddingOut) {
  for (bool accumulate : {false, true})
    expect_right(random({90, 16}), integers(6, {90}), 6, at::kFloat, 3, accumulate);
}

TEST_P(Embedding, AddsManyRowsOfOneId) {
  for (bool accumulate : {false, true})
    expect_right(random({700, 24}), here(at::full({700}, 2, at::kLong)), 5, at::kFloat, -1,
                 accumulate);
}

TEST_P(Embedding, TakesRowsOfAnyLeadingDimensionsAndMemoryThatIsNotAligned) {
  for (auto type : kDtypes)
    expect_right(unaligned(random({3, 5, 64}, type)), integers(9, {3, 5}), 9, type, -1, false);
}

TEST_P(Embedding, GivesTheSameBitsAlways) {
  for (auto type : kDtypes) {
    const auto grad = random({2000, 72}, type);
    const auto ids = integers(50, {2000});
    expect_same_bits_always([&]() -> std::vector<at::Tensor> {
      const auto written = zeros({50, 72}, type), added = here(at::ones({50, 72}, type));
      embedding_backward(grad, ids, written, -1, false);
      embedding_backward(grad, ids, added, -1, true);
      return {written, added};
    });
  }
}

TEST(EmbeddingOnCpu, RefusesAnIdOutsideOfTheVocabulary) {
  const auto weight = at::zeros({4, 2});
  for (int64_t id : {-1, 4}) {
    try {
      embedding_backward(at::ones({3, 2}), at::tensor({int64_t{1}, id, int64_t{2}}, at::kLong),
                         weight, -1, false);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_NE(error.message().find("ids[1] is " + std::to_string(id)), std::string::npos)
          << error.what();
    }
  }
}

}  // namespace
}  // namespace fsdp::kernels
