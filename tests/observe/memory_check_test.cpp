// A step's memory by kind, planned and measured.
#include "observe/memory_check.h"

#include <gtest/gtest.h>

namespace fsdp::observe {
namespace {

MemoryReport report() {
  return {.parameters = 1000,
          .gathered_from = 500,
          .gradients = 800,
          .optimizer = 2000,
          .unsharded = 300,
          .ring = 200,
          .secondary = 50,
          .reduce_buffers = 70,
          .accumulated = 30,
          .activations = 4000};
}

bool has_row(const std::string& text, const std::string& kind, const std::string& bytes) {
  size_t at = text.find(kind);
  if (at == std::string::npos) return false;
  std::string line = text.substr(at, text.find('\n', at) - at);
  return line.find(" " + bytes + " ") != std::string::npos;
}

TEST(MemoryCheck, EveryByteIsOfOneKind) {
  std::string text = describe(report(), std::nullopt);
  EXPECT_TRUE(has_row(text, "parameters", "1,500")) << text;
  EXPECT_TRUE(has_row(text, "gradients", "900")) << text;
  EXPECT_TRUE(has_row(text, "optimizer states", "2,000")) << text;
  EXPECT_TRUE(has_row(text, "gather buffers", "350")) << text;
  EXPECT_TRUE(has_row(text, "activations", "4,000")) << text;
  EXPECT_TRUE(has_row(text, "total", "8,750")) << text;
  EXPECT_EQ(report().total() + report().activations, 8750);
  EXPECT_EQ(text.find("peak"), std::string::npos) << "nothing was measured";
}

TEST(MemoryCheck, TheDifferenceIsAShareOfWhatWasMeasured) {
  EXPECT_DOUBLE_EQ(unaccounted_share(report(), 10'000), 0.125);
  EXPECT_DOUBLE_EQ(unaccounted_share(report(), 8750), 0);
  EXPECT_DOUBLE_EQ(unaccounted_share(report(), 8000), -0.09375);
  std::string more = describe(report(), 10'000), less = describe(report(), 8000);
  EXPECT_TRUE(has_row(more, "measured peak", "10,000")) << more;
  EXPECT_NE(more.find("12.5 % higher"), std::string::npos) << more;
  EXPECT_NE(less.find("9.4 % lower"), std::string::npos) << less;
}

TEST(MemoryCheck, WhatLiesOnTheHostIsNotTheDevices) {
  MemoryReport offloaded = report();
  offloaded.host = 3000;
  std::string text = describe(offloaded, 5750);
  EXPECT_TRUE(has_row(text, "in host memory", "3,000")) << text;
  EXPECT_TRUE(has_row(text, "total on the device", "5,750")) << text;
  EXPECT_DOUBLE_EQ(unaccounted_share(offloaded, 5750), 0);
  offloaded.host_activations = 2500;  // on no device
  EXPECT_DOUBLE_EQ(unaccounted_share(offloaded, 5750), 0);
  EXPECT_TRUE(has_row(describe(offloaded, 5750), "host memory for activations", "2,500"));
}

TEST(MemoryCheck, APlanIsComparedByItsPeakOrByWhatStays) {
  PlannedMemory planned{.parameters = 500,
                        .master = 1000,
                        .gradients = 800,
                        .states = 2000,
                        .activations = 4000,
                        .temporaries = 1700};
  EXPECT_EQ(compare(planned, report(), std::nullopt).off, 0);
  EXPECT_DOUBLE_EQ(compare(planned, report(), 11000).off, 0.1);
  EXPECT_DOUBLE_EQ(compare(planned, report(), 9000).off, -0.1);
  planned.states = 1000;
  EXPECT_DOUBLE_EQ(compare(planned, report(), std::nullopt).off, 0.4);
  std::string text = compare(planned, report(), 11000).text;
  for (const char* kind : {"parameters", "optimizer states", "activations", "peak"})
    EXPECT_NE(text.find(kind), std::string::npos) << kind;
}

}  // namespace
}  // namespace fsdp::observe
