// For tests of files: a temporary folder, and errors as text.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>

#include "fsdp/error.h"

namespace fsdp::checkpoint {

struct Folder {
  Folder() {
    std::string made = std::filesystem::temp_directory_path() / "fsdp-checkpoint-XXXXXX";
    if (!mkdtemp(made.data())) throw std::runtime_error("mkdtemp failed");
    path = made;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::filesystem::path operator/(const std::string& name) const { return path / name; }

  std::filesystem::path path;
};

inline std::string error_of(const std::function<void()>& act) {  // "" if there is none
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

inline bool has(const std::string& text, const std::string& word) {
  return text.find(word) != std::string::npos;
}

}  // namespace fsdp::checkpoint
