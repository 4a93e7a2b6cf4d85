// Filters that take numbers, or make them, and `default`.
#include <charconv>
#include <cmath>

#include "base/format.h"
#include "chat/evaluator.h"

namespace fsdp::chat {
namespace {

constexpr int64_t kMostDigits = 30;

std::string_view without_space(const std::string& text) {
  const size_t begin = skip_white(text, 0), end = trimmed_end(text);
  return begin < end ? std::string_view(text).substr(begin, end - begin) : std::string_view();
}

template <class Number>
bool read_number(std::string_view text, Number& number) {
  if (text.starts_with('+') && !text.starts_with("+-")) text.remove_prefix(1);
  const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  return result.ec == std::errc{} && result.ptr == text.data() + text.size() && !text.empty();
}

std::optional<double> real_number(const Value& value) {
  int64_t storage;
  if (const int64_t* integer = integer_of(value, storage)) return static_cast<double>(*integer);
  if (const double* real = value.get<double>()) return *real;
  double number = 0;
  if (value.text() && read_number(without_space(value.text()->bytes()), number)) return number;
  return std::nullopt;
}

Value to_integer(Machine& machine, const Value& input, const Arguments& arguments) {
  const Values values = arguments.in_order(machine, "int", {"default", "base"});
  if (given(values[1]) && integer_argument(machine, values[1], 10) != 10)
    machine.refuse("numbers with a base other than 10 aren't supported");
  if (const Undefined* none = input.get<Undefined>()) machine.refuse(*none->why);
  int64_t storage;
  if (const int64_t* integer = integer_of(input, storage)) return *integer;
  if (input.text() && read_number(without_space(input.text()->bytes()), storage)) return storage;
  const auto real = real_number(input);
  if (!real || !std::isfinite(*real)) return given(values[0]) ? values[0] : Value(int64_t{0});
  if (std::abs(*real) >= 9.2e18) machine.refuse("a number is too large: 64 bits are supported");
  return static_cast<int64_t>(*real);
}

Value to_real(Machine& machine, const Value& input, const Arguments& arguments) {
  const Values values = arguments.in_order(machine, "float", {"default"});
  if (const Undefined* none = input.get<Undefined>()) machine.refuse(*none->why);
  if (const auto real = real_number(input)) return *real;
  return given(values[0]) ? values[0] : Value(0.0);
}

Value rounded(Machine& machine, const Value& input, const Arguments& arguments) {
  const Values values = arguments.in_order(machine, "round", {"precision", "method"});
  const int64_t digits = integer_argument(machine, values[0], 0);
  const std::string method =
      given(values[1]) ? text_argument(machine, values[1], "round").bytes() : "common";
  if (digits < 0 || digits > kMostDigits)
    machine.refuse(formatted("rounding to {} digits isn't supported", digits));
  int64_t storage;
  const int64_t* integer = integer_of(input, storage);
  const double* real = input.get<double>();
  if (!integer && !real) machine.refuse(formatted("a {} can't be rounded", type_name(input)));
  const double number = real ? *real : static_cast<double>(*integer);
  if (method == "common") {
    if (integer) return *integer;
    const std::string text = formatted("{:.{}f}", number, digits);
    double result = number;
    if (std::isfinite(number)) read_number(std::string_view(text), result);
    return result;
  }
  if (method != "ceil" && method != "floor")
    machine.refuse("the method of round is common, ceil or floor");
  const double scale = std::pow(10.0, static_cast<double>(digits));
  return (method == "ceil" ? std::ceil(number * scale) : std::floor(number * scale)) / scale;
}

}  // namespace

std::optional<Value> number_filter(Evaluator& evaluator, const std::string& name,
                                   const Value& input, const Arguments& arguments) {
  Machine& machine = evaluator.machine();
  if (name == "default" || name == "d") {
    const Values values = arguments.in_order(machine, name, {"default_value", "boolean"});
    const bool by_truth = given(values[1]) && truth(values[1]);
    if (!input.undefined() && !(by_truth && !truth(input))) return input;
    return given(values[0]) ? values[0] : make_text(machine, std::string());
  }
  if (name == "int") return to_integer(machine, input, arguments);
  if (name == "float") return to_real(machine, input, arguments);
  if (name == "round") return rounded(machine, input, arguments);
  if (name == "abs") {
    int64_t storage;
    if (const int64_t* integer = integer_of(input, storage); integer && *integer != INT64_MIN)
      return std::abs(*integer);
    if (const double* real = input.get<double>()) return std::abs(*real);
    machine.refuse(formatted("a {} has no absolute value", type_name(input)));
  }
  return std::nullopt;
}

}  // namespace fsdp::chat
