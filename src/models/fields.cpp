#include "models/fields.h"

#include <algorithm>
#include <cmath>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::models {
namespace {

// It may be printed.
std::string printable(std::string text) {
  for (char& c : text)
    if (c < ' ' || c > '~') c = '?';
  return text.substr(0, 64);
}

}  // namespace

void Fields::refuse(const std::string& what) const {
  throw Error(formatted("{}: {}.", where_, what),
              "docs/checkpoints.md describes which models are supported.");
}

void Fields::refuse(const char* key, const std::string& why) const {
  refuse(formatted("{}{} {}", path_, key, why));
}

bool Fields::has(const char* key) const {
  read_.insert(key);
  const auto found = object_.find(key);
  return found != object_.end() && !found->is_null();
}

bool Fields::null(const char* key) const {
  const auto found = object_.find(key);
  return found != object_.end() && found->is_null();
}

int64_t Fields::count(const char* key, std::optional<int64_t> otherwise, int64_t most) const {
  if (!has(key)) {
    if (!otherwise) refuse(key, "is missing");
    return *otherwise;
  }
  const Json& value = (*this)[key];
  const bool whole = value.is_number_integer() && !value.is_number_float();
  if (!whole || (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t(most)) ||
      value.get<int64_t>() < 1)
    refuse(key, formatted("isn't a whole number from 1 to {}", most));
  return value.get<int64_t>();
}

int64_t Fields::count(const char* key, const char* other, int64_t otherwise, int64_t most) const {
  const bool own = has(key), common = has(other);
  return count(own || !common ? key : other, otherwise, most);
}

double Fields::number(const char* key, std::optional<double> otherwise) const {
  if (!has(key)) {
    if (!otherwise) refuse(key, "is missing");
    return *otherwise;
  }
  const Json& value = (*this)[key];
  if (!value.is_number() || !std::isfinite(value.get<double>()) || value.get<double>() < 0)
    refuse(key, "isn't a number of at least 0");
  return value.get<double>();
}

std::vector<double> Fields::numbers(const char* key) const {
  if (!has(key)) refuse(key, "is missing");
  const Json& value = (*this)[key];
  std::vector<double> all;
  if (!value.is_array()) refuse(key, "isn't a list");
  for (const Json& one : value) {
    if (!one.is_number() || !std::isfinite(one.get<double>()) || one.get<double>() < 0)
      refuse(key, "isn't a list of numbers of at least 0");
    all.push_back(one.get<double>());
  }
  return all;
}

bool Fields::flag(const char* key, bool otherwise) const {
  if (!has(key)) return otherwise;
  if (!(*this)[key].is_boolean()) refuse(key, "is neither true nor false");
  return (*this)[key].get<bool>();
}

std::string Fields::text(const char* key, const std::string& otherwise) const {
  if (!has(key)) return otherwise;
  const Json& value = (*this)[key];
  if (!value.is_string()) refuse(key, "isn't a string");
  return printable(value.get<std::string>());
}

Fields Fields::object(const char* key) const {
  if (!has(key) || !(*this)[key].is_object()) refuse(key, "isn't an object");
  return {(*this)[key], where_, formatted("{}{}.", path_, key)};
}

void Fields::need(const char* key, bool wanted) const {
  if (flag(key, wanted) != wanted)
    refuse(key, formatted("is {}, which the models here don't support", wanted ? "false" : "true"));
}

void Fields::need_number(const char* key, double wanted) const {
  const double found = number(key, wanted);
  if (found != wanted)
    refuse(key, formatted("is {:g}, which the models here don't support", found));
}

void Fields::need_text(const char* key, const std::vector<std::string>& choices) const {
  const std::string found = text(key, choices.front());
  for (const auto& choice : choices)
    if (found == choice) return;
  refuse(key, formatted("is \"{}\"; only \"{}\" is supported", found, choices.front()));
}

void Fields::refuse_unknown(std::span<const std::string_view> irrelevant) const {
  for (const auto& [key, value] : object_.items()) {
    if (value.is_null() || read_.contains(key)) continue;
    if (std::find(irrelevant.begin(), irrelevant.end(), key) != irrelevant.end()) continue;
    throw Error(formatted("{}: {}{} isn't a setting that the models here know.", where_, path_,
                          printable(key)),
                "it may change what the model computes; remove it from the file if it doesn't.");
  }
}

}  // namespace fsdp::models
