#include "checkpoint/param_groups.h"

#include <map>
#include <utility>
#include <variant>

#include "fsdp/muon.h"
#include "optim/newton_schulz.h"

namespace fsdp::checkpoint {
namespace {

struct Nothing {};  // None: torch chooses for itself
using Tuple = std::vector<double>;
using Number = std::variant<Nothing, bool, int64_t, double, std::string, Tuple>;
using Numbers = std::vector<std::pair<std::string, Number>>;

Numbers adamw_numbers(const Optimizer::Group& group, std::pair<double, double> betas, double eps,
                      bool maximize) {
  return {{"lr", group.lr},
          {"betas", Tuple{betas.first, betas.second}},
          {"eps", eps},
          {"weight_decay", group.weight_decay},
          {"amsgrad", false},
          {"maximize", maximize},
          {"foreach", Nothing()},
          {"capturable", false},
          {"differentiable", false},
          {"fused", Nothing()},
          {"decoupled_weight_decay", true}};
}

// torch's Muon has one polynomial for all steps; of others it gets the first.
Numbers muon_numbers(const Optimizer::Group& group, const MuonOptions& options) {
  const auto [a, b, c] = optim::quintics(options.newton_schulz, options.steps).front();
  return {{"lr", group.lr},
          {"weight_decay", group.weight_decay},
          {"momentum", options.momentum},
          {"nesterov", options.nesterov},
          {"ns_coefficients", Tuple{a, b, c}},
          {"eps", options.eps},
          {"ns_steps", static_cast<int64_t>(options.steps)},
          {"adjust_lr_fn", std::string("match_rms_adamw")}};
}

Numbers numbers_of(const Optimizer& optimizer, size_t index) {
  const Optimizer::Group& group = optimizer.groups()[index];
  if (const auto* adamw = dynamic_cast<const AdamW*>(&optimizer))
    return adamw_numbers(group, adamw->options().betas, adamw->options().eps,
                         adamw->options().maximize);
  if (const auto* muon = dynamic_cast<const Muon*>(&optimizer)) {
    const MuonOptions& options = muon->options();
    if (muon->has_matrices(index)) return muon_numbers(group, options);
    return adamw_numbers(group, options.adamw.betas, options.adamw.eps, options.maximize);
  }
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
  if (const auto* whole = std::get_if<int64_t>(&number)) return writer.integer(*whole);
  if (const auto* text = std::get_if<std::string>(&number)) return writer.string(*text);
  writer.mark();
  for (const double real : std::get<Tuple>(number)) writer.real(real);
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
  for (size_t i = 0; i < optimizer.groups().size(); ++i) {
    const auto& group = optimizer.groups()[i];
    if (group.parameters.empty()) continue;
    const auto path = [&](const std::string& key) {
      return KeyPath{"optim", "param_groups", index, key};
    };
    for (const auto& [key, number] : numbers_of(optimizer, i))
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
