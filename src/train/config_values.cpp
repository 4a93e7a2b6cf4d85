#include "train/config_values.h"

#include <algorithm>
#include <cmath>
#include <optional>

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

// Upper bounds from here on only keep numbers sane; only a value beyond them needs to know.
constexpr double kSane = 1e5;

std::string range(OptionCheck check, bool complete) {
  if (!complete && check.most >= kSane) check.most = INFINITY;
  std::string text;
  if (check.above) {
    text = " above " + bound(check.least);
    if (std::isfinite(check.most)) text += " and at most " + bound(check.most);
  } else if (std::isfinite(check.least)) {
    text = std::isfinite(check.most) ? " from " + bound(check.least) + " to " + bound(check.most)
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

bool is_choice(const std::string& word, const OptionCheck& check) {
  if (check.choices.empty()) return true;
  if (std::find(check.choices.begin(), check.choices.end(), word) != check.choices.end())
    return true;
  if (!check.or_number) return false;
  auto value = parse_toml_number(word);
  auto* number = std::get_if<int64_t>(&value);
  return number && *number >= 2 && *number <= 1'000'000 && std::to_string(*number) == word;
}

[[noreturn]] void refuse(const Option& option, const std::string& where, const std::string& got) {
  std::string near = nearest_word(option.check.choices, got);
  throw Error(
      where + " is " + got + ", but " + option.name() + " takes " + expected(option, true) + ".",
      (near.empty() ? "" : "did you mean " + near + "? ") + option.name() + ": " + option.help +
          ".");
}

// Sets any option but a list. `word`: the value as a string.
void set_scalar(const Option& option, const TomlHeld& value, const std::optional<std::string>& word,
                const std::string& where, const std::string& got) {
  if (auto* target = std::get_if<bool*>(&option.target)) {
    if (auto* flag = std::get_if<bool>(&value)) return void(**target = *flag);
  } else if (auto* target = std::get_if<int64_t*>(&option.target)) {
    auto number = whole(value);
    if (number && in_range(static_cast<double>(*number), option.check))
      return void(**target = *number);
  } else if (auto* target = std::get_if<double*>(&option.target)) {
    auto number = real(value);
    if (number && in_range(*number, option.check)) return void(**target = *number);
  } else if (auto* target = std::get_if<std::string*>(&option.target)) {
    if (word && is_choice(*word, option.check)) return void(**target = *word);
  }
  refuse(option, where, got);
}

}  // namespace

std::string expected(const Option& option, bool complete) {
  struct Words {
    const OptionCheck& check;
    bool complete;
    std::string operator()(bool*) const { return "true or false"; }
    std::string operator()(int64_t*) const { return "an integer" + range(check, complete); }
    std::string operator()(double*) const { return "a number" + range(check, complete); }
    std::string operator()(std::string*) const {
      if (check.choices.empty()) return "a string";
      return "one of " + joined(check.choices) +
             (check.or_number ? ", or an integer of at least 2" : "");
    }
    std::string operator()(std::vector<std::string>*) const { return "a list of strings"; }
  };
  return std::visit(Words{option.check, complete}, option.target);
}

void set(const Option& option, const TomlEntry& entry, const std::string& where) {
  std::string at = where + ": " + option.key;
  if (auto* target = std::get_if<std::vector<std::string>*>(&option.target)) {
    auto* list = std::get_if<std::vector<std::string>>(&entry.value);
    if (!list) refuse(option, at, entry.raw);
    **target = *list;
    return;
  }
  std::optional<std::string> word;
  if (auto* text = std::get_if<std::string>(&entry.value)) word = *text;
  // true and 4 need no quotes if they are valid strings for the option.
  if (option.check.or_number && !word && is_choice(entry.raw, option.check)) word = entry.raw;
  set_scalar(option, entry.value, word, at, entry.raw);
}

void set(const Option& option, const std::vector<std::string>& words) {
  for (const std::string& one : words)
    if (data::valid_prefix(one) != one.size())
      throw Error(option.flag() + " isn't valid UTF-8.",
                  "a run keeps its options in a file that must be UTF-8: use other names.");
  if (auto* target = std::get_if<std::vector<std::string>*>(&option.target)) {
    **target = words;
    return;
  }
  const std::string& word = words.back();
  TomlHeld scalar;
  if (std::holds_alternative<bool*>(option.target)) {
    if (auto flag = flag_word(word)) scalar = *flag;
  } else {
    scalar = parse_toml_number(word);
  }
  set_scalar(option, scalar, word, option.flag(), "\"" + word + "\"");
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
    const OptionCheck& check;
    std::string operator()(bool* value) const { return *value ? "true" : "false"; }
    std::string operator()(int64_t* value) const { return std::to_string(*value); }
    std::string operator()(double* value) const { return toml_number(*value); }
    std::string operator()(std::string* value) const {
      bool bare = check.or_number && *value != "auto";
      return bare ? *value : toml_string(*value);
    }
    std::string operator()(std::vector<std::string>* value) const {
      std::string all;
      for (const auto& one : *value) all += (all.empty() ? "" : ", ") + toml_string(one);
      return "[" + all + "]";
    }
  };
  return std::visit(Written{option.check}, option.target);
}

}  // namespace fsdp::train
