// Text: a string that knows where its characters come from: the template, or a message.
//
// What is made of texts keeps the origin of each character where characters are moved
// (concatenation, slices, strip, split, replace). Where they are computed anew (tojson, upper) the
// whole result has the origin of what went in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::chat {

enum class Part : uint8_t { kTemplate, kRole, kContent };  // kContent: any field but the role

struct Origin {
  Part part = Part::kTemplate;
  bool generated = false;  // inside {% generation %}
  int32_t message = -1;    // whose field it is
  int32_t turn = -1;       // the message in whose turn of a loop it was written
  bool operator==(const Origin&) const = default;
};

struct Run {
  size_t end;  // in bytes; it begins where the run before ends
  Origin origin;
};

class Text {
 public:
  Text() = default;
  explicit Text(std::string bytes, Origin origin = {});

  const std::string& bytes() const { return bytes_; }
  size_t size() const { return bytes_.size(); }
  const std::vector<Run>& runs() const { return runs_; }  // of equal origin

  void append(const Text& other);
  void append(std::string_view bytes, Origin origin = {});
  // Bytes [from, to).
  Text part(size_t from, size_t to) const;
  // The origin of what is computed from all of it: the content of a message, if there is any.
  Origin origin() const;
  // Says what isn't known yet about where it is written.
  void write_in(int32_t turn, bool generated);

 private:
  std::string bytes_;
  std::vector<Run> runs_;
};

// The stronger of two origins.
Origin stronger(Origin a, Origin b);

// --- UTF-8, which is valid in all texts ---

inline bool continues_code(char c) {
  return (static_cast<unsigned char>(c) & 0xc0) == 0x80;
}
size_t count_codes(std::string_view text);
// Where each character begins, and the end.
std::vector<size_t> code_starts(std::string_view text);
char32_t code_at(std::string_view text, size_t at);
void put_code(std::string& out, char32_t code);
// White space as Python's str.isspace defines it.
bool is_white(char32_t code);
// The first byte from `at` on that isn't white space, or the end.
size_t skip_white(std::string_view text, size_t at);
// The end of `text` without white space at its end.
size_t trimmed_end(std::string_view text);

}  // namespace fsdp::chat
