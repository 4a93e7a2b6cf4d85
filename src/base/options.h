// Options: the fields of a config, each described once with its key, help and range. Flags, keys in
// files, --help, written configs and documents follow from the list.
//
// A section of the config is a struct with two functions beside it: describe() adds its fields to a
// list, check() throws an Error if they contradict each other.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/enum_names.h"
#include "base/namespace.h"

namespace fsdp::base {

// A value of an enum, or a number of at least 2.
template <typename Enum>
struct OrNumber {
  Enum value{};
  int64_t number = 0;  // 0: `value` counts
  bool operator==(Enum other) const { return number == 0 && value == other; }
};

template <typename Enum>
std::string enum_name(const OrNumber<Enum>& either) {
  return either.number > 0 ? std::to_string(either.number) : enum_name(either.value);
}

// An enum field of any type.
class EnumField {
 public:
  template <typename Enum>
  explicit EnumField(Enum& field)
      : table_(kEnumNames<Enum>),
        field_(&field),
        get_([](const void* at) { return static_cast<size_t>(*static_cast<const Enum*>(at)); }),
        set_([](void* at, size_t value) { *static_cast<Enum*>(at) = static_cast<Enum>(value); }) {}
  template <typename Enum>
  explicit EnumField(OrNumber<Enum>& field) : EnumField(field.value) {
    number_ = &field.number;
  }

  // Refuses that many names from the beginning and from the end of the table.
  void leave_out(size_t first, size_t last);

  std::vector<std::string> names() const;  // that it takes
  std::string help() const;                // of these: "; auto: chosen by device"
  bool takes_number() const { return number_ != nullptr; }
  const void* address() const { return field_; }
  std::string name() const;  // of the value, or its digits
  std::string name(size_t value) const { return std::string(table_[value].name); }
  bool set(const std::string& word) const;  // false if it doesn't take that

 private:
  std::span<const EnumName> table_;
  size_t first_ = 0, left_out_ = 0;  // rows left out at the beginning and at the end
  void* field_;
  size_t (*get_)(const void*);
  void (*set_)(void*, size_t);
  int64_t* number_ = nullptr;
};

using Target =
    std::variant<bool*, int64_t*, double*, std::string*, std::vector<std::string>*, EnumField>;

// A key has an effect only if an enum field has one of some values.
struct OnlyWith {
  OnlyWith() = default;
  template <typename Enum>
  OnlyWith(const Enum& other, const std::type_identity_t<std::vector<Enum>>& some) : field(&other) {
    for (Enum one : some) values.push_back(static_cast<size_t>(one));
  }

  const void* field = nullptr;  // null: always
  std::vector<size_t> values = {};
};

struct OptionCheck {
  double least = -std::numeric_limits<double>::infinity();  // for numbers
  double most = std::numeric_limits<double>::infinity();
  bool above = false;                          // must be greater than `least`
  size_t without_first = 0, without_last = 0;  // names of the enum's table that it doesn't take
  std::string alias = {};                      // a short flag: "--steps"
  OnlyWith only_with = {};
};

struct Option {
  std::string section;  // "optim"; empty: the run itself
  std::string section_help;
  std::string key;   // "lr"
  Target target;     // a field of the config
  std::string help;  // one sentence, without its full stop
  OptionCheck check;

  std::string name() const { return section.empty() ? key : section + "." + key; }
  std::string flag() const { return "--" + name(); }
};

// Collects options, section by section.
class OptionList {
 public:
  void section(std::string name, std::string help);

  // `field` must outlive the list. The help of enum values is added to `help`.
  template <typename T>
  void add(std::string key, T& field, std::string help, OptionCheck check = {}) {
    if constexpr (std::is_constructible_v<Target, T*>)
      push(std::move(key), &field, std::move(help), std::move(check));
    else
      push(std::move(key), EnumField(field), std::move(help), std::move(check));
  }

  std::vector<Option> options;

 private:
  void push(std::string key, Target target, std::string help, OptionCheck check);

  std::string section_, section_help_;
};

// The option with that name ("optim.lr"), or null.
const Option* find(const std::vector<Option>& options, const std::string& name);
// The option that `name` probably means: "optim.lr" for "optim.lrr", "lr" and "train.lr". Null if
// none is close.
const Option* nearest(const std::vector<Option>& options, const std::string& name);

}  // namespace fsdp::base
