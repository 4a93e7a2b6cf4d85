// The page: no text can become markup, nothing is loaded, and a file is whole or not there.
#include "report/page.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <regex>

#include "fsdp/error.h"
#include "observe/folder.h"

namespace fsdp::report {
namespace {

using Files = observe::InFolder;

const std::string kHostile =
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x01\xff\u2028${x}`";

// What is between <script type="application/json"> and its end.
std::string data_of(const std::string& html) {
  const std::string begin = "id=\"data\">";
  const size_t at = html.find(begin) + begin.size();
  return html.substr(at, html.find("</script>", at) - at);
}

TEST(Pages, HostileTextStaysText) {
  Page page(kHostile, kHostile);
  page.section(kHostile);
  page.heading(kHostile);
  page.paragraph(kHostile);
  page.missing(kHostile);
  page.cards({{kHostile, kHostile}});
  page.table(
      {.caption = kHostile, .columns = {kHostile}, .rows = {{PageCell(kHostile, kHostile)}}});
  page.list({kHostile});
  page.verbatim(kHostile);
  page.begin_details(kHostile);
  page.end_details();
  page.chart({{"type", "bars"}, {"title", kHostile}, {"rows", {{{"name", kHostile}}}}}, kHostile);
  const std::string html = page.html();
  EXPECT_EQ(html.find("<img"), std::string::npos);
  EXPECT_EQ(html.find("<script>alert"), std::string::npos);
  EXPECT_EQ(html.find("onerror=alert(2)>"), std::string::npos);
  // Two scripts: the data and ours.
  const std::regex script("<script");
  EXPECT_EQ(std::distance(std::sregex_iterator(html.begin(), html.end(), script), {}), 2);
  const Json charts = Json::parse(data_of(html));
  ASSERT_EQ(charts.size(), 1u);
  const std::string title = charts[0]["title"];
  EXPECT_EQ(title.substr(0, title.find('\x01')), kHostile.substr(0, kHostile.find('\x01')));
}

TEST(Pages, LoadNothing) {
  Page page("title");
  page.section("a");
  page.chart({{"type", "lines"}, {"title", "t"}, {"series", Json::array()}});
  const std::string html = page.html();
  EXPECT_NE(html.find("default-src 'none'"), std::string::npos);
  EXPECT_FALSE(std::regex_search(html, std::regex("(src|href)=\"(https?:)?//")));
  EXPECT_EQ(html.find("@import"), std::string::npos);
  EXPECT_NE(html.find("prefers-color-scheme: dark"), std::string::npos);
}

TEST(Pages, SectionsAreLinkedAndClosed) {
  Page page("title");
  page.section("one");
  page.section("two & three");
  const std::string html = page.html();
  EXPECT_NE(html.find("<a href=\"#s2\">two &amp; three</a>"), std::string::npos);
  const std::regex open("<section"), close("</section>");
  EXPECT_EQ(std::distance(std::sregex_iterator(html.begin(), html.end(), open), {}),
            std::distance(std::sregex_iterator(html.begin(), html.end(), close), {}));
}

TEST(Pages, NumbersAreShort) {
  EXPECT_EQ(short_number(1.0 / 3).dump(), "0.33333");
  EXPECT_EQ(short_number(2.0).dump(), "2");
  EXPECT_EQ(short_number(123456.7).dump(), "123460.0");
  EXPECT_EQ(short_number(3e-5).dump(), "3e-05");
  EXPECT_TRUE(short_number(std::nan("")).is_null());
}

TEST_F(Files, APageThatCannotBeWrittenIsAnError) {
  const Page page("title");
  EXPECT_THROW(write_page(page, path("no/folder/page.html")), Error);
  write_page(page, path("page.html"));
  EXPECT_EQ(read(path("page.html")), page.html());
  EXPECT_FALSE(std::filesystem::exists(path("page.html.partial")));
}

}  // namespace
}  // namespace fsdp::report
