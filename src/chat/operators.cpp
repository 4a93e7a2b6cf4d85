#include "chat/operators.h"

#include <algorithm>
#include <cmath>

#include "base/format.h"
#include "chat/machine.h"
#include "chat/print.h"

namespace fsdp::chat {
namespace {

[[noreturn]] void refuse_operator(Machine& machine, const std::string& sign, const Value& a,
                                  const Value& b) {
  for (const Value* value : {&a, &b})
    if (const Undefined* none = value->get<Undefined>()) machine.refuse(*none->why);
  machine.refuse(formatted("{} {} {} isn't defined", type_name(a), sign, type_name(b)));
}

Value integers(Machine& machine, const std::string& sign, int64_t a, int64_t b) {
  int64_t result = 0;
  bool fits = true;
  if (sign == "+") fits = !__builtin_add_overflow(a, b, &result);
  if (sign == "-") fits = !__builtin_sub_overflow(a, b, &result);
  if (sign == "*") fits = !__builtin_mul_overflow(a, b, &result);
  const bool divides = sign == "/" || sign == "//" || sign == "%";
  if (divides && b == 0) machine.refuse("a number is divided by 0");
  if (sign == "/") return static_cast<double>(a) / static_cast<double>(b);
  if (sign == "//" || sign == "%") {
    if (b == -1) return integers(machine, "*", sign == "%" ? 0 : a, -1);
    int64_t rest = a % b;
    if (rest != 0 && (rest < 0) != (b < 0)) rest += b;
    return sign == "%" ? rest : (a - rest) / b;
  }
  if (sign == "**") {
    if (b < 0) return std::pow(static_cast<double>(a), static_cast<double>(b));
    result = 1;
    const bool small = a >= -1 && a <= 1;
    for (int64_t i = small ? std::min<int64_t>(b, 2 + b % 2) : b; i > 0 && fits; --i)
      fits = !__builtin_mul_overflow(result, a, &result);
  }
  if (!fits) machine.refuse("a number is too large: 64 bits are supported");
  return result;
}

Value reals(Machine& machine, const std::string& sign, double a, double b) {
  if (sign == "+") return a + b;
  if (sign == "-") return a - b;
  if (sign == "*") return a * b;
  if (sign == "**") return std::pow(a, b);
  if (b == 0) machine.refuse("a number is divided by 0");
  if (sign == "/") return a / b;
  double rest = std::fmod(a, b);
  if (rest != 0 && (rest < 0) != (b < 0)) rest += b;
  if (sign == "%") return rest == 0 ? std::copysign(0.0, b) : rest;
  return std::round((a - rest) / b);
}

bool real_of(const Value& value, double& real) {
  int64_t storage;
  if (const int64_t* integer = integer_of(value, storage))
    real = static_cast<double>(*integer);
  else if (const double* number = value.get<double>())
    real = *number;
  else
    return false;
  return true;
}

// What is joined to text that went through `safe` or `escape` is escaped, as in Python.
Value joined_texts(Machine& machine, const Value& a, const Value& b) {
  const bool markup = a.markup || b.markup;
  const auto part = [&](const Value& value) {
    return markup && !value.markup ? html_escaped(machine, *value.text()) : *value.text();
  };
  machine.make(a.text()->size() + b.text()->size());
  Text text = part(a);
  text.append(part(b));
  Value result = make_text(machine, std::move(text));
  result.markup = markup;
  return result;
}

Value repeated(Machine& machine, const Value& value, int64_t times) {
  const Text* text = value.text();
  const List* list = value.list();
  const size_t size = text ? text->size() : list->items.size() * sizeof(Value);
  times = std::max<int64_t>(times, 0);
  if (size > 0 && times > (int64_t{1} << 40) / static_cast<int64_t>(size))
    machine.refuse("a repetition makes too much text");
  machine.make(size * static_cast<size_t>(times));
  Text result;
  Values items;
  for (int64_t i = 0; i < (size > 0 ? times : 0); ++i) {
    if (text)
      result.append(*text);
    else
      items.insert(items.end(), list->items.begin(), list->items.end());
  }
  return text ? make_text(machine, std::move(result))
              : make_list(machine, std::move(items), list->kind);
}

Value concatenated(Machine& machine, const List& a, const List& b) {
  machine.make((a.items.size() + b.items.size()) * sizeof(Value));
  Values items = a.items;
  items.insert(items.end(), b.items.begin(), b.items.end());
  return make_list(machine, std::move(items), a.kind);
}

bool adds_up(const List& list) {
  return list.kind == List::kList || list.kind == List::kTuple;
}

// One conversion of a format with %, and what it is laid out by.
struct Conversion {
  bool left = false, zero = false, plus = false, space = false;
  int64_t width = 0, precision = -1;
};

constexpr int64_t kWidest = 10'000;

std::string laid_out(const Conversion& how, std::string text, bool number) {
  const auto size = static_cast<int64_t>(count_codes(text));
  if (size >= how.width) return text;
  const auto missing = static_cast<size_t>(how.width - size);
  if (how.left) return text + std::string(missing, ' ');
  if (!how.zero || !number) return std::string(missing, ' ') + text;
  return text.insert(text.starts_with('-') || text.starts_with('+') ? 1 : 0,
                     std::string(missing, '0'));
}

std::string with_sign(const Conversion& how, std::string text) {
  if (text.starts_with('-')) return text;
  return (how.plus ? "+" : how.space ? " " : "") + text;
}

struct PercentFormat {
  Machine& machine;
  std::string_view format;
  size_t at = 0;

