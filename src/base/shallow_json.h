// JSON from outside. Code that copies, compares or prints a value calls itself at each level of it, so
// a file of nested lists could exhaust the stack.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "base/namespace.h"

namespace fsdp::base {

// is_discarded() if the text isn't JSON or has more than `deepest` levels.
template <typename Json>
Json parse_shallow(std::string_view text, int deepest = 32) {
  bool deep = false;
  const auto shallow = [&](int depth, typename Json::parse_event_t, Json&) {
    deep = deep || depth > deepest;
    return !deep;
  };
  Json value = Json::parse(text, shallow, /*allow_exceptions=*/false);
  return deep ? Json(Json::value_t::discarded) : value;
}

}  // namespace fsdp::base
