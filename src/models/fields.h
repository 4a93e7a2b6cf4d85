// The fields of a JSON object from outside, each read with its check. Errors name the field; so do
// keys that nobody has read.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::models {

using Json = nlohmann::ordered_json;

// Null counts as missing, except for null().
class Fields {
 public:
  // `where`: the file's name. Both must outlive this.
  Fields(const Json& object, const std::string& where, std::string path = "")
      : object_(object), where_(where), path_(std::move(path)) {}

  [[noreturn]] void refuse(const std::string& what) const;
  [[noreturn]] void refuse(const char* key, const std::string& why) const;

  bool has(const char* key) const;
  bool null(const char* key) const;  // present, and null
  const Json& operator[](const char* key) const { return *object_.find(key); }

  int64_t count(const char* key, std::optional<int64_t> otherwise, int64_t most) const;
  // Reads `key`, or `other` if `key` is missing: GPT-2 has names of its own and accepts the common
  // ones.
  int64_t count(const char* key, const char* other, int64_t otherwise, int64_t most) const;
  double number(const char* key, std::optional<double> otherwise) const;  // at least 0
  std::vector<double> numbers(const char* key) const;                     // likewise
  bool flag(const char* key, bool otherwise) const;
  std::string text(const char* key, const std::string& otherwise) const;
  Fields object(const char* key) const;

  // Settings that change the computation in a way that our models don't support.
  void need(const char* key, bool wanted) const;
  void need_number(const char* key, double wanted) const;
  void need_text(const char* key, const std::vector<std::string>& choices) const;

  // Refuses keys that weren't read, aren't null and aren't listed.
  void refuse_unknown(std::span<const std::string_view> irrelevant) const;

 private:
  const Json& object_;
  const std::string& where_;
  std::string path_;
  mutable std::set<std::string, std::less<>> read_;
};

}  // namespace fsdp::models
