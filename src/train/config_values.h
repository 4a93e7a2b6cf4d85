// Setting one option from TOML or a flag, and writing its value as text. An invalid value is an
// Error that says where it is and what is expected.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/options.h"
#include "train/config_toml.h"

namespace fsdp::train {

// "an integer of at least 1", "one of adamw, sgd". `complete`: includes upper bounds that only keep
// numbers sane.
std::string expected(const Option& option, bool complete = false);

// `where`: "my.toml:12".
void set(const Option& option, const TomlEntry& entry, const std::string& where);
// From the command line. A list gets all words, any other option the last one.
void set(const Option& option, const std::vector<std::string>& words);

void copy_value(const Option& from, const Option& to);  // both the same option
// The value in TOML.
std::string value_text(const Option& option);

// Whether it is true if it stands without a value: a bool, or an enum that has the name "true".
bool is_switch(const Option& option);

// Parses the value of a switch: true/false, yes/no, on/off, 1/0. nullopt if it is something else.
std::optional<bool> flag_word(const std::string& word);

}  // namespace fsdp::train
