// Where in a rendered conversation an assistant wrote.
//
// A turn is what the template writes while its loop is at the assistant's message. It begins with a
// header that the model is given: the generation prompt. What follows is the model's: the fields of
// the message with what the template writes around them (such as the syntax of tool calls), and the
// token that ends the turn. Line breaks and such behind that token aren't.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "chat/template.h"
#include "fsdp/error.h"

namespace fsdp::chat {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMostRenderings = 100;  // of the beginnings of a conversation

// Adjacent stretches of runs that `belongs` accepts.
template <class Belongs>
std::vector<Stretch> stretches_of(const Text& text, Belongs belongs) {
  std::vector<Stretch> found;
  size_t from = 0;
  for (const Run& run : text.runs()) {
    if (belongs(run.origin)) {
      if (found.empty() || found.back().to != from) found.push_back({from, from});
      found.back().to = run.end;
    }
    from = run.end;
  }
  return found;
}

class Turns {
 public:
  Turns(const Template& chat, const Text& text, const Json& variables,
        const std::vector<std::string>& special, const RenderOptions& options)
      : template_(chat), text_(text), variables_(variables), special_(special), options_(options) {
    prompt_ = generation_prompt(variables_, text_.bytes());
  }

  // What the assistant wrote in message `number`.
  void add(int32_t number, std::vector<Stretch>& written) {
    const auto in_turn = [&](const Origin& origin) { return origin.turn == number; };
    std::vector<Stretch> turns = stretches_of(text_, in_turn);
    if (turns.empty())  // not written in a loop: only the fields are known
      turns = stretches_of(text_, [&](const Origin& origin) { return is_field(origin, number); });
    for (const Stretch& turn : turns) {
      const Stretch fields = fields_in(turn, number);
      if (fields.from == turn.to && turns.size() > 1) continue;  // another loop did more
      const size_t from = header_end(turn, fields, number);
      written.push_back({from, end_of_turn(turn, std::max(from, fields.to))});
    }
  }

 private:
  static bool is_field(const Origin& origin, int32_t number) {
    return origin.part == Part::kContent && origin.message == number;
  }

  std::string_view part(size_t from, size_t to) const {
    return std::string_view(text_.bytes()).substr(from, to - from);
  }

  // From the first to the last character of the message's fields; {turn.to, turn.from} without any.
  Stretch fields_in(const Stretch& turn, int32_t number) const {
    Stretch fields{turn.to, turn.from};
    for (const Stretch& one :
         stretches_of(text_, [&](const Origin& origin) { return is_field(origin, number); })) {
      if (one.to <= turn.from || one.from >= turn.to) continue;
      fields.from = std::min(fields.from, std::max(one.from, turn.from));
      fields.to = std::max(fields.to, std::min(one.to, turn.to));
    }
    return fields;
  }

  // The end of the role's name, if the turn begins with it.
  size_t role_end(const Stretch& turn, size_t fields, int32_t number) const {
    size_t end = turn.from;
    for (const Stretch& one : stretches_of(text_, [&](const Origin& origin) {
           return origin.part == Part::kRole && origin.message == number;
         }))
      if (one.from >= turn.from && one.to <= fields) end = one.to;
    return end;
  }

  // Rendered with a number of messages; nullopt if the template refuses them, or after too many.
  std::optional<std::string> rendered(int32_t messages, bool prompt) {
    if (--renderings_ < 0) return std::nullopt;
    Json variables = variables_;
    Json& list = variables["messages"];
    list.erase(list.begin() + messages, list.end());
    RenderOptions options = options_;
    options.generation_prompt = prompt;
    try {
      return template_.render(variables, options).bytes();
    } catch (const Error&) {
      return std::nullopt;
    }
  }

  // What a prompt for an answer adds to `text`, which was rendered from `variables`.
  std::string generation_prompt(const Json& variables, const std::string& text) {
    const auto count = static_cast<int32_t>(variables["messages"].size());
    const auto longer = rendered(count, true);
    return longer && longer->starts_with(text) ? longer->substr(text.size()) : std::string();
  }

