// What names from outside can do to a message: nothing.
#include "base/printable.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "fsdp/error.h"

namespace fsdp::base {
namespace {

TEST(Printable, LeavesTextAsItIs) {
  for (const std::string text :
       {"", "plain\ttext.\n  HINT: with two lines.\n", "é漢😀 “quoted” …", "a\n\n\nb"})
    EXPECT_EQ(printable(text), text);
}

TEST(Printable, EscapesWhatActsOnATerminal) {
  EXPECT_EQ(printable("\x1b[31m\r\a\x7f"), "\\x1b[31m\\x0d\\x07\\x7f");
  EXPECT_EQ(printable(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\xc2\x9b"
                      "31m"),
            "\\xc2\\x9b31m");  // the same control sequence in one character
  EXPECT_EQ(printable("a\u202eb"), "a\\xe2\\x80\\xaeb");  // right to left from here
  EXPECT_EQ(printable("\xff\xc3 \xe2\x82 \xed\xa0\x80 \xc0\xaf \xf5"),
            "\\xff\\xc3 \\xe2\\x82 \\xed\\xa0\\x80 \\xc0\\xaf \\xf5");  // none is UTF-8
  EXPECT_EQ(printable("\xe6\xbc"), "\\xe6\\xbc");                       // cut off
}

TEST(Printable, CutsTheMiddleOutOfLongLines) {
  const std::string longest(4'000, 'x');
  EXPECT_EQ(printable(longest + "\n" + longest), longest + "\n" + longest);
  for (const std::string& piece : {std::string("x"), std::string("é"), std::string("漢"),
                                   std::string("😀"), std::string("\x80"), std::string("\x1b")}) {
    std::string line = "begin";
    for (int i = 0; i < 100'000; ++i) line += piece;
    const std::string shown = printable("a\n" + line + "end\nb");
    EXPECT_LE(shown.size(), 4'100u);
    EXPECT_TRUE(shown.starts_with("a\nbegin")) << shown;
    EXPECT_TRUE(shown.ends_with("end\nb")) << shown;
    EXPECT_NE(shown.find(" bytes …] "), std::string::npos) << shown;
    EXPECT_EQ(printable(shown), shown);
  }
}

TEST(Printable, CutsTheMiddleOutOfManyLines) {
  std::string text = "first\n";
  for (int i = 0; i < 998; ++i) text += "x\n";
  EXPECT_EQ(printable(text + "last"), text + "last");
  const std::string shown = printable(text + text + "last");
  EXPECT_EQ(std::count(shown.begin(), shown.end(), '\n'), 999);
  EXPECT_TRUE(shown.starts_with("first\nx\n") && shown.ends_with("x\nlast")) << shown;
  EXPECT_NE(shown.find("[… 1000 lines …]\n"), std::string::npos) << shown;
  EXPECT_EQ(printable(shown), shown);
}

TEST(Printable, EveryErrorIs) {
  const Error error("\"\x1b[2J\" is missing.", "call \a" + std::string(1'000'000, 'x') + ".");
  EXPECT_EQ(error.message(), "\"\\x1b[2J\" is missing.");
  EXPECT_TRUE(error.hint().starts_with("call \\x07xx"));
  EXPECT_LT(error.hint().size(), 4'001u);
  EXPECT_EQ(error.what(), error.message() + "\n  HINT: " + error.hint());
  EXPECT_EQ(std::string(Error("a.", "").what()), "a.");
}

}  // namespace
}  // namespace fsdp::base
