// Shared by the config tests: command lines as the binary sees them, and refusals.
#pragma once

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <vector>

#include "fsdp/error.h"
#include "train/config_flags.h"
#include "train/config_resolve.h"
#include "train/config_values.h"

namespace fsdp::train {

using Words = std::vector<std::string>;

// A command line as the binary sees it.
inline CommandLine parsed(Words words) {
  CLI::App app{"", "fsdp"};
  CLI::App* train = app.add_subcommand("train", "");
  CommandLine line;
  declare(*train, line);
  std::reverse(words.begin(), words.end());
  words.push_back("train");
  app.parse(words);
  return line;
}

inline Config resolved(const Words& words) {
  return resolve(parsed(words)).config;
}

// "message | hint" of the Error that `action` must throw.
template <typename Action>
std::string refusal(Action action) {
  try {
    action();
  } catch (const Error& problem) {
    EXPECT_FALSE(problem.hint().empty()) << problem.what();
    return problem.message() + " | " + problem.hint();
  }
  return "(accepted)";
}

inline std::string refused(const Words& words) {
  return refusal([&] { resolve(parsed(words)); });
}

inline std::string refused_file(const std::string& text) {
  Config config;
  return refusal([&] { apply_toml(config, text, "my.toml"); });
}

inline testing::AssertionResult has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << part << "\" is not in: " << text;
}

// Names of options whose values differ; doubles are written to the bit.
inline Words differences(Config one, Config two) {
  auto first = options(one), second = options(two);
  Words names;
  for (size_t i = 0; i < first.size(); ++i)
    if (value_text(first[i]) != value_text(second[i])) names.push_back(first[i].name());
  return names;
}

inline Config from_text(const std::string& text) {
  Config config;
  apply_toml(config, text, "test");
  return config;
}

}  // namespace fsdp::train
