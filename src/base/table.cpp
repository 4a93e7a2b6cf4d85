#include "base/table.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <ostream>
#include <sstream>

#include "base/format.h"
#include "base/terminal.h"
#include "fsdp/error.h"

namespace fsdp::base {
namespace {

// Columns on a terminal: counts the bytes that start a UTF-8 character.
size_t width(const std::string& text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
}

std::string fixed(double value, int digits) {
  return formatted("{:.{}f}", value, digits);
}

constexpr int kWords = -1, kBytes = -2;

struct LineColumn {
  Table::Column head;
  int digits;  // of a number, or one of the above
};

// "KEY=TITLE FORMAT"
LineColumn line_column(std::string spec) {
  LineColumn column{{}, kWords};
  spec.erase(0, spec.find_first_not_of(' '));
  if (const size_t format = spec.rfind(' '); format != std::string::npos) {
    if (spec[format + 1] == '.') column.digits = std::stoi(spec.substr(format + 2));
    if (spec.substr(format + 1) == "B") column.digits = kBytes;
    if (column.digits != kWords) spec.erase(format);
  }
  const size_t title = spec.find('=');
  column.head.key = spec.substr(0, title);
  column.head.title = title == std::string::npos ? spec : spec.substr(title + 1);
  if (title == std::string::npos) std::ranges::replace(column.head.title, '_', ' ');
  column.head.align = column.digits == kWords ? Table::kLeft : Table::kRight;
  return column;
}

Cell cell_of(const nlohmann::ordered_json& line, const LineColumn& column) {
  const std::string& key = column.head.key;
  const auto found = line.find(key);
  if (found == line.end()) return {nullptr, ""};
  if (found->is_string()) return text(*found);
  if (!found->is_number() || !std::isfinite(found->get<double>())) return {nullptr, "-"};
  const double value = *found;
  Cell cell{*found, fixed(value, std::max(0, column.digits))};
  if (column.digits == kBytes) cell.text = value == 0 ? "-" : human_bytes(value);
  cell.text = line.value(key + "_text", cell.text);
  if (const auto good = line.find(key + "_good"); good != line.end())
    cell.colour = *good ? "32" : "31";
  return cell;
}

}  // namespace

Cell number(double value, int digits) {
  return {value, fixed(value, digits)};
}

Cell text(std::string value) {
  return {value, value};
}

void Table::add(std::vector<Cell> row) {
  if (row.size() != columns_.size()) throw Error("a table row has the wrong number of cells.", "");
  rows_.push_back(std::move(row));
}

void Table::print(std::ostream& out, bool json) const {
  if (json) {
    for (const auto& row : rows_) {
      nlohmann::ordered_json line;
      for (size_t c = 0; c < columns_.size(); ++c) line[columns_[c].key] = row[c].value;
      out << line.dump() << "\n";
    }
    return;
  }
  print_columns(out, /*headings=*/true);
}

void Table::print_rows(std::ostream& out) const {
  print_columns(out, /*headings=*/false);
}

void Table::print_columns(std::ostream& out, bool headings) const {
  std::vector<size_t> shown, widths(columns_.size());
  for (size_t c = 0; c < columns_.size(); ++c) {
    if (columns_[c].title.empty()) continue;
    shown.push_back(c);
    if (headings) widths[c] = width(columns_[c].title);
    for (const auto& row : rows_) widths[c] = std::max(widths[c], width(row[c].text));
  }
  auto line = [&](auto cell_of, auto colour_of) {
    std::string text;
    for (size_t c : shown) {
      std::string cell = cell_of(c), pad(widths[c] - width(cell), ' ');
      bool last = c == shown.back();
      std::string painted = paint(STDOUT, colour_of(c), cell);
      if (columns_[c].align == kRight)
        text += pad + painted;
      else
        text += painted + (last ? "" : pad);
      if (!last) text += "  ";
    }
    out << text << "\n";
  };
  if (headings) line([&](size_t c) { return columns_[c].title; }, [](size_t) { return "1"; });
  for (const auto& row : rows_)
    line([&](size_t c) { return row[c].text; }, [&](size_t c) { return row[c].colour.c_str(); });
}

Table table_of(const std::string& columns, const std::vector<nlohmann::ordered_json>& lines) {
  std::vector<LineColumn> all;
  std::vector<Table::Column> heads;
  std::istringstream parts(columns);
  for (std::string part; std::getline(parts, part, ';');) {
    all.push_back(line_column(part));
    heads.push_back(all.back().head);
  }
  Table table(heads);
  for (const auto& line : lines) {
    std::vector<Cell> cells;
    for (const LineColumn& column : all) cells.push_back(cell_of(line, column));
    table.add(cells);
  }
  return table;
}

std::optional<int64_t> parse_bytes(const std::string& text, int kilo) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  std::string unit;
  for (; *end; ++end) unit += static_cast<char>(std::toupper(static_cast<unsigned char>(*end)));
  constexpr const char* kPrefixes = "KMGT";
  double scale = unit.empty() || unit == "B" ? 1 : 0;
  for (int i = 0; i < 4; ++i) {
    const std::string prefix(1, kPrefixes[i]);
    if (unit == prefix || unit == prefix + "B") scale = std::pow(kilo, i + 1);
    if (unit == prefix + "IB") scale = std::pow(1024.0, i + 1);
  }
  const double bytes = value * scale;
  if (!std::isfinite(bytes) || bytes < 1 || bytes > 9e18) return std::nullopt;
  return static_cast<int64_t>(bytes);
}

std::string human_bytes(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 4) bytes /= 1024, ++unit;
  bool whole = std::abs(bytes - std::round(bytes)) < 0.05 || bytes >= 100;
  return fixed(bytes, whole ? 0 : 1) + " " + units[unit];
}

std::string with_separators(int64_t number) {
  std::string digits = std::to_string(number), out;
  if (number < 0) digits.erase(0, 1);
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return number < 0 ? "-" + out : out;
}

std::string count_of(int64_t count, const std::string& noun) {
  return formatted("{} {}{}", with_separators(count), noun, count == 1 ? "" : "s");
}

}  // namespace fsdp::base
