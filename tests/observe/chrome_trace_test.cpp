// Traces of several ranks in one file: names, and clocks that agree.
#include "observe/chrome_trace.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "fsdp/error.h"
#include "observe/folder.h"

namespace fsdp::observe {
namespace {

namespace fs = std::filesystem;

class MergedTraces : public InFolder {
 protected:
  // `met`: what its host's clock showed when the ranks left the barrier; the step begins 5 us
  // later.
  fs::path part(int rank, const std::string& host, int64_t met) {
    StepTrace trace{.step = 3, .rank = rank, .world = 3, .host = host, .met = met};
    trace.spans = {{.kind = TraceSpan::kScope,
                    .name = "step 3",
                    .begin = met + 5000,
                    .end = met + 9000,
                    .lane = 1},
                   {.kind = TraceSpan::kRuntime,
                    .name = "cudaLaunchKernel",
                    .begin = met + 6000,
                    .end = met + 6500,
                    .lane = 1,
                    .id = 77},
                   {.kind = TraceSpan::kKernel,
                    .name = "nvjet",
                    .begin = met + 7000,
                    .end = met + 8000,
                    .lane = 7,
                    .launch = 77}};
    trace.marks = {{met + 5500, 1, "layers.0"}, {met + 7500, 1, "layers.1"}};
    const fs::path file = path("part" + std::to_string(rank));
    write_trace_part(trace, {{"traced_ms", rank}}, file);
    return file;
  }

  nlohmann::json events() { return nlohmann::json::parse(read(path("trace.json")))["traceEvents"]; }
  nlohmann::json find(int rank, const std::string& name) {
    for (const auto& event : events())
      if (event["pid"] == rank && event.value("name", "") == name) return event;
    return nullptr;
  }
};

TEST_F(MergedTraces, RanksAreProcessesWithStepsUnitsAndStreams) {
  const auto headers =
      merge_trace_parts({part(0, "a", 1000), part(1, "a", 1000)}, path("trace.json"));
  ASSERT_EQ(headers.size(), 2u);
  EXPECT_EQ(headers[1]["traced_ms"], 1);
  for (int rank : {0, 1}) {
    EXPECT_EQ(find(rank, "process_name")["args"]["name"], "rank " + std::to_string(rank) + " (a)");
    EXPECT_EQ(find(rank, "step 3")["dur"], 4.0);
    EXPECT_EQ(find(rank, "layers.0")["dur"], 2.0);
    EXPECT_EQ(find(rank, "nvjet")["args"]["family"], "products");
    EXPECT_NE(find(rank, "nvjet")["tid"], find(rank, "step 3")["tid"]);
  }
  EXPECT_FALSE(fs::exists(path("part0"))) << "parts are removed";
}

TEST_F(MergedTraces, ClocksOfHostsAreAlignedAndRanksOfOneHostKeepTheirs) {
  const int64_t wrong = 3'600'000'000'000;  // another host's clock is an hour ahead
  merge_trace_parts({part(0, "a", 1000), part(1, "a", 3000), part(2, "b", wrong)},
                    path("trace.json"));
  EXPECT_EQ(find(0, "step 3")["ts"], 0.0);
  EXPECT_EQ(find(1, "step 3")["ts"], 2.0) << "it began later, by the same clock";
  EXPECT_EQ(find(2, "step 3")["ts"], 0.0);
}

TEST_F(MergedTraces, AMissingPartIsLeftOut) {
  const auto headers = merge_trace_parts({part(0, "a", 1000), path("nowhere")}, path("trace.json"));
  EXPECT_EQ(headers.size(), 1u);
  EXPECT_FALSE(find(0, "step 3").is_null());
}

TEST_F(MergedTraces, AFileThatCannotBeWrittenIsAnError) {
  EXPECT_THROW(write_trace_part({}, {}, path("no/folder/part")), Error);
  EXPECT_THROW(merge_trace_parts({}, path("no/folder/trace.json")), Error);
}

}  // namespace
}  // namespace fsdp::observe
