// Where the time of a step went, from traces that are made up: every instant counts once, kernels
// find their families and units, and what is exposed is told from what is hidden.
#include "observe/step_time.h"

#include <gtest/gtest.h>

#include <map>

#include "observe/intervals.h"

namespace fsdp::observe {
namespace {

constexpr int64_t kMs = 1'000'000;

TEST(Families, NamesOfKernelsAndOperators) {
  const std::map<std::string, Family> names = {
      {"nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", Family::kProducts},
      {"sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", Family::kProducts},
      {"void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>(Params)", Family::kProducts},
      {"aten::mm", Family::kProducts},
      {"void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", Family::kAttention},
      {"cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", Family::kAttention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", Family::kAttention},
      {"ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Family::kCommunication},
      {"void fsdp::kernels::cuda::(anonymous namespace)::forward_kernel<true>(NormForward)",
       Family::kNorms},
      {"void fsdp::kernels::cuda::(anonymous namespace)::cross_entropy_kernel(CrossEntropy)",
       Family::kLoss},
      {"void fsdp::kernels::cuda::(anonymous namespace)::update<AdamW, Split>(List<Shared>)",
       Family::kOptimizer},
      {"void fsdp::kernels::cuda::(anonymous namespace)::swiglu_kernel<c10::BFloat16>",
       Family::kElementwise},
      {"void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
       Family::kElementwise},
      {"void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
       Family::kCopies},
      {"void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", Family::kCopies},
      {"Memcpy HtoD (Pinned -> Device)", Family::kCopies},
      {"fsdp::rms_norm_backward", Family::kNorms},
      {"fsdp::cross_entropy", Family::kLoss},
      {"aten::log_softmax", Family::kLoss},
      {"aten::mul_", Family::kElementwise},
      {"aten::empty", Family::kOther},
      {"a kernel of tomorrow", Family::kOther}};
  for (const auto& [name, family] : names)
    EXPECT_STREQ(family_name(family_of(name)), family_name(family)) << name;
}

TEST(TimeIntervals, UnionsDifferencesAndCuts) {
  const Intervals all = united({{5, 7}, {1, 3}, {2, 4}, {4, 5}, {9, 9}});
  EXPECT_EQ(all, (Intervals{{1, 7}}));
  EXPECT_EQ(without({{0, 10}}, {{2, 3}, {5, 6}, {9, 12}}), (Intervals{{0, 2}, {3, 5}, {6, 9}}));
  EXPECT_EQ(without({{0, 2}, {4, 8}}, {{1, 5}}), (Intervals{{0, 1}, {5, 8}}));
  EXPECT_EQ(within({{0, 4}, {6, 8}}, 3, 7), (Intervals{{3, 4}, {6, 7}}));
  EXPECT_EQ(length({{0, 4}, {6, 8}}), 6);
}

TEST(TimeIntervals, TheLeastLabelCountsAndPartsAddUp) {
  const auto parts = divided({{1, 0, 6}, {0, 4, 8}, {1, 20, 30}}, 2, 0, 10);
  EXPECT_EQ(parts, (std::vector<int64_t>{4, 4, 2}));
}

// A trace of one thread and two streams.
struct Made {
  StepTrace trace{.step = 4, .world = 2, .host = "here"};
  int64_t next = 1;

  void host(TraceSpan::Kind kind, const std::string& name, int64_t begin, int64_t end,
            double flops = 0) {
    if (flops > 0) trace.products.push_back({begin * kMs, flops});
    trace.spans.push_back({.kind = kind,
                           .name = name,
                           .begin = begin * kMs,
                           .end = end * kMs,
                           .lane = 1,
                           .id = next++});
  }
  // A kernel that the last host span launched.
  void kernel(const std::string& name, int64_t begin, int64_t end, int64_t stream) {
    trace.spans.push_back({.kind = TraceSpan::kKernel,
                           .name = name,
                           .begin = begin * kMs,
                           .end = end * kMs,
                           .lane = stream,
                           .from = next - 1});
  }
  void unit(int64_t at, const std::string& name) { trace.marks.push_back({at * kMs, 1, name}); }
  StepTime time() {
    std::stable_sort(trace.spans.begin(), trace.spans.end(),
                     [](const auto& a, const auto& b) { return a.begin < b.begin; });
    return step_time(trace);
  }
};

double ms_of(const StepTime& time, const std::string& family) {
  for (const FamilyTime& one : time.families)
    if (one.name == family) return one.ms;
  return 0;
}

double sum_of(const StepTime& time) {
  double sum = 0;
  for (const FamilyTime& one : time.families) sum += one.ms;
  return sum;
}

Made on_gpu() {
  Made made;
  made.host(TraceSpan::kScope, "step 4", 0, 40);
  made.host(TraceSpan::kScope, "forward", 0, 10);
  made.host(TraceSpan::kScope, "backward", 10, 20);
  made.host(TraceSpan::kScope, "update", 20, 30);
  made.host(TraceSpan::kScope, "gather layers.0", 1, 3);
  made.host(TraceSpan::kOperator, "nccl:_all_gather_base", 1, 2);
  made.kernel("ncclDevKernel_AllGather_RING_LL", 2, 12, 20);  // 10..12 behind the product
  made.unit(5, "layers.0");
  made.host(TraceSpan::kOperator, "aten::mm", 4, 6, 4e12);
  made.kernel("nvjet_hsh_128x256", 10, 16, 7);
  made.unit(12, "layers.1");
  made.host(TraceSpan::kOperator, "aten::mul", 11, 13);
  made.kernel("void at::native::vectorized_elementwise_kernel<4>", 16, 20, 7);
  made.host(TraceSpan::kOperator, "aten::add_", 21, 22);
  made.kernel("void at::native::vectorized_elementwise_kernel<4>", 24, 26, 7);
  return made;
}

TEST(StepTimes, OnAGpuEveryInstantCountsOnce) {
  const StepTime time = on_gpu().time();
  EXPECT_TRUE(time.gpu);
  EXPECT_DOUBLE_EQ(time.traced_ms, 40);
  EXPECT_DOUBLE_EQ(sum_of(time), 40);
  EXPECT_DOUBLE_EQ(ms_of(time, "products"), 6);
  EXPECT_DOUBLE_EQ(ms_of(time, "element-wise"), 4);
  EXPECT_DOUBLE_EQ(ms_of(time, "optimizer"), 2) << "what the update launches is the optimizer's";
  EXPECT_DOUBLE_EQ(ms_of(time, "communication, exposed"), 8);
  EXPECT_DOUBLE_EQ(time.communication_ms, 10);
  EXPECT_DOUBLE_EQ(time.hidden_ms, 2);
  EXPECT_DOUBLE_EQ(ms_of(time, "host gaps"), 20);
  for (const FamilyTime& family : time.families) EXPECT_GT(family.ms, 0) << family.name;
}

TEST(StepTimes, ProductsHaveTheirSpeed) {
  for (const FamilyTime& family : on_gpu().time().families)
    EXPECT_DOUBLE_EQ(family.tflops, family.name == "products" ? 4.0 / 6e-3 : 0);
}

TEST(StepTimes, KernelsBelongToTheUnitOfTheirOperator) {
  std::map<std::string, UnitTime> units;
  for (const UnitTime& unit : on_gpu().time().units) units[unit.name] = unit;
  EXPECT_DOUBLE_EQ(units["layers.0"].forward_ms, 6);
  EXPECT_DOUBLE_EQ(units["layers.0"].exposed_ms, 8);
  EXPECT_DOUBLE_EQ(units["layers.1"].backward_ms, 4);
  EXPECT_DOUBLE_EQ(units["(update)"].update_ms, 2);
  EXPECT_EQ(units.size(), 3u);
}

TEST(StepTimes, TheLongestKernelsComeFirst) {
  const StepTime time = on_gpu().time();
  ASSERT_EQ(time.kernels.size(), 3u);
  EXPECT_EQ(time.kernels[0].name, "ncclDevKernel_AllGather_RING_LL");
  EXPECT_EQ(time.kernels[1].ms, 6);
  EXPECT_EQ(time.kernels[2].calls, 2);
}

TEST(StepTimes, OnTheCpuInnerOperatorsCountAndSmallOnesCountForTheirCaller) {
  Made made;
  made.trace.world = 1;
  made.host(TraceSpan::kScope, "step 4", 0, 30);
  made.host(TraceSpan::kScope, "fsdp: data loading", 0, 2);
  made.host(TraceSpan::kScope, "forward", 2, 20);
  made.host(TraceSpan::kOperator, "aten::linear", 3, 10);
  made.unit(3, "layers.0");
  made.host(TraceSpan::kOperator, "aten::t", 3, 4);
  made.host(TraceSpan::kOperator, "aten::mm", 4, 10, 1e9);
  made.host(TraceSpan::kOperator, "fsdp::rms_norm", 12, 15);
  made.host(TraceSpan::kOperator, "aten::empty", 12, 13);
  made.host(TraceSpan::kScope, "gather layers.1", 16, 18);
  made.host(TraceSpan::kScope, "update", 20, 30);
  made.host(TraceSpan::kOperator, "aten::mul_", 21, 29);
  const StepTime time = made.time();
  EXPECT_FALSE(time.gpu);
  EXPECT_DOUBLE_EQ(sum_of(time), 30);
  EXPECT_DOUBLE_EQ(ms_of(time, "products"), 7);
  EXPECT_DOUBLE_EQ(ms_of(time, "norms"), 3);
  EXPECT_DOUBLE_EQ(ms_of(time, "optimizer"), 8);
  EXPECT_DOUBLE_EQ(ms_of(time, "waiting for data"), 2);
  EXPECT_DOUBLE_EQ(ms_of(time, "communication, exposed"), 0) << "a world of one sends nothing";
  EXPECT_DOUBLE_EQ(ms_of(time, "other"), 2);
  EXPECT_DOUBLE_EQ(ms_of(time, "between operators"), 8);
  ASSERT_FALSE(time.units.empty());
  EXPECT_EQ(time.units[0].name, "layers.0");
  EXPECT_DOUBLE_EQ(time.units[0].forward_ms, 10);
  for (const KernelTime& kernel : time.kernels) {
    EXPECT_NE(kernel.name, "aten::t");
    EXPECT_NE(kernel.name, "aten::empty");
  }
}

TEST(StepTimes, OnTheCpuGathersOfSeveralRanksAreExposed) {
  Made made;
  made.host(TraceSpan::kScope, "step 4", 0, 10);
  made.host(TraceSpan::kScope, "forward", 0, 10);
  made.host(TraceSpan::kScope, "gather layers.1", 2, 6);
  made.host(TraceSpan::kOperator, "aten::copy_", 3, 4);
  const StepTime time = made.time();
  EXPECT_DOUBLE_EQ(ms_of(time, "communication, exposed"), 3);
  EXPECT_DOUBLE_EQ(ms_of(time, "copies"), 1);
}

TEST(StepTimes, AdviceNamesOptionsAndIsShort) {
  StepTime time = on_gpu().time();
  const auto lines = what_next(time, {.peak_tflops = 989, .hosts = 1});
  ASSERT_FALSE(lines.empty());
  EXPECT_LE(lines.size(), 3u);
  EXPECT_NE(lines[0].find("--train.graph on"), std::string::npos) << lines[0];
  for (const std::string& line : lines) EXPECT_NE(line.find("--"), std::string::npos) << line;
  const auto hosts = what_next(time, {.graphed = true, .hosts = 2});
  ASSERT_FALSE(hosts.empty());
  EXPECT_NE(hosts[0].find("hybrid_shard"), std::string::npos) << hosts[0];
}

TEST(StepTimes, TextAndJsonHaveTheSameFamilies) {
  const StepTime time = on_gpu().time();
  const StepSettings settings{.peak_tflops = 989, .step_ms = 39};
  const std::string text = describe(time, settings);
  const nlohmann::ordered_json json = to_json(time, settings);
  EXPECT_EQ(json["families"].size(), time.families.size());
  for (const FamilyTime& family : time.families)
    EXPECT_NE(text.find(family.name), std::string::npos) << family.name;
  EXPECT_NE(text.find("of 989"), std::string::npos) << text;
  EXPECT_NE(text.find("what to try next"), std::string::npos) << text;
  EXPECT_EQ(json["timeline"]["lanes"][0]["name"], "compute");
}

TEST(StepTimes, AnEmptyTraceIsNothing) {
  const StepTime time = step_time({});
  EXPECT_EQ(time.traced_ms, 0);
  EXPECT_TRUE(time.families.empty());
  EXPECT_FALSE(describe(time, {}).empty());
}

}  // namespace
}  // namespace fsdp::observe
