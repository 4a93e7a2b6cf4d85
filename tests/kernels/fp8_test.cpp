// One-byte numbers: rounding, factors, both copies of a matrix, and products, against references in
// float64; the same bits on every device.
#include "kernels/fp8.h"

#include <cmath>
#include <limits>

#include "fsdp/error.h"
#include "kernels/fp8_number.h"
#include "kernels/testing.h"

namespace fsdp::kernels {
namespace {

using fp8::Bytes;
using fp8::Scaling;

constexpr Scaling kScalings[] = {Scaling::kTensorwise, Scaling::kRowwise};

// All finite numbers of a format, as float64.
std::vector<double> numbers(bool e5m2) {
  std::vector<double> all;
  for (int code = 0; code < 256; ++code) {
    const double number = fp8::decode(static_cast<uint8_t>(code), e5m2);
    if (std::isfinite(number)) all.push_back(number);
  }
  return all;
}

at::Tensor restored(const Bytes& bytes) {
  const at::Tensor factors = bytes.factors.cpu().to(at::kDouble);
  return bytes.data.cpu().to(at::kFloat).to(at::kDouble) * factors.view({-1, 1});
}

class Fp8 : public OnDevice {};
FSDP_ON_EVERY_DEVICE(Fp8);

TEST(Fp8Numbers, AreLibTorchs) {
  for (bool e5m2 : {false, true}) {
    const auto type = e5m2 ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn;
    const auto theirs = at::arange(256, at::kByte).view(type).to(at::kFloat);
    for (int code = 0; code < 256; ++code) {
      const float number = fp8::decode(static_cast<uint8_t>(code), e5m2);
      const float expected = theirs[code].item<float>();
      EXPECT_TRUE(std::isnan(expected) ? std::isnan(number) : number == expected) << code;
    }
  }
}

TEST(Fp8Numbers, RoundToTheNearestAndTiesToEven) {
  for (bool e5m2 : {false, true}) {
    const auto all = numbers(e5m2);
    const double largest = *std::max_element(all.begin(), all.end());
    for (size_t i = 0; i + 1 < all.size(); ++i) {
      const double a = all[i], b = all[i + 1];
      if (std::abs(a) > largest / 2 && std::signbit(a) != std::signbit(b)) continue;
      const auto middle = static_cast<float>((a + b) / 2);
      for (const float x :
           {std::nextafter(middle, -INFINITY), middle, std::nextafter(middle, INFINITY)}) {
        const uint8_t code = fp8::encode(x, e5m2);
        const double made = fp8::decode(code, e5m2);
        const double error = std::abs(made - x);
        EXPECT_LE(error, std::min(std::abs(a - x), std::abs(b - x))) << x;
        EXPECT_TRUE(x != middle || a == b || code % 2 == 0) << x;
      }
    }
  }
}

TEST(Fp8Numbers, SaturateAndKeepNan) {
  for (bool e5m2 : {false, true}) {
    const float largest = e5m2 ? 57344.0f : 448.0f;
    for (float x : {largest, largest * 1.01f, largest * 100, INFINITY}) {
      EXPECT_EQ(fp8::decode(fp8::encode(x, e5m2), e5m2), largest);
      EXPECT_EQ(fp8::decode(fp8::encode(-x, e5m2), e5m2), -largest);
    }
    EXPECT_TRUE(std::isnan(fp8::decode(fp8::encode(NAN, e5m2), e5m2)));
    EXPECT_EQ(fp8::encode(-0.0f, e5m2), 0x80);
  }
}

TEST(Fp8Factors, AreTheLargestPowersOfTwoThatKeepTheRange) {
  for (bool e5m2 : {false, true}) {
    const float largest = e5m2 ? 57344.0f : 448.0f;
    for (int exponent = -120; exponent < 127; ++exponent)
      for (float mantissa : {1.0f, 1.5f, 1.75f, 1.7500001f, 1.9999999f}) {
        const float amax = std::ldexp(mantissa, exponent);
        const auto [multiply, restore] = fp8::factors_of(amax, e5m2);
        int unused;
        EXPECT_EQ(std::frexp(multiply, &unused), 0.5f);
        EXPECT_EQ(multiply * restore, 1.0f);
        EXPECT_LE(amax * multiply, largest) << amax;
        EXPECT_TRUE(exponent < -110 || amax * multiply * 2 > largest) << amax;
      }
    EXPECT_EQ(fp8::factors_of(0, e5m2).multiply, 1.0f);
    EXPECT_TRUE(std::isfinite(fp8::factors_of(1e-45f, e5m2).multiply));
    EXPECT_TRUE(std::isnan(fp8::factors_of(INFINITY, e5m2).restore));
    EXPECT_TRUE(std::isnan(fp8::factors_of(NAN, e5m2).restore));
  }
}

TEST_P(Fp8, MagnitudesAreExact) {
  for (auto type : kDtypes)
    for (auto [rows, columns] : {std::pair<int64_t, int64_t>{16, 16}, {144, 272}, {1040, 48}}) {
      const at::Tensor x = random({rows, columns}, type);
      const at::Tensor size = x.cpu().abs().to(at::kFloat);
      const auto one = fp8::amax_of(x, Scaling::kTensorwise, {true, true});
      EXPECT_TRUE(same_bits(one.rows, size.max().view({1})));
      EXPECT_TRUE(same_bits(one.columns, one.rows));
      const auto each = fp8::amax_of(x, Scaling::kRowwise, {true, true});
      EXPECT_TRUE(same_bits(each.rows, std::get<0>(size.max(1))));
      EXPECT_TRUE(same_bits(each.columns, std::get<0>(size.max(0))));
      EXPECT_FALSE(fp8::amax_of(x, Scaling::kRowwise, {.rows = true}).columns.defined());
    }
}

// Half a unit in the last place of three bits of mantissa; below the least normal number, half of
// the least number.
TEST_P(Fp8, CopiesAreWithinHalfAUnit) {
  for (bool e5m2 : {false, true})
    for (Scaling scaling : kScalings)
      for (auto type : kDtypes) {
        const at::Tensor spread = at::pow(10, torch::randn({272, 1}));
        const at::Tensor x = here((torch::randn({272, 144}) * spread).to(type));
        const auto made = fp8::quantise(x, scaling, {true, true}, e5m2);
        for (const auto& [bytes, whole] : {std::pair(made.rows, exact(x).detach()),
                                           std::pair(made.columns, exact(x).detach().t())}) {
          ASSERT_EQ(bytes.data.sizes(), whole.sizes());
          const at::Tensor factors = bytes.factors.cpu().to(at::kDouble).view({-1, 1});
          const double least = std::ldexp(1.0, e5m2 ? -17 : -10);
          const at::Tensor bound =
              at::maximum(whole.abs() * (e5m2 ? 0.125 : 0.0625), factors * least);
          const at::Tensor excess = (restored(bytes) - whole).abs() - bound;
          EXPECT_LE(excess.max().item<double>(), 0) << describe(x);
        }
      }
}

TEST_P(Fp8, EveryDeviceGivesTheBitsOfTheCpu) {
  for (bool e5m2 : {false, true})
    for (Scaling scaling : kScalings)
      for (auto type : kDtypes)
        for (auto wanted : {fp8::Wanted{true, true}, {true, false}, {false, true}}) {
          const at::Tensor x = random({400, 176}, type);
          const auto here = fp8::quantise(x, scaling, wanted, e5m2),
                     cpu = fp8::quantise(x.cpu(), scaling, wanted, e5m2);
          for (auto copy : {&fp8::Quantised::rows, &fp8::Quantised::columns}) {
            ASSERT_EQ((here.*copy).data.defined(), (cpu.*copy).data.defined());
            if (!(here.*copy).data.defined()) continue;
            EXPECT_TRUE(
                same_bits((here.*copy).data.view(at::kByte), (cpu.*copy).data.view(at::kByte)));
            EXPECT_TRUE(same_bits((here.*copy).factors, (cpu.*copy).factors));
          }
        }
}

void expect_same(const fp8::Quantised& made, const fp8::Quantised& expected) {
  for (auto copy : {&fp8::Quantised::rows, &fp8::Quantised::columns}) {
    EXPECT_TRUE(
        same_bits((made.*copy).data.view(at::kByte), (expected.*copy).data.view(at::kByte)));
    EXPECT_TRUE(same_bits((made.*copy).factors, (expected.*copy).factors));
  }
}

TEST_P(Fp8, WhatANormWritesIsQuantisedAsItIsComputed) {
  for (Scaling scaling : kScalings)
    for (auto type : kDtypes)
      for (auto [rows, columns] : {std::pair<int64_t, int64_t>{48, 64}, {144, 2064}, {16, 40000}})
        for (bool adds : {false, true}) {
          const at::Tensor x = random({rows, columns}, type), weight = random({columns}, type);
          const at::Tensor residual = adds ? random({rows, columns}, type) : at::Tensor();
          const Normed normed = rms_norm(x, residual, weight, 1e-5);
          const auto made = fp8::rms_norm(x, residual, weight, 1e-5, scaling);
          EXPECT_TRUE(same_bits(made.rstd, normed.rstd));
          EXPECT_TRUE(same_bits(made.sum, normed.sum));
          EXPECT_TRUE(same_bits(made.amax, fp8::amax_of(normed.out, scaling, {true, false}).rows));
          EXPECT_TRUE(same_bits(
              made.rows.data.view(at::kByte),
              fp8::quantise(normed.out, scaling, {true, false}).rows.data.view(at::kByte)));
          const auto source = fp8::Source::normed(adds ? made.sum : x, made.rstd, weight);
          expect_same(fp8::quantise(source, scaling, {true, true}),
                      fp8::quantise(normed.out, scaling, {true, true}));
        }
}

TEST_P(Fp8, WhatSwigluWritesIsQuantisedAsItIsComputed) {
  for (Scaling scaling : kScalings)
    for (auto type : kDtypes) {
      const at::Tensor gate_up = random({144, 2 * 272}, type);
      expect_same(fp8::quantise(fp8::Source::activated(gate_up), scaling, {true, true}),
                  fp8::quantise(swiglu(gate_up), scaling, {true, true}));
    }
}

at::Tensor amax_of_whole(const at::Tensor& x) {
  return x.cpu().abs().max().to(at::kFloat).view({1});
}

TEST_P(Fp8, KernelsOfGradientsFindTheirMagnitudes) {
  for (auto type : kDtypes) {
    for (auto [rows, width] : {std::pair<int64_t, int64_t>{37, 64}, {3, 7}}) {
      const at::Tensor grad = random({rows, width}, type),
                       gate_up = random({rows, 2 * width}, type);
      const auto made = fp8::swiglu_backward(grad, gate_up);
      EXPECT_TRUE(same_bits(made.result, std::get<0>(swiglu_backward(grad, gate_up, false))));
      EXPECT_TRUE(same_bits(made.amax, amax_of_whole(made.result)));
    }
    for (int64_t width : {16, 6}) {
      const at::Tensor q = random({2, 4, 5, width}, type), k = random({2, 2, 5, width}, type);
      const at::Tensor cos = random({5, width / 2}).repeat({1, 2}), sin = cos * 0.5;
      const auto made = fp8::rope_pack(q, k, k, cos, sin);
      EXPECT_TRUE(same_bits(made.result, rope_pack(q, k, k, cos, sin)));
      EXPECT_TRUE(same_bits(made.amax, amax_of_whole(made.result)));
    }
    for (int64_t width : {64, 2048, 4096, 100}) {
      const at::Tensor x = random({70, width}, type), grad = random({70, width}, type);
      const at::Tensor weight = random({width}, type), rstd = here(torch::rand({70}));
      const auto made = fp8::rms_norm_backward(grad, x, x, rstd, weight, {}, false, true);
      const auto plain = rms_norm_backward(grad, x, x, rstd, weight, {}, false, true);
      EXPECT_TRUE(same_bits(made.x, plain.x));
      EXPECT_TRUE(same_bits(made.out, plain.out));
      EXPECT_TRUE(made.amax.numel() == 0 || same_bits(made.amax, amax_of_whole(made.x)));
      EXPECT_TRUE(made.amax.numel() == 1 || width == 100);
    }
  }
}

TEST_P(Fp8, ZeroAndConstantMatricesAreExact) {
  for (Scaling scaling : kScalings)
    for (double value : {0.0, 1.0, -3.0, 1e-30, 448.0}) {
      const at::Tensor x = zeros({32, 48}, at::kBFloat16).fill_(value);
      const auto made = fp8::quantise(x, scaling, {true, true});
      const double rounded = x.cpu()[0][0].item<double>();
      for (const Bytes& bytes : {made.rows, made.columns}) {
        const at::Tensor numbers = restored(bytes);
        EXPECT_LE((numbers - rounded).abs().max().item<double>(), 0.0625 * std::abs(rounded));
        EXPECT_TRUE((numbers == numbers[0][0]).all().item<bool>());
      }
    }
}

TEST_P(Fp8, ANumberThatIsNotFiniteMakesProductsThatAreNot) {
  for (Scaling scaling : kScalings)
    for (double bad : {HUGE_VAL, -HUGE_VAL, std::nan("")}) {
      at::Tensor x = random({32, 32}, at::kBFloat16);
      x[5][7] = bad;
      const auto made = fp8::quantise(x, scaling, {true, true});
      const auto other = fp8::quantise(random({16, 32}, at::kBFloat16), scaling, {true, true});
      const at::Tensor by_rows = fp8::product(made.rows, other.rows, {}, at::kFloat, true);
      EXPECT_FALSE(by_rows[5].cpu().isfinite().any().item<bool>());
      const auto third = fp8::quantise(random({32, 16}, at::kBFloat16), scaling, {true, true});
      const at::Tensor by_columns = fp8::product(made.columns, third.columns, {}, at::kFloat, true);
      EXPECT_FALSE(by_columns[7].cpu().isfinite().any().item<bool>());
    }
}

TEST_P(Fp8, MagnitudesBeyondTheGivenOnesSaturate) {
  const at::Tensor x = zeros({16, 16}, at::kFloat).fill_(1000);
  const at::Tensor one = zeros({1}).fill_(1);
  const auto made = fp8::cast(x, {one, one});
  EXPECT_TRUE((restored(made.rows) == 1.75).all().item<bool>());  // 448 / 256
  EXPECT_TRUE((restored(made.columns) == 1.75).all().item<bool>());
}

// Products of what was quantised: the rest is rounding of the sum and of the result.
TEST_P(Fp8, ProductsAreThoseOfTheRestoredNumbers) {
  for (Scaling scaling : kScalings)
    for (auto type : {at::kFloat, at::kBFloat16}) {
      const auto a = fp8::quantise(random({64, 160}, type), scaling, {true, true});
      const auto b = fp8::quantise(random({48, 160}, type), scaling, {true, true});
      const at::Tensor expected = restored(a.rows).matmul(restored(b.rows).t());
      const at::Tensor bias = random({48}, type);
      // Tensor cores keep 14 bits of a sum for a while where they may be fast.
      EXPECT_TRUE(near(fp8::product(a.rows, b.rows, {}, type, false), expected, 400));
      EXPECT_TRUE(near(fp8::product(a.rows, b.rows, bias, type, false),
                       expected + bias.cpu().to(at::kDouble), 400));
      const at::Tensor fast = fp8::product(a.rows, b.rows, {}, type, true);
      EXPECT_LE((fast.cpu().to(at::kDouble) - expected).norm().item<double>(),
                0.01 * expected.norm().item<double>());

      const auto g = fp8::quantise(random({160, 64}, type), scaling, {true, true});
      const auto x = fp8::quantise(random({160, 80}, type), scaling, {true, true});
      const at::Tensor sum = restored(g.columns).matmul(restored(x.columns).t());
      for (auto target : {at::kFloat, type}) {
        at::Tensor out = random({64, 80}, target);
        const at::Tensor before = out.cpu().to(at::kDouble);
        fp8::product_into(out, g.columns, x.columns, true);
        EXPECT_TRUE(near(out, before + sum, 400));
        fp8::product_into(out, g.columns, x.columns, false);
        EXPECT_TRUE(near(out, sum, 400));
      }
    }
}

TEST_P(Fp8, ProductsTakePartsOfMatrices) {
  const auto g = fp8::quantise(random({64, 96}, at::kBFloat16), Scaling::kRowwise, {true, true});
  const auto x = fp8::quantise(random({64, 32}, at::kBFloat16), Scaling::kRowwise, {true, true});
  const Bytes part = {g.columns.data.narrow(0, 32, 48), g.columns.factors.narrow(0, 32, 48)};
  at::Tensor wide = zeros({48, 64});
  const at::Tensor out = wide.narrow(1, 16, 32);
  fp8::product_into(out, part, x.columns, false);
  EXPECT_TRUE(near(out, restored(part).matmul(restored(x.columns).t()), 200));
  EXPECT_EQ(wide.cpu().narrow(1, 0, 16).abs().max().item<float>(), 0);
}

TEST_P(Fp8, OneOperandMayBeE5m2) {
  const auto a = fp8::quantise(random({32, 64}), Scaling::kTensorwise, {true, true}, true);
  const auto b = fp8::quantise(random({16, 64}), Scaling::kTensorwise, {true, true});
  EXPECT_TRUE(near(fp8::product(a.rows, b.rows, {}, at::kFloat, false),
                   restored(a.rows).matmul(restored(b.rows).t()), 200));
  EXPECT_THROW(fp8::product(a.rows, a.rows, {}, at::kFloat, false), Error);
}

TEST_P(Fp8, SizesThatDoNotFitAreRefused) {
  EXPECT_THROW(fp8::quantise(random({15, 16}), Scaling::kTensorwise, {true, true}), Error);
  EXPECT_THROW(fp8::quantise(random({16, 24}), Scaling::kTensorwise, {true, true}), Error);
  const auto a = fp8::quantise(random({16, 32}), Scaling::kTensorwise, {true, true});
  const auto b = fp8::quantise(random({16, 32}), Scaling::kRowwise, {true, true});
  EXPECT_THROW(fp8::product(a.rows, b.rows, {}, at::kFloat, false), Error);
  EXPECT_THROW(fp8::product(a.rows, a.columns, {}, at::kFloat, false), Error);
}

TEST_P(Fp8, GiveTheSameBitsAlways) {
  const at::Tensor x = random({528, 272}, at::kBFloat16);
  for (Scaling scaling : kScalings)
    expect_same_bits_always([&]() -> std::vector<at::Tensor> {
      const auto made = fp8::quantise(x, scaling, {true, true});
      return {made.rows.data.view(at::kByte), made.rows.factors, made.columns.data.view(at::kByte),
              made.columns.factors};
    });
}

TEST(Fp8Meta, GivesTheSizesOfRealRuns) {
  for (Scaling scaling : kScalings)
    for (auto wanted : {fp8::Wanted{true, true}, {true, false}, {false, true}}) {
      const at::Tensor x = at::randn({32, 48});
      const auto real = fp8::quantise(x, scaling, wanted),
                 dry = fp8::quantise(x.to(at::kMeta), scaling, wanted);
      for (auto copy : {&fp8::Quantised::rows, &fp8::Quantised::columns}) {
        ASSERT_EQ((real.*copy).data.defined(), (dry.*copy).data.defined());
        if (!(real.*copy).data.defined()) continue;
        EXPECT_EQ((real.*copy).data.sizes(), (dry.*copy).data.sizes());
        EXPECT_EQ((real.*copy).data.scalar_type(), (dry.*copy).data.scalar_type());
        EXPECT_EQ((real.*copy).factors.sizes(), (dry.*copy).factors.sizes());
      }
      if (!wanted.rows) continue;
      EXPECT_EQ(fp8::product(dry.rows, dry.rows, {}, at::kHalf, true).sizes(),
                at::IntArrayRef({32, 32}));
    }
}

}  // namespace
}  // namespace fsdp::kernels
