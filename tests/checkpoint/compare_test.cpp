// compare: differences in names, shapes, dtypes and values, with their size and position.
#include "checkpoint/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "checkpoint/made.h"

namespace fsdp::checkpoint {
namespace {

class Compare : public testing::Test {
 protected:
  // Compares two checkpoints that `a` and `b` fill.
  Comparison compared(const std::function<void(Made&)>& a, const std::function<void(Made&)>& b,
                      const CompareOptions& options = {}) {
    Folder folder;
    for (const auto& [name, fill] : {std::pair{"a", a}, std::pair{"b", b}}) {
      Made made(folder.path / name);
      fill(made);
      made.finish(true);
    }
    Source one(folder.path / "a"), other(folder.path / "b");
    return compare(one, other, options);
  }
  Comparison compared(const at::Tensor& a, const at::Tensor& b,
                      const CompareOptions& options = {}) {
    // Split into different parts, which isn't a difference.
    return compared(
        [&](Made& m) {
          m.tensor({{"model", "x"}}, a, 1);
        },
        [&](Made& m) {
          m.tensor({{"model", "x"}}, b, b.size(0));
        },
        options);
  }
};

TEST_F(Compare, EqualValuesAreEqualHoweverTheyAreSplit) {
  const auto x = at::randn({7, 5});
  const auto found = compared(x, x.clone());
  EXPECT_TRUE(found.differences.empty());
  EXPECT_EQ(found.compared, 1);
  EXPECT_EQ(found.equal, 1);
}

TEST_F(Compare, DifferencesAreCountedAndTheLargestIsLocated) {
  const auto a = at::ones({4, 6, 5});
  auto b = a.clone();
  b[1][2][3] += 0.5;
  b[3][0][4] -= 2;
  b[0][0][0] += 0.25;
  auto found = compared(a, b);
  ASSERT_EQ(found.differences.size(), 1u);
  const auto& difference = found.differences[0];
  EXPECT_EQ(difference.kind, DifferenceKind::kElements);
  EXPECT_EQ(difference.name, "model.x");
  EXPECT_EQ(difference.elements, 120);
  EXPECT_EQ(difference.differing, 3);
  EXPECT_EQ(difference.largest, 2);
  EXPECT_EQ(difference.at, (std::vector<int64_t>{3, 0, 4}));
  EXPECT_NEAR(difference.relative, std::sqrt((0.25 + 4 + 0.0625) / 120), 1e-12);
  found = compared(a, b, {.tolerance = 0.3});
  ASSERT_EQ(found.differences.size(), 1u);
  EXPECT_EQ(found.differences[0].differing, 2);
  EXPECT_TRUE(compared(a, b, {.tolerance = 2}).differences.empty());
}

TEST_F(Compare, PositionsAreRightInTensorsOfSeveralPieces) {
  const auto a = at::zeros({5, 4'000'000});  // 76 MiB
  auto b = a.clone();
  b[4][3'999'998] = -3;
  b[0][1'500'000] = 1;
  const auto found = compared(a, b);
  ASSERT_EQ(found.differences.size(), 1u);
  EXPECT_EQ(found.differences[0].differing, 2);
  EXPECT_EQ(found.differences[0].at, (std::vector<int64_t>{4, 3'999'998}));
  EXPECT_EQ(found.differences[0].largest, 3);
  EXPECT_TRUE(std::isinf(found.differences[0].relative));  // a is zero
}

TEST_F(Compare, NanEqualsNan) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinite = INFINITY;
  const auto a = at::tensor({kNan, kInfinite, 1.0, kNan});
  EXPECT_TRUE(compared(a, at::tensor({kNan, kInfinite, 1.0, kNan})).differences.empty());
  const auto found = compared(a, at::tensor({kNan, kInfinite, 1.5, 2.0}));
  ASSERT_EQ(found.differences.size(), 1u);
  EXPECT_EQ(found.differences[0].differing, 2);
  EXPECT_TRUE(std::isinf(found.differences[0].largest));
  EXPECT_EQ(found.differences[0].at, (std::vector<int64_t>{3}));
}

TEST_F(Compare, EveryDtypeIsCompared) {
  for (auto type :
       {at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort, at::kChar,
        at::kByte, at::kBool, at::kUInt16, at::kFloat8_e4m3fn, at::kComplexFloat}) {
    SCOPED_TRACE(c10::toString(type));
    const auto a = at::zeros({3, 2}), b = at::eye(3).narrow(1, 0, 2);
    const auto found = compared(a.to(type), b.to(type));
    ASSERT_EQ(found.differences.size(), 1u);
    EXPECT_EQ(found.differences[0].differing, 2);
    EXPECT_EQ(found.differences[0].largest, 1);
  }
  // A difference that double can't represent.
  const auto large = at::full({2}, int64_t{1} << 60, at::kLong);
  EXPECT_EQ(compared(large, large + 1).differences.at(0).differing, 2);
}

TEST_F(Compare, DifferentDtypesAreADifferenceUnlessThereIsATolerance) {
  const auto a = at::randn({6, 4}), b = a.to(at::kBFloat16);
  auto found = compared(a, b);
  ASSERT_EQ(found.differences.size(), 1u);
  EXPECT_EQ(found.differences[0].kind, DifferenceKind::kDtype);
  EXPECT_EQ(found.differences[0].b.dtype, at::kBFloat16);
  EXPECT_EQ(found.differences[0].largest, (a - b.to(at::kFloat)).abs().max().item().toDouble());
  EXPECT_TRUE(compared(a, b, {.tolerance = 0.1}).differences.empty());
}

TEST_F(Compare, NamesShapesAndPlainValues) {
  const auto x = at::randn({4, 3});
  const auto found = compared(
      [&](Made& m) {
        m.tensor({{"model", "a"}}, x, 2).tensor({{"model", "shape"}}, x, 2);
        m.value({"extra", "step"}, 1).value({"extra", "same"}, 5);
      },
      [&](Made& m) {
        m.tensor({{"model", "b"}}, x, 2).tensor({{"model", "shape"}}, x.t(), 1);
        m.value({"extra", "step"}, 2).value({"extra", "same"}, 5);
      });
  std::vector<std::pair<std::string, DifferenceKind>> kinds;
  for (const auto& difference : found.differences)
    kinds.emplace_back(difference.name, difference.kind);
  EXPECT_EQ(kinds, (std::vector<std::pair<std::string, DifferenceKind>>{
                       {"extra.step", DifferenceKind::kPlain},
                       {"model.a", DifferenceKind::kOnlyInA},
                       {"model.b", DifferenceKind::kOnlyInB},
                       {"model.shape", DifferenceKind::kShape}}));
  EXPECT_EQ(found.differences[0].a.value, "1");
  EXPECT_EQ(found.differences[0].b.value, "2");
  EXPECT_EQ(found.equal, 1);
}

TEST_F(Compare, ASecondNameOfATensorIsNotADifference) {
  const auto x = at::randn({4, 3});
  const auto tied = [&](Made& m) {
    m.tensor({{"model", "embed"}, {"model", "head"}}, x, 2);
    m.tensor({{"optim", "other"}}, x, 2);
  };
  const auto once = [&](Made& m) { m.tensor({{"model", "embed"}}, x, 4); };
  EXPECT_TRUE(compared(tied, once, {.model_only = true}).differences.empty());
  EXPECT_TRUE(compared(once, tied, {.model_only = true}).differences.empty());
  EXPECT_EQ(compared(tied, once).differences.size(), 1u);
}

}  // namespace
}  // namespace fsdp::checkpoint
