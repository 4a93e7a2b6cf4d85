// Options: every field of Config declared once, with its key, its help and its check. The flag
// (--optim.lr), the key in a TOML file (lr in [optim]), the default, the help and docs/config.md
// all follow from this list.
#pragma once

#include <limits>
#include <string>
#include <variant>
#include <vector>

#include "train/config.h"

namespace fsdp::train {

using Target = std::variant<bool*, int64_t*, double*, std::string*, std::vector<std::string>*>;

struct OptionCheck {
  double least = -std::numeric_limits<double>::infinity();  // of a number
  double most = std::numeric_limits<double>::infinity();
  bool above = false;                     // least itself is too little
  std::vector<std::string> choices = {};  // of a text; empty: any text
  bool or_number = false;                 // a text that may also be a whole number from 2 on
  std::string alias = {};                 // a second, shorter flag: "--steps"
};

struct Option {
  std::string section;  // "optim"; empty: the run itself
  std::string key;      // "lr"
  Target target;        // in the Config that options() was given
  std::string help;     // one sentence without a point at its end
  OptionCheck check;

  std::string name() const { return section.empty() ? key : section + "." + key; }
  std::string flag() const { return "--" + name(); }
};

struct Section {
  std::string name;
  std::string help;
};

// In the order of --help and of a written config. Targets point into `config`, which must outlive
// them.
std::vector<Option> options(Config& config);
const std::vector<Section>& sections();

// The option of that name ("optim.lr"); null where there is none.
const Option* find(const std::vector<Option>& options, const std::string& name);
// Of all names and keys that there are, what somebody may have meant who wrote `name`:
// "optim.lr" for "optim.lrr", "lr" and "train.lr". Empty where nothing is near.
std::string nearest(const std::vector<Option>& options, const std::string& name);
// The nearest of `known` by edit distance; empty where nothing is near.
std::string nearest_word(const std::vector<std::string>& known, const std::string& word);

}  // namespace fsdp::train
