// What the read-only commands of `fsdp ckpt` share: finding a checkpoint, and printing names that
// come from files.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::cli {

// The checkpoint that DIR stands for: DIR is a run's directory, its checkpoints folder, one
// checkpoint (even if it lost its .metadata), or a Hugging Face directory.
std::filesystem::path checkpoint_at(const std::string& dir);
// As checkpoint_at, but takes the newest checkpoint even if it is damaged.
std::filesystem::path newest_at(const std::string& dir);

// Text from a file on one line: control characters and invisible ones are escaped.
std::string visible(std::string_view text);
std::string shortened(std::string_view text, size_t columns);  // visible, and cut off with "…"

// Natural order: the model, then the optimizer, then the rest; layers.2 before layers.10.
bool natural_less(const std::string& a, const std::string& b);

// Names that differ only in numbers, folded into one: "layers.{0..15}.weight".
struct Folded {
  std::string name;             // not yet made visible
  std::vector<size_t> members;  // indices of what was given, in natural order
};
struct Foldable {
  std::string name;
  std::string alike;  // only names with the same text here are folded
};
std::vector<Folded> fold(const std::vector<Foldable>& names);  // in natural order

// The numbers in a name, which tell it from the others of its fold: "{3}".
std::string numbers_in(const std::string& name);

// "bytes 1,024 to 2,048"
std::string byte_range(int64_t begin, int64_t end);

// A progress line on stderr; nothing if stderr isn't a terminal.
class ByteProgress {
 public:
  explicit ByteProgress(std::string what);
  ~ByteProgress();
  void at(int64_t done, int64_t total);

 private:
  using Clock = std::chrono::steady_clock;
  std::string what_;
  bool shown_, printed_ = false;
  Clock::time_point begin_ = Clock::now(), last_ = begin_;
};

}  // namespace fsdp::cli
