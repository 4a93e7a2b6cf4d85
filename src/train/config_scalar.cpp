#include "train/config_scalar.h"

#include <charconv>
#include <cmath>
#include <cstdio>

namespace fsdp::train::toml {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

}  // namespace

bool is_control(char c) {
  auto byte = static_cast<unsigned char>(c);
  return (byte < 0x20 && c != '\t') || byte == 0x7f;
}

std::string plain_digits(std::string_view text, int base) {
  std::string digits;
  bool after_digit = false;
  for (char c : text) {
    if (c == '_') {
      if (!after_digit) return "";
      after_digit = false;
      continue;
    }
    int worth = is_digit(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c - 'A' + 10;
    bool is_letter = (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
    if ((!is_digit(c) && !is_letter) || worth >= base) return "";
    digits += c;
    after_digit = true;
  }
  return after_digit ? digits : "";
}

std::variant<std::monostate, bool, int64_t, double> scalar(std::string_view text) {
  if (text == "true") return true;
  if (text == "false") return false;
  std::string_view body = text;
  bool negative = body.starts_with('-');
  bool has_sign = negative || body.starts_with('+');
  if (has_sign) body.remove_prefix(1);
  if (body == "inf") return negative ? -INFINITY : INFINITY;
  if (body == "nan") return std::nan("");

  int base = 10;
  if (!has_sign && body.size() > 2 && body[0] == '0') {
    base = body[1] == 'x' ? 16 : body[1] == 'o' ? 8 : body[1] == 'b' ? 2 : 10;
    if (base != 10) body.remove_prefix(2);
  }
  std::string digits = plain_digits(body, base);
  bool has_zero_first = base == 10 && digits.size() > 1 && digits[0] == '0';
  if (!digits.empty() && !has_zero_first) {
    std::string number = (negative ? "-" : "") + digits;
    int64_t whole = 0;
    auto end = number.data() + number.size();
    if (std::from_chars(number.data(), end, whole, base).ec == std::errc()) return whole;
    if (base != 10) return {};
  }
  if (base != 10 || has_zero_first) return {};

  // A float: digits, then a point with digits or an exponent or both.
  size_t exponent = body.find_first_of("eE");
  std::string_view mantissa = body.substr(0, exponent);
  size_t point = mantissa.find('.');
  std::string number = plain_digits(mantissa.substr(0, point), 10);
  if (number.empty() || (number.size() > 1 && number[0] == '0')) return {};
  if (point != std::string_view::npos) {
    std::string fraction = plain_digits(mantissa.substr(point + 1), 10);
    if (fraction.empty()) return {};
    number += "." + fraction;
  }
  if (exponent != std::string_view::npos) {
    std::string_view power = body.substr(exponent + 1);
    bool falls = power.starts_with('-');
    if (falls || power.starts_with('+')) power.remove_prefix(1);
    std::string power_digits = plain_digits(power, 10);
    if (power_digits.empty()) return {};
    number += std::string("e") + (falls ? "-" : "") + power_digits;
  }
  double real = 0;
  // Out of range is an error: neither infinity nor zero is what was meant.
  if (std::from_chars(number.data(), number.data() + number.size(), real).ec != std::errc()) {
    return {};
  }
  return negative ? -real : real;
}

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        if (is_control(c)) {
          char code[8];
          std::snprintf(code, sizeof code, "\\u%04X", static_cast<unsigned char>(c));
          out += code;
        } else {
          out += c;
        }
    }
  }
  return out + "\"";
}

std::string written(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[64];
  auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;
  std::string text(buffer, end);
  size_t exponent = text.find('e');
  if (exponent == std::string::npos) {
    return text.find('.') == std::string::npos ? text + ".0" : text;
  }
  // 1e-05 to 1e-5.
  size_t sign = exponent + 1;
  bool falls = text[sign] == '-';
  size_t first = text.find_first_not_of("+-0", sign);
  return text.substr(0, exponent) + "e" + (falls ? "-" : "") + text.substr(first);
}

}  // namespace fsdp::train::toml
