#include "comm/store_table.h"

#include <charconv>

#include "base/format.h"

namespace fsdp::comm {
namespace {

StoreAnswer refused(std::string why) {
  return {StoreAnswer::kRefused, {std::move(why)}};
}

std::optional<int64_t> whole(const std::string& text) {
  int64_t number = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (problem != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

StoreAnswer yes_or_no(bool yes) {
  return {StoreAnswer::kDone, {yes ? "1" : "0"}};
}

}  // namespace

bool sets_a_key(StoreCall call) {
  return call == StoreCall::kSet || call == StoreCall::kCompareSet || call == StoreCall::kAppend ||
         call == StoreCall::kAdd;
}

std::optional<StoreAnswer> StoreTable::answer(const StoreRequest& request) {
  const auto& fields = request.fields;
  if (sets_a_key(request.call) && fields[0].size() > kLongestKey)
    return refused(formatted("a key has at most {} bytes", kLongestKey));
  switch (request.call) {
    case StoreCall::kSet:
      return put(fields[0], fields[1]);
    case StoreCall::kCompareSet:
      return compare_set(fields[0], fields[1], fields[2]);
    case StoreCall::kAppend:
      return put(fields[0], value_or(fields[0], "") + fields[1]);
    case StoreCall::kAdd:
      return add(fields[0], fields[1]);
    case StoreCall::kDelete:
      return yes_or_no(erase(fields[0]));
    case StoreCall::kGet:
      if (missing_key(fields)) return std::nullopt;
      return values(fields);
    case StoreCall::kWait:
      if (missing_key(fields)) return std::nullopt;
      return StoreAnswer{};
    case StoreCall::kCheck:
      return yes_or_no(!missing_key(fields));
    case StoreCall::kCount:
      return StoreAnswer{StoreAnswer::kDone, {std::to_string(values_.size())}};
    case StoreCall::kList:
      return list();
  }
  return refused("there is no such call");
}

const std::string* StoreTable::missing_key(const std::vector<std::string>& keys) const {
  for (const auto& key : keys)
    if (!values_.count(key)) return &key;
  return nullptr;
}

std::string StoreTable::value_or(const std::string& key, const std::string& otherwise) const {
  const auto found = values_.find(key);
  return found == values_.end() ? otherwise : found->second;
}

StoreAnswer StoreTable::put(const std::string& key, std::string value) {
  // An answer has to have room for it.
  if (value.size() + 64 > kMostMessage)
    return refused(formatted("a value has at most {} bytes", kMostMessage - 64));
  if (bytes_ + key.size() + value.size() > kMostBytes)
    return refused(formatted("it holds {} bytes and takes no more", bytes_));
  erase(key);
  bytes_ += key.size() + value.size();
  values_.emplace(key, std::move(value));
  return {};
}

bool StoreTable::erase(const std::string& key) {
  const auto found = values_.find(key);
  if (found == values_.end()) return false;
  bytes_ -= found->first.size() + found->second.size();
  values_.erase(found);
  return true;
}

StoreAnswer StoreTable::add(const std::string& key, const std::string& number) {
  const auto now = whole(value_or(key, "0")), more = whole(number);
  int64_t sum = 0;
  if (!now || !more || __builtin_add_overflow(*now, *more, &sum))
    return refused(formatted("\"{}\" can't be added to", key));
  StoreAnswer stored = put(key, std::to_string(sum));
  if (stored.kind == StoreAnswer::kDone) stored.fields = {std::to_string(sum)};
  return stored;
}

// As c10d's other stores do it: a missing key counts as "" if that is expected, and else the answer
// is what was expected.
StoreAnswer StoreTable::compare_set(const std::string& key, const std::string& expected,
                                    const std::string& desired) {
  const auto found = values_.find(key);
  if (found == values_.end() && !expected.empty()) return {StoreAnswer::kDone, {expected}};
  if (found != values_.end() && found->second != expected)
    return {StoreAnswer::kDone, {found->second}};
  StoreAnswer stored = put(key, desired);
  if (stored.kind == StoreAnswer::kDone) stored.fields = {desired};
  return stored;
}

StoreAnswer StoreTable::values(const std::vector<std::string>& keys) const {
  StoreAnswer answer;
  size_t bytes = 64;
  for (const auto& key : keys) {  // a request may name one key a million times
    const std::string& value = values_.at(key);
    bytes += kLengthBytes + value.size();
    if (bytes > kMostMessage) return refused("these values are too long for one answer");
    answer.fields.push_back(value);
  }
  return answer;
}

StoreAnswer StoreTable::list() const {
  StoreAnswer answer;
  size_t bytes = 64;
  for (const auto& [key, value] : values_) {
    bytes += kLengthBytes + key.size();
    if (bytes > kMostMessage) return refused("these keys are too long for one answer");
    answer.fields.push_back(key);
  }
  return answer;
}

}  // namespace fsdp::comm