  int64_t digits() {
    int64_t value = 0;
    for (; at < format.size() && format[at] >= '0' && format[at] <= '9'; ++at)
      value = std::min<int64_t>(value * 10 + (format[at] - '0'), kWidest + 1);
    if (value > kWidest) machine.refuse("a format is too wide");
    return value;
  }

  Conversion flags() {
    Conversion how;
    for (; at < format.size(); ++at) {
      const char c = format[at];
      if (c == '-')
        how.left = true;
      else if (c == '0')
        how.zero = true;
      else if (c == '+')
        how.plus = true;
      else if (c == ' ')
        how.space = true;
      else
        break;
    }
    how.width = digits();
    if (at < format.size() && format[at] == '.') {
      ++at;
      how.precision = digits();
    }
    return how;
  }

  Text converted(const Value& value) {
    const Conversion how = flags();
    const char kind = at < format.size() ? format[at++] : '\0';
    if (kind == 's' || kind == 'r') {
      Text text =
          kind == 's' ? printed(machine, value) : Text(repr(machine, value), value.source());
      if (how.precision >= 0) {
        const auto starts = code_starts(text.bytes());
        text = text.part(
            0, starts[std::min<size_t>(static_cast<size_t>(how.precision), starts.size() - 1)]);
      }
      if (static_cast<int64_t>(count_codes(text.bytes())) >= how.width) return text;
      return Text(laid_out(how, text.bytes(), false), text.origin());
    }
    double real = 0;
    if (!real_of(value, real))
      machine.refuse(formatted("%{} needs a number, not {}", kind, type_name(value)));
    if (kind == 'd' || kind == 'i' || kind == 'x' || kind == 'X') {
      int64_t storage;
      const int64_t* integer = integer_of(value, storage);
      if (!integer && (kind == 'x' || kind == 'X' || std::abs(real) >= 9e18))
        machine.refuse("a number isn't an integer, or too large");
      const int64_t whole = integer ? *integer : static_cast<int64_t>(real);
      std::string text = kind == 'x'   ? formatted("{:x}", whole)
                         : kind == 'X' ? formatted("{:X}", whole)
                                       : std::to_string(whole);
      return Text(laid_out(how, with_sign(how, text), true), value.source());
    }
    if (kind == 'f' || kind == 'F') {
      std::string text =
          formatted("{:.{}f}", real, std::min<int64_t>(how.precision < 0 ? 6 : how.precision, 300));
      return Text(laid_out(how, with_sign(how, text), true), value.source());
    }
    machine.refuse(formatted("the conversion %{} isn't supported", kind ? kind : ' '));
  }
};

}  // namespace

Value format_percent(Machine& machine, const Text& text, const Values& values) {
  PercentFormat format{machine, text.bytes()};
  Text out;
  size_t used = 0;
  while (format.at < text.size()) {
    const size_t sign = std::min(text.bytes().find('%', format.at), text.size());
    out.append(text.part(format.at, sign));
    if (sign == text.size()) break;
    format.at = sign + 1;
    if (text.bytes().compare(format.at, 1, "%") == 0) {
      out.append("%");
      ++format.at;
      continue;
    }
    if (used == values.size()) machine.refuse("there are too few values for a format");
    const Text part = format.converted(values[used++]);
    machine.make(part.size() + out.size() / 64);
    out.append(part);
  }
  if (used < values.size()) machine.refuse("there are too many values for a format");
  return make_text(machine, std::move(out));
}

Value binary(Machine& machine, const std::string& sign, const Value& a, const Value& b) {
  int64_t left, right;
  const int64_t *i = integer_of(a, left), *j = integer_of(b, right);
  if (i && j) return integers(machine, sign, *i, *j);
  double x, y;
  if (real_of(a, x) && real_of(b, y)) return reals(machine, sign, x, y);
  if (a.text() && b.text() && sign == "+") return joined_texts(machine, a, b);
  if (sign == "*" && i && (b.text() || (b.list() && adds_up(*b.list()))))
    return repeated(machine, b, *i);
  if (sign == "*" && j && (a.text() || (a.list() && adds_up(*a.list()))))
    return repeated(machine, a, *j);
  const List *p = a.list(), *q = b.list();
  if (p && q && sign == "+" && p->kind == q->kind && adds_up(*p))
    return concatenated(machine, *p, *q);
  if (a.text() && sign == "%" && !b.undefined()) {
    if (b.dict()) machine.refuse("formatting with a dict isn't supported");
    return format_percent(machine, *a.text(), q && q->kind == List::kTuple ? q->items : Values{b});
  }
  refuse_operator(machine, sign, a, b);
}

Value negative(Machine& machine, const Value& value) {
  int64_t storage;
  if (const int64_t* integer = integer_of(value, storage))
    return integers(machine, "-", 0, *integer);
  if (const double* real = value.get<double>()) return -*real;
  refuse_operator(machine, "-", Value(int64_t{0}), value);
}

Value positive(Machine& machine, const Value& value) {
  int64_t storage;
  if (const int64_t* integer = integer_of(value, storage)) return *integer;
  if (const double* real = value.get<double>()) return *real;
  refuse_operator(machine, "+", Value(int64_t{0}), value);
}

bool holds(Machine& machine, const std::string& sign, const Value& a, const Value& b) {
  if (sign == "==") return equal(machine, a, b);
  if (sign == "!=") return !equal(machine, a, b);
  if (sign == "in") return contains(machine, b, a);
  if (sign == "not in") return !contains(machine, b, a);
  for (const Value* value : {&a, &b})
    if (const Undefined* none = value->get<Undefined>()) machine.refuse(*none->why);
  const int order = compare(machine, a, b);
  if (sign == "<") return order < 0;
  if (sign == "<=") return order <= 0;
  if (sign == ">") return order > 0;
  return order >= 0;
}

}  // namespace fsdp::chat
