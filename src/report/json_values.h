// Values of JSON that another version of fsdp, or a damaged file, may have written: what is missing
// or of another type is the fallback, never an exception.
#pragma once

#include <cmath>
#include <string>

#include "report/page.h"

namespace fsdp::report {

inline double number_in(const Json& object, const char* key, double fallback = std::nan("")) {
  if (!object.is_object()) return fallback;
  const auto found = object.find(key);
  return found != object.end() && found->is_number() ? found->get<double>() : fallback;
}

// Numbers as JSON writes them.
inline std::string text_in(const Json& object, const char* key, const char* fallback = "") {
  if (!object.is_object()) return fallback;
  const auto found = object.find(key);
  if (found == object.end() || found->is_null() || found->is_structured()) return fallback;
  return found->is_string() ? found->get<std::string>() : found->dump();
}

inline bool flag_in(const Json& object, const char* key) {
  if (!object.is_object()) return false;
  const auto found = object.find(key);
  return found != object.end() && found->is_boolean() && found->get<bool>();
}

inline const Json& array_in(const Json& object, const char* key) {
  static const Json none = Json::array();
  if (!object.is_object()) return none;
  const auto found = object.find(key);
  return found != object.end() && found->is_array() ? *found : none;
}

}  // namespace fsdp::report
