// Shared by the chat tests: templates by name, and errors as text.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "chat/template.h"
#include "data/folders.h"
#include "paths.h"

namespace fsdp::test {

using Json = nlohmann::ordered_json;

inline chat::RenderOptions fixed_time() {
  chat::RenderOptions options;
  std::tm now{};
  now.tm_year = 124;
  now.tm_mon = 6;
  now.tm_mday = 26;
  now.tm_wday = 5;
  now.tm_yday = 207;
  now.tm_hour = 14;
  now.tm_min = 3;
  now.tm_sec = 9;
  options.now = now;
  return options;
}

inline chat::Template template_named(const std::string& name) {
  return {read_file(paths::source("tests/chat/templates/") + name + ".jinja"), name};
}

// The text, or the error, of a template.
inline std::string rendered(const std::string& source, const Json& variables = Json::object()) {
  try {
    return chat::Template(source, "t.jinja").render(variables, fixed_time()).bytes();
  } catch (const Error& problem) {
    return problem.what();
  }
}

// "text<<written by the assistant>>text".
inline std::string marked(const chat::Template& templ, const Json& variables,
                          const std::vector<std::string>& special) {
  const chat::Text text = templ.render(variables, fixed_time());
  std::string out;
  size_t at = 0;
  for (const auto& one : templ.written_by_assistant(text, variables, special, fixed_time())) {
    out += text.bytes().substr(at, one.from - at) + "<<" +
           text.bytes().substr(one.from, one.to - one.from) + ">>";
    at = one.to;
  }
  return out + text.bytes().substr(at);
}

}  // namespace fsdp::test
