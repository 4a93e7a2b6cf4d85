// What the commands under `fsdp ckpt` that look at checkpoints share: where a checkpoint is, and
// how names from files are shown.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::cli {

// What was meant by DIR: a run's directory, its checkpoints folder, one checkpoint, or a Hugging
// Face directory. A damaged checkpoint that lacks its .metadata counts as one.
std::filesystem::path checkpoint_at(const std::string& dir);
// The same for who looks for damage: the newest one, whole or not.
std::filesystem::path newest_at(const std::string& dir);

// Text of a file on one line: what could act on a terminal, or cannot be seen, is spelled out.
std::string visible(std::string_view text);
std::string shortened(std::string_view text, size_t columns);  // visible, and cut off with "…"

// The order of people: the model, then the optimizer, then the rest; layers.2 before layers.10.
bool natural_less(const std::string& a, const std::string& b);

// Names that differ in numbers only, as one: "layers.{0..15}.weight".
struct Folded {
  std::string name;             // not yet made visible
  std::vector<size_t> members;  // indices of what was given, in natural order
};
struct Foldable {
  std::string name;
  std::string alike;  // only what has the same text here is folded into one
};
std::vector<Folded> fold(const std::vector<Foldable>& names);  // in natural order

// What tells a member from the others of its fold: its numbers, as "{3}".
std::string numbers_in(const std::string& name);

// "bytes 1,024 to 2,048"
std::string byte_range(int64_t begin, int64_t end);

// How far it is, in one line that is written again and again, for those who watch.
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
