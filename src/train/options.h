// Options: every field of Config, declared once with its key, help and check. The flag
// (--optim.lr), the key in a TOML file (lr in [optim]), the default, the help and docs/config.md
// follow from this list.
#pragma once

#include <limits>
#include <string>
#include <variant>
#include <vector>

#include "train/config.h"

namespace fsdp::train {

using Target = std::variant<bool*, int64_t*, double*, std::string*, std::vector<std::string>*>;

struct OptionCheck {
  double least = -std::numeric_limits<double>::infinity();  // for numbers
  double most = std::numeric_limits<double>::infinity();
  bool above = false;                     // must be greater than `least`
  std::vector<std::string> choices = {};  // for strings; empty: any string
  bool or_number = false;                 // or an integer of at least 2
  std::string alias = {};                 // a short flag: "--steps"
};

struct Option {
  std::string section;  // "optim"; empty: the run itself
  std::string key;      // "lr"
  Target target;        // in the Config passed to options()
  std::string help;     // one sentence, without its full stop
  OptionCheck check;

  std::string name() const { return section.empty() ? key : section + "." + key; }
  std::string flag() const { return "--" + name(); }
};

struct Section {
  std::string name;
  std::string help;
};

// In the order of --help and of a written config. Targets point into `config`, which must outlive
// the result.
std::vector<Option> options(Config& config);
const std::vector<Section>& sections();

// The option with that name ("optim.lr"), or null.
const Option* find(const std::vector<Option>& options, const std::string& name);
// The option that `name` probably means: "optim.lr" for "optim.lrr", "lr" and "train.lr". Empty if
// none is close.
std::string nearest(const std::vector<Option>& options, const std::string& name);

}  // namespace fsdp::train