  size_t header_end(const Stretch& turn, const Stretch& fields, int32_t number) {
    const std::string_view head = part(turn.from, fields.from);
    if (!prompt_.empty() && head.starts_with(prompt_)) return turn.from + prompt_.size();
    // The template may write another prompt there, or none.
    const size_t role = role_end(turn, fields.from, number);
    const auto before = rendered(number, true);
    if (before && before->size() >= turn.from && before->size() <= fields.from &&
        text_.bytes().starts_with(*before) && (before->size() > turn.from || role == turn.from))
      return before->size();
    std::string prompt = prompt_;
    if (prompt.empty() && before) {
      const auto shorter = rendered(number, false);
      if (shorter && before->starts_with(*shorter)) prompt = before->substr(shorter->size());
    }
    // Where they differ, the header ends at the last whole marker: "<a><tool>" isn't "<a><think>".
    size_t same = static_cast<size_t>(
        std::mismatch(head.begin(), head.end(), prompt.begin(), prompt.end()).first - head.begin());
    constexpr std::string_view kEnds = ">] \n\t";
    if (same < head.size())
      while (same > 0 && kEnds.find(head[same - 1]) == std::string_view::npos) --same;
    return turn.from + same < role ? fields.from : turn.from + same;
  }

  // The end of the last special token in `tail`, or of the first that ends a text; 0 without one.
  size_t special_end(std::string_view tail) const {
    size_t end = 0;
    for (size_t i = 0; i < special_.size(); ++i) {
      if (special_[i].empty()) continue;
      const size_t at = i == 0 ? tail.find(special_[i]) : tail.rfind(special_[i]);
      if (at == std::string_view::npos) continue;
      if (i == 0) return at + special_[i].size();
      end = std::max(end, at + special_[i].size());
    }
    return end;
  }

  size_t end_of_turn(const Stretch& turn, size_t fields_end) const {
    const std::string_view tail = part(fields_end, turn.to);
    if (const size_t end = special_end(tail)) return fields_end + end;
    if (const size_t end = end_behind(turn.to)) return end;
    return fields_end + trimmed_end(tail);
  }

  // The end of a special token that follows the loop at once, or 0.
  size_t end_behind(size_t at) const {
    const size_t token = skip_white(text_.bytes(), at);
    const auto run = std::upper_bound(text_.runs().begin(), text_.runs().end(), token,
                                      [](size_t where, const Run& one) { return where < one.end; });
    if (run == text_.runs().end() || run->origin.turn >= 0) return 0;
    for (const std::string& special : special_)
      if (!special.empty() && part(token, run->end).starts_with(special))
        return token + special.size();
    return 0;
  }

  const Template& template_;
  const Text& text_;
  const Json& variables_;
  const std::vector<std::string>& special_;
  const RenderOptions& options_;
  std::string prompt_;
  int renderings_ = kMostRenderings;
};

}  // namespace

std::vector<Stretch> Template::written_by_assistant(const Text& text, const Json& variables,
                                                    const std::vector<std::string>& special,
                                                    const RenderOptions& options) const {
  if (has_generation())
    return stretches_of(text, [](const Origin& origin) { return origin.generated; });
  std::vector<Stretch> written;
  Turns turns(*this, text, variables, special, options);
  int32_t number = 0;
  for (const Json& message : variables["messages"]) {
    const auto role = message.find("role");
    if (role != message.end() && *role == "assistant") turns.add(number, written);
    ++number;
  }
  std::sort(written.begin(), written.end(),
            [](const Stretch& a, const Stretch& b) { return a.from < b.from; });
  std::vector<Stretch> apart;
  for (const Stretch& one : written) {
    if (one.from == one.to) continue;
    if (!apart.empty() && one.from <= apart.back().to)
      apart.back().to = std::max(apart.back().to, one.to);
    else
      apart.push_back(one);
  }
  return apart;
}

}  // namespace fsdp::chat
