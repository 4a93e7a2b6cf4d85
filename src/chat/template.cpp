#include "chat/template.h"

#include <nlohmann/json.hpp>

#include "chat/evaluator.h"
#include "chat/parser.h"

namespace fsdp::chat {
namespace {

constexpr size_t kLongestTemplate = size_t{1} << 20;  // bytes; real ones have up to 20,000

std::tm local_time() {
  const std::time_t now = std::time(nullptr);
  std::tm result{};
  localtime_r(&now, &result);
  return result;
}

}  // namespace

Template::Template(std::string_view source, std::string name) : name_(std::move(name)) {
  Machine machine(name_, {});
  if (source.size() > kLongestTemplate) machine.refuse("the template is too long");
  parsed_ = std::make_unique<const Parsed>(parse(machine, source));
}

Template::~Template() = default;

bool Template::has_generation() const {
  return parsed_->has_generation;
}

Text Template::render(const nlohmann::ordered_json& variables, const RenderOptions& options) const {
  Machine machine(name_, options.limits);
  Evaluator evaluator(machine, options.now ? *options.now : local_time());
  std::vector<std::pair<std::string, Value>> values;
  for (const auto& [name, value] : variables.items())
    values.emplace_back(
        name, name == "messages" ? from_messages(machine, value) : from_json(machine, value));
  values.emplace_back("add_generation_prompt", options.generation_prompt);
  return evaluator.run(parsed_->body, std::move(values));
}

}  // namespace fsdp::chat
