#include "train/config_values.h"

#include <algorithm>
#include <cmath>

#include "base/format.h"
#include "base/nearest.h"
#include "data/unicode.h"
#include "fsdp/error.h"

namespace fsdp::train {
namespace {

std::string joined(const std::vector<std::string>& words) {
  std::string all;
  for (const auto& word : words) all += (all.empty() ? "" : ", ") + word;
  return all;
}

// "1", "100000", "1.5", but "1e15".
std::string bound(double value) {
  bool plain = value == std::floor(value) && std::abs(value) < 1e7;
  return plain ? std::to_string(static_cast<int64_t>(value)) : toml_number(value);
}

// Upper bounds this large only keep numbers sane; only errors about values beyond them name them.
constexpr double kSane = 1e5;

std::string range(OptionCheck check, bool complete) {
  if (!complete && check.most >= kSane) check.most = INFINITY;
  std::string text;
  if (check.above) {
    text = " above " + bound(check.least);
    if (std::isfinite(check.most)) text += " and at most " + bound(check.most);
  } else if (std::isfinite(check.least)) {
    text = std::isfinite(check.most)
               ? formatted(" from {} to {}", bound(check.least), bound(check.most))
               : " of at least " + bound(check.least);
  } else if (std::isfinite(check.most)) {
    text = " of at most " + bound(check.most);
  }
  return text;
}

// An integer, also written as 1e9, as is common for large counts.
std::optional<int64_t> whole(const TomlHeld& value) {
  if (auto* number = std::get_if<int64_t>(&value)) return *number;
  auto* real = std::get_if<double>(&value);
  constexpr double kExact = 9007199254740992.0;  // 2^53: larger doubles skip integers
  if (!real || std::abs(*real) > kExact || *real != std::floor(*real)) return {};
  return static_cast<int64_t>(*real);
}

std::optional<double> real(const TomlHeld& value) {
  if (auto* number = std::get_if<int64_t>(&value)) return static_cast<double>(*number);
  if (auto* number = std::get_if<double>(&value)) return *number;
  return {};
}

bool in_range(double value, const OptionCheck& check) {
  return std::isfinite(value) && value <= check.most &&
         (check.above ? value > check.least : value >= check.least);
}

[[noreturn]] void refuse(const Option& option, const std::string& where, const std::string& got) {
  std::string near;
  if (auto* field = std::get_if<EnumField>(&option.target))
    near = nearest_word(field->names(), got);
  throw Error(
      formatted("{} is {}, but {} takes {}.", where, got, option.name(), expected(option, true)),
      formatted("{}{}: {}.", near.empty() ? "" : formatted("did you mean {}? ", near),
                option.name(), option.help));
}

// False if the option doesn't take the value.
struct Assign {
  const TomlHeld& value;
  const OptionCheck& check;

  template <typename T>
  bool operator()(T* target) const {  // bool, std::string, list
    auto* held = std::get_if<T>(&value);
    if (held) *target = *held;
    return held;
  }
  bool operator()(int64_t* target) const {
    auto number = whole(value);
    if (!number || !in_range(static_cast<double>(*number), check)) return false;
    *target = *number;
    return true;
  }
  bool operator()(double* target) const {
    auto number = real(value);
    if (!number || !in_range(*number, check)) return false;
    *target = *number;
    return true;
  }
  bool operator()(const EnumField& target) const {
    auto* word = std::get_if<std::string>(&value);
    return word && target.set(*word);
  }
};

}  // namespace

std::string expected(const Option& option, bool complete) {
  struct Words {
    const OptionCheck& check;
    bool complete;
    std::string operator()(bool*) const { return "true or false"; }
    std::string operator()(int64_t*) const { return "an integer" + range(check, complete); }
    std::string operator()(double*) const { return "a number" + range(check, complete); }
    std::string operator()(std::string*) const { return "a string"; }
    std::string operator()(std::vector<std::string>*) const { return "a list of strings"; }
    std::string operator()(const EnumField& field) const {
      return formatted("one of {}{}", joined(field.names()),
                       field.takes_number() ? ", or an integer of at least 2" : "");
    }
  };
  return std::visit(Words{option.check, complete}, option.target);
}

void set(const Option& option, const TomlEntry& entry, const std::string& where) {
  TomlHeld value = entry.value;
  // true and 4 need no quotes if they are names of the option.
  auto* field = std::get_if<EnumField>(&option.target);
  if (field && (field->takes_number() || is_switch(option)) &&
      !std::holds_alternative<std::string>(value))
    value = entry.raw;
  if (!std::visit(Assign{value, option.check}, option.target))
    refuse(option, formatted("{}: {}", where, option.key), entry.raw);
}

void set(const Option& option, const std::vector<std::string>& words) {
  const std::string& word = words.back();
  TomlHeld value = word;
  if (std::holds_alternative<std::vector<std::string>*>(option.target)) value = words;
  if (std::holds_alternative<int64_t*>(option.target) ||
      std::holds_alternative<double*>(option.target))
    value = parse_toml_number(word);
  if (std::holds_alternative<bool*>(option.target)) {
    auto flag = flag_word(word);
    value = flag ? TomlHeld(*flag) : TomlHeld();
  }
  if (std::holds_alternative<EnumField>(option.target) && is_switch(option))
    if (auto flag = flag_word(word)) value = std::string(*flag ? "true" : "false");
  for (const std::string& one : words)
    if (data::valid_prefix(one) != one.size())
      throw Error(option.flag() + " isn't valid UTF-8.",
                  "a run keeps its options in a file that must be UTF-8: use other names.");
  if (!std::visit(Assign{value, option.check}, option.target))
    refuse(option, option.flag(), formatted("\"{}\"", word));
}

bool is_switch(const Option& option) {
  if (std::holds_alternative<bool*>(option.target)) return true;
  const auto* field = std::get_if<EnumField>(&option.target);
  if (!field || field->takes_number()) return false;
  const auto names = field->names();
  return std::find(names.begin(), names.end(), "true") != names.end();
}

void copy_value(const Option& from, const Option& to) {
  auto copy = [&](const auto& value) {
    using Field = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Field, EnumField>)
      std::get<Field>(to.target).set(value.name());
    else
      *std::get<Field>(to.target) = *value;
  };
  std::visit(copy, from.target);
}

std::optional<bool> flag_word(const std::string& word) {
  for (const char* yes : {"true", "yes", "on", "1"})
    if (word == yes) return true;
  for (const char* no : {"false", "no", "off", "0"})
    if (word == no) return false;
  return {};
}

std::string value_text(const Option& option) {
  struct Written {
    std::string operator()(bool* value) const { return *value ? "true" : "false"; }
    std::string operator()(int64_t* value) const { return std::to_string(*value); }
    std::string operator()(double* value) const { return toml_number(*value); }
    std::string operator()(std::string* value) const { return toml_string(*value); }
    std::string operator()(std::vector<std::string>* value) const {
      std::vector<std::string> items;
      for (const auto& one : *value) items.push_back(toml_string(one));
      return formatted("[{}]", joined(items));
    }
    std::string operator()(const EnumField& field) const {
      const bool number = field.takes_number() && field.name() != "auto";
      const bool bare = number || field.name() == "true" || field.name() == "false";
      return bare ? field.name() : toml_string(field.name());
    }
  };
  return std::visit(Written{}, option.target);
}

}  // namespace fsdp::train
