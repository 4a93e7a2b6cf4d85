// Messages between ranks read back as they were, and anything else is an error that names the
// sender.
#include "checkpoint/messages.h"

#include <gtest/gtest.h>

#include "checkpoint/test_files.h"

namespace fsdp::checkpoint {
namespace {

const std::string kAnything("7:\n\0 {}\xff", 8);

TEST(Messages, AnOutcomeReadsBackAsItWas) {
  EXPECT_EQ(Outcome::decode(Outcome{kAnything}.encode(), "rank 1").result, kAnything);
  EXPECT_FALSE(Outcome::decode(Outcome{""}.encode(), "rank 1").failure);
  const Outcome failed{"", CodedError(kExitDamaged, kAnything, "free some space.")};
  const auto read = Outcome::decode(failed.encode(), "rank 1");
  ASSERT_TRUE(read.failure);
  EXPECT_EQ(read.failure->message(), failed.failure->message());
  EXPECT_EQ(read.failure->hint(), "free some space.");
  EXPECT_EQ(read.failure->code(), kExitDamaged);
}

TEST(Messages, APieceReadsBackAsItWas) {
  const auto [pieces, text] = FirstPiece::decode(FirstPiece{12, kAnything}.encode(), "rank 1");
  EXPECT_EQ(pieces, 12u);
  EXPECT_EQ(text, kAnything);
}

TEST(Messages, AReportHasWhatEachRankWrote) {
  SaveReport all;
  for (const std::string rank : {"0", "1"}) {
    SaveReport one;
    one.metadata.add_chunk({"model", "w"}, at::kFloat, {2, 3},
                           {{{std::stoll(rank), 0}, {1, 3}}, {rank, 0, 100}});
    one.manifest.files[rank] = {3, {7}};
    all.add(SaveReport::decode(one.encode(), "rank " + rank));
  }
  EXPECT_EQ(all.metadata.tensors.at("model.w").chunks.size(), 2u);
  EXPECT_EQ(all.manifest.files.at("1").sums, std::vector<uint64_t>{7});
}

TEST(Messages, AnythingElseIsAnErrorThatNamesTheSender) {
  const auto refused = [](std::string_view text, const std::string& why) {
    const auto error = error_of([&] { Outcome::decode(text, "rank 3"); });
    EXPECT_TRUE(has(error, "rank 3 sent a message that can't be read: " + why)) << text << error;
  };
  refused("", "it is neither a result nor a failure");
  refused("4:done", "it is neither a result nor a failure");
  refused("4:gone2:ok", "it is neither a result nor a failure");
  refused("4:done2:o", "it ends too early");
  refused("4:done2ok", "a field has no length");
  refused("4:done+2:ok", "it has no number");
  refused("4:done99999999999999999999:ok", "it has no number");
  refused("4:done2:ok ", "a field has no length");
  EXPECT_TRUE(has(error_of([] { FirstPiece::decode("1:02:ab", "rank 3"); }), "it has 0 pieces"));
  EXPECT_TRUE(
      has(error_of([] { FirstPiece::decode("6:1000002:ab", "rank 3"); }), "it has 100000 pieces"));
  EXPECT_TRUE(has(error_of([] { FirstPiece::decode("1:1", "rank 3"); }), "1 fields instead of 2"));
  EXPECT_TRUE(has(error_of([] { SaveReport::decode("1:x1:y", "rank 3"); }), "rank 3: "));
}

}  // namespace
}  // namespace fsdp::checkpoint
