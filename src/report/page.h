// Page: one HTML file that opens without a network. Style and script are inside it; charts are
// drawn by the script from JSON, which is inside it, too. Light or dark is the reader's choice.
//
//   Page page("runs/demo");
//   page.section("Loss");
//   page.chart({{"type", "lines"}, {"title", "loss"}, {"series", ...}});
//   write_page(page, "report.html");
//
// All text is plain: it is escaped here, in HTML as well as in the script's JSON, so that names and
// values from a run can't become markup. page.js says what a chart's JSON has.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::report {

using Json = nlohmann::ordered_json;

// Colours of charts, which page.css defines.
enum Colour { kBlue, kOrange, kGreen, kPink, kPurple, kTeal, kBrown, kGrey, kRed, kPale, kYellow };

struct PageCell {
  PageCell(std::string value) : text(std::move(value)) {}  // NOLINT: meant to convert
  PageCell(const char* value) : text(value) {}             // NOLINT: meant to convert
  PageCell(std::string value, std::string look) : text(std::move(value)), style(std::move(look)) {}

  std::string text;
  std::string style = "";  // classes of page.css: "number", "code", "good", "bad", "warm"
};

struct PageTable {
  std::string caption = "";
  std::vector<PageCell> columns;            // the style also holds for the cells below
  std::vector<std::vector<PageCell>> rows;  // one cell per column
  std::vector<size_t> marked = {};          // rows that are highlighted
};

class Page {
 public:
  // `subtitle`: a line below the title.
  explicit Page(std::string title, std::string subtitle = "");

  void section(const std::string& title);  // also a link at the top
  void heading(const std::string& text);   // within a section
  void paragraph(const std::string& text);
  void missing(const std::string& text);  // says what isn't there, and why
  void cards(const std::vector<std::pair<std::string, std::string>>& figures);  // name, value
  void table(const PageTable& table);
  void list(const std::vector<std::string>& items);  // numbered
  void verbatim(const std::string& text);
  // Charts added between begin_charts() and end_charts() are side by side where there is room.
  void begin_charts();
  void end_charts();
  // `chart` has "type" and "title"; `caption` is shown below.
  void chart(Json chart, const std::string& caption = "");
  // What is added between these is folded away at first.
  void begin_details(const std::string& summary);
  void end_details();

  std::string html() const;

 private:
  std::string title_, subtitle_, body_, links_;
  std::vector<Json> charts_;
  int sections_ = 0;
};

// Writes the page to a file of this name, which then exists completely or not at all.
void write_page(const Page& page, const std::filesystem::path& file);

// `text` with &, <, >, and quotes as entities, and without control characters.
std::string escaped(std::string_view text);
// JSON that can be inside a <script>: it has no <, > or &, whatever its strings hold.
std::string script_json(const Json& value);

// The nearest number with five significant digits, which is short as JSON; null if not finite.
Json short_number(double value);

// Of page.css and page.js.
std::string_view page_style();
std::string_view page_script();

}  // namespace fsdp::report
