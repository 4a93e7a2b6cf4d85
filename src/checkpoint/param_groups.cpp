#include "checkpoint/param_groups.h"

#include <map>
#include <utility>
#include <variant>

namespace fsdp::checkpoint {
namespace {

struct Nothing {};  // None: torch chooses for itself
using Number = std::variant<Nothing, bool, double, std::pair<double, double>>;
using Numbers = std::vector<std::pair<std::string, Number>>;

Numbers numbers_of(const Optimizer& optimizer, const Optimizer::Group& group) {
  if (const auto* adamw = dynamic_cast<const AdamW*>(&optimizer))
    return {{"lr", group.lr},
            {"betas", adamw->options().betas},
            {"eps", adamw->options().eps},
            {"weight_decay", group.weight_decay},
            {"amsgrad", false},
            {"maximize", adamw->options().maximize},
            {"foreach", Nothing()},
            {"capturable", false},
            {"differentiable", false},
            {"fused", Nothing()},
            {"decoupled_weight_decay", true}};
  if (const auto* sgd = dynamic_cast<const SGD*>(&optimizer))
    return {{"lr", group.lr},
            {"momentum", sgd->options().momentum},
            {"dampening", sgd->options().dampening},
            {"weight_decay", group.weight_decay},
            {"nesterov", sgd->options().nesterov},
            {"maximize", sgd->options().maximize},
            {"foreach", Nothing()},
            {"differentiable", false},
            {"fused", Nothing()}};
  return {{"lr", group.lr}, {"weight_decay", group.weight_decay}};
}

void put_number(pickle::Writer& writer, const Number& number) {
  if (std::holds_alternative<Nothing>(number)) return writer.none();
  if (const auto* flag = std::get_if<bool>(&number)) return writer.boolean(*flag);
  if (const auto* real = std::get_if<double>(&number)) return writer.real(*real);
  const auto& [first, second] = std::get<std::pair<double, double>>(number);
  writer.mark();
  writer.real(first);
  writer.real(second);
  writer.tuple();
}

void put_names(pickle::Writer& writer, const std::vector<std::string>& names) {
  writer.empty_list();
  writer.mark();
  for (const auto& name : names) writer.string(name);
  writer.append_all();
}

}  // namespace

std::vector<PlainValue> param_groups(const Optimizer& optimizer) {
  std::vector<PlainValue> values;
  int64_t index = 0;
  for (const auto& group : optimizer.groups()) {
    if (group.parameters.empty()) continue;
    const auto path = [&](const std::string& key) {
      return KeyPath{"optim", "param_groups", index, key};
    };
    for (const auto& [key, number] : numbers_of(optimizer, group))
      values.push_back(
          {path(key), [number = number](pickle::Writer& writer) { put_number(writer, number); }});
    values.push_back({path("params"), [names = group.parameters](pickle::Writer& writer) {
                        put_names(writer, names);
                      }});
    ++index;
  }
  return values;
}

}  // namespace fsdp::checkpoint
