// Memory snapshots are what PyTorch's own reader of them expects.
#include "train/memory_snapshot.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/environment.h"
#include "base/subprocess.h"
#include "checkpoint/pickle.h"
#include "observe/folder.h"

namespace fsdp::train {
namespace {

using c10::CachingDeviceAllocator::SegmentInfo;
using Snapshots = observe::InFolder;

constexpr size_t kMiB = 1 << 20;

std::vector<SegmentInfo> made_segments() {
  SegmentInfo large;
  large.device = 1;
  large.address = 0x7f0000000000;
  large.total_size = 20 * kMiB;
  large.allocated_size = large.requested_size = 12 * kMiB;
  large.active_size = 14 * kMiB;
  large.is_large = true;
  large.blocks = {
      {.size = 12 * kMiB, .requested_size = 12 * kMiB - 100, .allocated = true, .active = true},
      {.size = 2 * kMiB, .requested_size = 2 * kMiB, .active = true},
      {.size = 6 * kMiB}};
  SegmentInfo small = large;
  small.address += 64 * kMiB;
  small.total_size = 2 * kMiB;
  small.is_large = false;
  small.blocks = {{.size = 2 * kMiB}};
  return {large, small};
}

TEST(SnapshotPickles, HaveSegmentsBlocksAndAListPerDevice) {
  namespace pickle = checkpoint::pickle;
  const pickle::Ref read = pickle::read(pickled_snapshot(made_segments()), "a snapshot",
                                        [](const std::string&) { return false; });
  ASSERT_TRUE(read->is(pickle::kDict));
  const pickle::Pickled* segments = read->find("segments");
  ASSERT_NE(segments, nullptr);
  ASSERT_EQ(segments->items.size(), 2u);
  EXPECT_EQ(segments->items[0]->find("address")->integer, 0x7f0000000000);
  EXPECT_EQ(segments->items[0]->find("segment_type")->text, "large");
  const pickle::Pickled* blocks = segments->items[0]->find("blocks");
  ASSERT_EQ(blocks->items.size(), 3u);
  EXPECT_EQ(blocks->items[0]->find("state")->text, "active_allocated");
  EXPECT_EQ(blocks->items[1]->find("state")->text, "active_pending_free");
  EXPECT_EQ(blocks->items[2]->find("state")->text, "inactive");
  EXPECT_EQ(blocks->items[1]->find("address")->integer,
            0x7f0000000000 + static_cast<int64_t>(12 * kMiB));
  EXPECT_EQ(read->find("device_traces")->items.size(), 2u);
}

TEST_F(Snapshots, AreReadByPyTorchsMemoryViewer) {
  const std::string file = path("memory.pickle");
  write(file, pickled_snapshot(made_segments()));
  const char* script =
      "import pickle, sys\n"
      "try:\n"
      "    from torch.cuda import _memory_viz as viz\n"
      "except ImportError:\n"
      "    sys.exit(77)\n"
      "data = pickle.load(open(sys.argv[1], 'rb'))\n"
      "print(viz.segsum(data))\n"
      "print(len(viz.segment_plot(data)), len(viz.trace_plot(data)), viz.memory(data, str)[:60])\n";
  const auto python = environment::text("FSDP_TEST_PYTHON").value_or("python3");
  const auto done = run_program({python, "-c", script, file}, true, {}, {});
  if (done.code == 77) GTEST_SKIP() << "FSDP_TEST_PYTHON has no torch";
  ASSERT_EQ(done.code, 0) << done.output;
  EXPECT_NE(done.output.find("segments: 2"), std::string::npos) << done.output;
  EXPECT_NE(done.output.find("total_reserved: 22.0MiB"), std::string::npos) << done.output;
  EXPECT_NE(done.output.find("total_allocated: 12.0MiB"), std::string::npos) << done.output;
}

TEST_F(Snapshots, OfACpuAreNotWritten) {
  EXPECT_FALSE(write_memory_snapshot(at::kCPU, path("memory.pickle")));
  EXPECT_FALSE(std::filesystem::exists(path("memory.pickle")));
}

}  // namespace
}  // namespace fsdp::train
