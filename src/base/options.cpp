#include "base/options.h"

#include <charconv>

#include "base/nearest.h"

namespace fsdp::base {

void EnumField::leave_out(size_t first, size_t last) {
  first_ = first;
  left_out_ = last;
}

std::vector<std::string> EnumField::names() const {
  std::vector<std::string> all;
  for (size_t i = first_; i + left_out_ < table_.size(); ++i) all.emplace_back(table_[i].name);
  return all;
}

std::string EnumField::help() const {
  std::string all;
  for (size_t i = first_; i + left_out_ < table_.size(); ++i)
    if (!table_[i].help.empty()) all += "; " + name(i) + ": " + std::string(table_[i].help);
  return all;
}

std::string EnumField::name() const {
  return number_ && *number_ > 0 ? std::to_string(*number_) : name(get_(field_));
}

bool EnumField::set(const std::string& word) const {
  for (size_t i = first_; i + left_out_ < table_.size(); ++i) {
    if (table_[i].name != word) continue;
    set_(field_, i);
    if (number_) *number_ = 0;
    return true;
  }
  int64_t number = 0;
  std::from_chars(word.data(), word.data() + word.size(), number);
  bool plain = std::to_string(number) == word;  // no sign, no leading zero, nothing behind it
  if (!number_ || !plain || number < 2 || number > 1'000'000) return false;
  *number_ = number;
  return true;
}

void OptionList::section(std::string name, std::string help) {
  section_ = std::move(name);
  section_help_ = std::move(help);
}

void OptionList::push(std::string key, Target target, std::string help, OptionCheck check) {
  if (auto* field = std::get_if<EnumField>(&target)) {
    field->leave_out(check.without_first, check.without_last);
    help += field->help();
    if (help.starts_with("; ")) help.erase(0, 2);
  }
  options.push_back({section_, section_help_, std::move(key), std::move(target), std::move(help),
                     std::move(check)});
}

const Option* find(const std::vector<Option>& options, const std::string& name) {
  for (const Option& option : options)
    if (option.name() == name) return &option;
  return nullptr;
}

const Option* nearest(const std::vector<Option>& options, const std::string& name) {
  std::string key = name.substr(name.rfind('.') + 1);
  const Option* best = nullptr;
  size_t least = likely_typo(name) + 1;
  auto consider = [&](size_t cost, const Option& option) {
    if (cost < least) least = cost, best = &option;
  };
  for (const Option& option : options) {
    consider(edits(name, option.name()), option);
    // The right key in the wrong section, or without one, is closer than any other word.
    if (option.key == key) consider(0, option);
    if (edits(key, option.key) <= likely_typo(key)) consider(1 + edits(key, option.key), option);
  }
  return best;
}

}  // namespace fsdp::base
