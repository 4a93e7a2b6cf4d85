#include "report/page.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "base/file_error.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "fsdp/error.h"

namespace fsdp::report {
namespace {

std::string tag(const char* name, const std::string& style, const std::string& text) {
  return formatted("<{}{}>{}</{}>", name,
                   style.empty() ? "" : formatted(" class=\"{}\"", escaped(style)), escaped(text),
                   name);
}

std::string table_row(const char* name, const std::vector<PageCell>& cells,
                      const std::vector<PageCell>& columns, bool marked) {
  std::string out = marked ? "<tr class=\"differs\">" : "<tr>";
  for (size_t i = 0; i < cells.size(); ++i) {
    std::string style = i < columns.size() ? columns[i].style : "";
    if (&cells != &columns && !cells[i].style.empty())
      style += (style.empty() ? "" : " ") + cells[i].style;
    out += tag(name, style, cells[i].text);
  }
  return out + "</tr>\n";
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string out;
  for (char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else if (c == '\'')
      out += "&#39;";
    else if ((byte < 0x20 && c != '\n' && c != '\t') || byte == 0x7f)
      out += "\uFFFD";
    else
      out += c;
  }
  return out;
}

std::string script_json(const Json& value) {
  // ensure_ascii also escapes U+2028 and U+2029; invalid UTF-8 becomes U+FFFD.
  std::string out;
  for (char c : value.dump(-1, ' ', true, Json::error_handler_t::replace)) {
    if (c == '<' || c == '>' || c == '&')
      out += formatted("\\u00{:02x}", static_cast<int>(c));
    else
      out += c;
  }
  return out;
}

Json short_number(double value) {
  if (!std::isfinite(value)) return nullptr;
  if (value == std::floor(value) && std::abs(value) < 1e5) return static_cast<int64_t>(value);
  return std::strtod(formatted("{:.5g}", value).c_str(), nullptr);
}

Page::Page(std::string title, std::string subtitle)
    : title_(std::move(title)), subtitle_(std::move(subtitle)) {}

void Page::section(const std::string& title) {
  if (sections_ > 0) body_ += "</section>\n";
  ++sections_;
  body_ += formatted("<section id=\"s{}\">\n{}\n", sections_, tag("h2", "", title));
  links_ += formatted("<a href=\"#s{}\">{}</a>\n", sections_, escaped(title));
}

void Page::heading(const std::string& text) {
  body_ += tag("h3", "", text) + "\n";
}

void Page::paragraph(const std::string& text) {
  body_ += tag("p", "", text) + "\n";
}

void Page::missing(const std::string& text) {
  body_ += tag("p", "missing faint", text) + "\n";
}

void Page::cards(const std::vector<std::pair<std::string, std::string>>& figures) {
  body_ += "<div class=\"cards\">\n";
  for (const auto& [name, value] : figures)
    body_ +=
        formatted("<div class=\"card\"><b>{}</b>{}</div>\n", escaped(value), tag("span", "", name));
  body_ += "</div>\n";
}

void Page::table(const PageTable& table) {
  body_ += "<div class=\"wide\"><table>\n";
  if (!table.caption.empty()) body_ += tag("caption", "", table.caption) + "\n";
  body_ += "<thead>" + table_row("th", table.columns, table.columns, false) + "</thead>\n<tbody>\n";
  for (size_t i = 0; i < table.rows.size(); ++i) {
    const bool marked = std::count(table.marked.begin(), table.marked.end(), i) > 0;
    body_ += table_row("td", table.rows[i], table.columns, marked);
  }
  body_ += "</tbody></table></div>\n";
}

void Page::list(const std::vector<std::string>& items) {
  body_ += "<ol class=\"next\">\n";
  for (const std::string& item : items) body_ += tag("li", "", item) + "\n";
  body_ += "</ol>\n";
}

void Page::verbatim(const std::string& text) {
  body_ += tag("pre", "", text) + "\n";
}

void Page::begin_charts() {
  body_ += "<div class=\"charts\">\n";
}

void Page::end_charts() {
  body_ += "</div>\n";
}

void Page::chart(Json chart, const std::string& caption) {
  body_ += formatted("<figure data-chart=\"{}\">{}", charts_.size(),
                     tag("h3", "", chart.value("title", "")));
  if (!caption.empty()) body_ += tag("figcaption", "", caption);
  body_ += "</figure>\n";
  charts_.push_back(std::move(chart));
}

void Page::begin_details(const std::string& summary) {
  body_ += "<details>" + tag("summary", "", summary) + "\n";
}

void Page::end_details() {
  body_ += "</details>\n";
}

std::string Page::html() const {
  std::string out = "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
  // Nothing may be loaded, whatever text a run brings along.
  out +=
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
      "'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta name=\"color-scheme\" content=\"light dark\">\n<link rel=\"icon\" href=\"data:,\">\n";
  out += tag("title", "", title_) + formatted("\n<style>\n{}</style>\n</head>\n", page_style());
  out += "<body>\n<a class=\"skip\" href=\"#content\">Skip to the content</a>\n<header>\n";
  out += tag("h1", "", title_) + "\n";
  if (!subtitle_.empty()) out += tag("p", "faint", subtitle_) + "\n";
  if (sections_ > 1) out += formatted("<nav aria-label=\"Sections\">\n{}</nav>\n", links_);
  out += "</header>\n<main id=\"content\">\n" + body_ + (sections_ > 0 ? "</section>\n" : "");
  if (!charts_.empty())
    out += "<noscript><p class=\"missing\">Charts need JavaScript; tables don't.</p></noscript>\n";
  out +=
      "</main>\n<footer>Written by fsdp. Move over a chart for values; drag to zoom; arrow keys "
      "move along a chosen chart.</footer>\n";
  out += formatted("<script type=\"application/json\" id=\"data\">{}</script>\n",
                   script_json(Json(charts_)));
  return out + formatted("<script>\n{}</script>\n</body>\n</html>\n", page_script());
}

void write_page(const Page& page, const std::filesystem::path& file) {
  const std::string draft = file.string() + ".partial";
  ignore_size_signal();
  {
    std::ofstream out(place_of_file(draft), std::ios::binary | std::ios::trunc);
    out << page.html();
    out.flush();
    if (!out) {
      const int why = errno;
      ::unlink(draft.c_str());
      throw Error(formatted("can't write {}: {}.", file, errno_text(why)), file_hint(why));
    }
  }
  std::error_code problem;
  std::filesystem::rename(draft, file, problem);
  if (!problem) return;
  ::unlink(draft.c_str());
  throw Error(formatted("can't write {}: {}.", file, problem.message()),
              file_hint(problem.value()));
}

}  // namespace fsdp::report
