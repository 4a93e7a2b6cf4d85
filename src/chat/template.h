// Template: a chat template, which turns a conversation into the text that a model is trained on.
//
// The language is the part of Jinja that chat templates use, with the settings of Hugging Face's
// transformers; docs/data.md lists it. A template comes from outside, so rendering is bounded
// (Limits), and what isn't supported is an Error with the template's line.
#pragma once

#include <ctime>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "chat/machine.h"
#include "chat/text.h"

namespace fsdp::chat {

struct Parsed;

struct RenderOptions {
  bool generation_prompt = false;  // end with what an answer begins with
  std::optional<std::tm> now;      // for strftime_now
  Limits limits;
};

// Bytes [from, to) of a rendered text.
struct Stretch {
  size_t from = 0, to = 0;
  bool operator==(const Stretch&) const = default;
};

class Template {
 public:
  // `name` is for errors. Throws Error.
  Template(std::string_view source, std::string name);
  ~Template();

  // `variables`: an object; its "messages" know which message each character comes from.
  Text render(const nlohmann::ordered_json& variables, const RenderOptions& options = {}) const;

  // Where in `text`, rendered from `variables`, an assistant wrote: what follows the generation
  // prompt, up to the token that ends the turn. `special`: the special tokens, of which the first
  // ends a text. A template with {% generation %} says it itself.
  std::vector<Stretch> written_by_assistant(const Text& text,
                                            const nlohmann::ordered_json& variables,
                                            const std::vector<std::string>& special,
                                            const RenderOptions& options = {}) const;

  bool has_generation() const;

 private:
  std::string name_;
  std::unique_ptr<const Parsed> parsed_;
};

}  // namespace fsdp::chat
