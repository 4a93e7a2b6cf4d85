#include "base/table.h"

#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

namespace fsdp {
namespace {

TEST(Table, AlignsForPeopleAndKeepsKeysForPrograms) {
  Table table({{"name", "name", Table::kLeft}, {"time_ms", "ms"}, {"raw", ""}});
  table.add({text("a"), number(1.234, 1), {7, ""}});
  table.add({text("größer"), number(100, 1), {8, ""}});
  std::ostringstream people, programs;
  table.print(people, false);
  table.print(programs, true);
  EXPECT_EQ(people.str(), "name       ms\na         1.2\ngrößer  100.0\n");
  EXPECT_EQ(programs.str(),
            "{\"name\":\"a\",\"time_ms\":1.234,\"raw\":7}\n"
            "{\"name\":\"größer\",\"time_ms\":100.0,\"raw\":8}\n");
}

TEST(Table, PrintsRowsWithoutHeadings) {
  Table table({{"what", "what", Table::kLeft}, {"is", "a long heading", Table::kLeft}});
  table.add({text("step"), text("100")});
  table.add({text("größer"), text("3")});
  std::ostringstream out;
  table.print_rows(out);
  EXPECT_EQ(out.str(), "step    100\ngrößer  3\n");
}

TEST(Table, ShowsJsonLinesByTheirColumns) {
  const double nan = std::nan("");
  Table table = table_of("what; ms .1; bytes=size B; the_goal .0; more= .0",
                         {{{"what", "a"},
                           {"ms", 1.25},
                           {"bytes", 2048},
                           {"the_goal", 2},
                           {"the_goal_text", "<= 2"},
                           {"more", 1}},
                          {{"what", "b"}, {"ms", nan}, {"bytes", 0}}});
  std::ostringstream people, programs;
  table.print(people, false);
  table.print(programs, true);
  EXPECT_EQ(people.str(),
            "what   ms   size  the goal\na     1.2  2 KiB      <= 2\nb       -      -          \n");
  EXPECT_EQ(programs.str(),
            "{\"what\":\"a\",\"ms\":1.25,\"bytes\":2048,\"the_goal\":2,\"more\":1}\n"
            "{\"what\":\"b\",\"ms\":null,\"bytes\":0,\"the_goal\":null,\"more\":null}\n");
}

TEST(Table, WritesSizesAndLargeNumbers) {
  EXPECT_EQ(parse_bytes("1.5K", 1024), 1536);
  EXPECT_EQ(parse_bytes("2mb", 1000), 2'000'000);
  EXPECT_EQ(parse_bytes("2MiB", 1000), 2 << 20);
  EXPECT_EQ(parse_bytes("64", 1024), 64);
  for (const char* text : {"", "x", "1X", "-1", "0", "1KiBs"})
    EXPECT_EQ(parse_bytes(text, 1024), std::nullopt) << text;
  EXPECT_EQ(human_bytes(1024), "1 KiB");
  EXPECT_EQ(count_of(1, "rank"), "1 rank");
  EXPECT_EQ(count_of(2048, "parameter"), "2,048 parameters");
  EXPECT_EQ(human_bytes(1536.0 * 1024 * 1024), "1.5 GiB");
  EXPECT_EQ(human_bytes(64 << 20), "64 MiB");
  EXPECT_EQ(with_separators(50331648), "50,331,648");
  EXPECT_EQ(with_separators(-1000), "-1,000");
  EXPECT_EQ(with_separators(7), "7");
}

}  // namespace
}  // namespace fsdp
