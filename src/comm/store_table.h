// StoreTable: the keys and values of the store, without connections and waits.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <unordered_map>

#include "comm/store_message.h"

namespace fsdp::comm {

class StoreTable {
 public:
  static constexpr size_t kMostBytes = size_t{4} << 30;  // of all keys and values
  static constexpr size_t kLongestKey = 4096;

  // Carries out a request. nullopt: it waits for missing_key(), and must be tried again once that
  // key is set.
  std::optional<StoreAnswer> answer(const StoreRequest& request);

  // The first of the keys that isn't set; nullptr: all are.
  const std::string* missing_key(const std::vector<std::string>& keys) const;

 private:
  StoreAnswer put(const std::string& key, std::string value);
  StoreAnswer add(const std::string& key, const std::string& number);
  StoreAnswer compare_set(const std::string& key, const std::string& expected,
                          const std::string& desired);
  StoreAnswer values(const std::vector<std::string>& keys) const;
  StoreAnswer list() const;
  bool erase(const std::string& key);
  std::string value_or(const std::string& key, const std::string& otherwise) const;

  std::unordered_map<std::string, std::string> values_;
  size_t bytes_ = 0;
};

// Whether a call may set a key; it is the request's first field.
bool sets_a_key(StoreCall call);

}  // namespace fsdp::comm
