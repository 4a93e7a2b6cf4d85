// Machine: one rendering of a template. It has the limits that a hostile template meets, and the
// line that errors name.
#pragma once

#include <cstdint>
#include <ctime>
#include <functional>
#include <string>
#include <string_view>

namespace fsdp::chat {

// Each is for one rendering. `steps` counts evaluated nodes and, in units of 16 bytes, text and
// lists that are made or read.
struct Limits {
  int64_t steps = 20'000'000;
  int64_t bytes = int64_t{512} << 20;  // of all texts and lists that are made
  int64_t output = int64_t{64} << 20;  // bytes
  int depth = 1000;                    // of nodes that are evaluated inside each other
};

constexpr int kDeepestValue = 100;  // lists and dicts in each other

class Machine {
 public:
  Machine(std::string name, Limits limits) : name_(std::move(name)), left_(limits) {}

  // Throws Error: the template, the line, and why.
  [[noreturn]] void refuse(const std::string& why) const;
  [[noreturn]] void refuse(const std::string& why, const std::string& hint) const;

  void step(int64_t steps = 1) {
    if ((left_.steps -= steps) < 0) too_much("takes too many steps");
  }
  void read(size_t bytes) { step(static_cast<int64_t>(bytes / 16) + 1); }
  // Before so many bytes are made.
  void make(size_t bytes);
  void output(size_t bytes);
  int line = 1;

  // Nodes that are evaluated inside each other.
  class Inside {
   public:
    explicit Inside(Machine& machine) : machine_(machine) {
      if (--machine_.left_.depth < 0) machine_.too_deep();
      machine_.step();
    }
    ~Inside() { ++machine_.left_.depth; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    Machine& machine_;
  };

 private:
  [[noreturn]] void too_much(const char* what) const;
  [[noreturn]] void too_deep();

  std::string name_;
  Limits left_;
};

}  // namespace fsdp::chat
