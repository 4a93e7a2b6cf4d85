// A launcher whose output nobody reads: ranks that fail still end, and so does the launcher. Real
// processes and pipes.
#include <gtest/gtest.h>

#include <unistd.h>

#include <fstream>

#include "launch/launched.h"
#include "launch/output.h"
#include "paths.h"

namespace fsdp::launch {
namespace {

// Rank 0 writes until it is held back. Then rank 1 says at length why it fails. Nobody reads before
// the file `go` exists.
constexpr const char* kRanks =
    "if test $RANK = 0; then echo $$ > $0/rank-0; exec yes; fi; "
    "while ! test -s $0/rank-0; do sleep 0.01; done; n=0; "
    "while test $n -lt 20; do "
    "  case $(cut -d' ' -f3 /proc/$(cat $0/rank-0)/stat) in S) n=$((n+1));; *) n=0;; esac; "
    "  sleep 0.01; "
    "done; "
    "echo $$ > $0/rank-1; head -c 300000 /dev/zero | tr '\\0' x >&2; echo >&2; echo why >&2; exit "
    "3";

std::string pipeline(const std::string& streams) {
  return "{ \"$1\" run -n 2 --grace 0.2 sh -c \"$2\" \"$0\" " + streams +
         "; echo $? > $0/code; } | "
         "{ while ! test -e $0/go; do sleep 0.01; done; cat > $0/output; }";
}

class NobodyReads : public testing::TestWithParam<const char*> {};

TEST_P(NobodyReads, ARankThatFailsEndsTheRunWithinTheGrace) {
  Folder folder;
  Launched run({"sh", "-c", pipeline(GetParam()), folder.path(), paths::program("fsdp"), kRanks});
  EXPECT_EQ(folder.read_pid("code"), 3);  // before anybody has read
  EXPECT_TRUE(is_gone(folder.read_pid("rank-0")));
  EXPECT_TRUE(is_gone(folder.read_pid("rank-1")));
  std::ofstream(folder / "go").flush();
  EXPECT_EQ(run.wait(), 0);
}

INSTANTIATE_TEST_SUITE_P(Streams, NobodyReads, testing::Values("", "2>&1"),
                         [](const auto& info) { return *info.param ? "joined" : "apart"; });

TEST(Screen, DropsWhatHasNoRoomAndSaysSo) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  {
    Writer writer(ends[1]);
    Screen screen(writer, /*colour=*/false);
    const std::string line = std::string(999, 'x') + "\n";
    for (int i = 0; i < 20'000; ++i) screen.show(0, "", line);  // 20 MB, of which 8 MiB have room
    const size_t kept = writer.pending();
    EXPECT_LT(kept, size_t{9} << 20);
    EXPECT_GT(kept, size_t{8} << 20);
    screen.say("the end\n");  // our own lines aren't dropped
    EXPECT_EQ(writer.pending() - kept,
              std::string("fsdp: 11611000 bytes of output were dropped here, because nobody read "
                          "them.\nthe end\n")
                  .size());
  }
  close(ends[0]);
  close(ends[1]);
}

}  // namespace
}  // namespace fsdp::launch
