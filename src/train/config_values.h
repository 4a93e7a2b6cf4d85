// One option's value: from TOML, from a flag, and back to text. What does not fit is an Error that
// says where it stands and what is expected there.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "train/config_toml.h"
#include "train/options.h"

namespace fsdp::train {

// "a whole number from 1 on", "one of adamw, sgd". `complete`: with bounds that nobody reaches,
// too.
std::string expected(const Option& option, bool complete = false);

// `where`: "my.toml:12".
void set(const Option& option, const toml::Value& value, const std::string& where);
// From the command line. A list gets all words at once, everything else the last one.
void set(const Option& option, const std::vector<std::string>& words);

// The value as TOML writes it.
std::string value_text(const Option& option);

// true/false, yes/no, on/off, 1/0: what a flag may be given. nullopt: something else.
std::optional<bool> flag_word(const std::string& word);

}  // namespace fsdp::train
