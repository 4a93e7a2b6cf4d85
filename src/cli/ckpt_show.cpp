#include "cli/ckpt_show.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <iostream>
#include <map>
#include <set>

#include "base/format.h"
#include "base/table.h"
#include "checkpoint/hugging_face.h"
#include "checkpoint/manifest.h"
#include "data/unicode.h"
#include "train/run_directory.h"

namespace fsdp::cli {

namespace fs = std::filesystem;

namespace {

bool is_number(const std::string& step) {
  return !step.empty() && step.size() <= 9 && (step == "0" || step[0] != '0') &&
         std::all_of(step.begin(), step.end(), [](unsigned char c) { return std::isdigit(c); });
}

std::vector<std::string> steps_of(const std::string& name) {
  std::vector<std::string> steps;
  for (size_t begin = 0;;) {
    const size_t dot = name.find('.', begin);
    steps.push_back(name.substr(begin, dot - begin));
    if (dot == std::string::npos) return steps;
    begin = dot + 1;
  }
}

int turn_of(const std::string& kind) {
  return kind == "model" ? 0 : kind == "optim" ? 1 : kind == "extra" ? 2 : 3;
}

// Whether a directory without .metadata was a checkpoint.
bool is_damaged_checkpoint(const fs::path& dir) {
  std::error_code problem;
  if (fs::exists(dir / checkpoint::kManifestName, problem)) return true;
  for (const auto& entry : fs::directory_iterator(dir, problem))
    if (entry.path().extension() == ".distcp") return true;
  return false;
}

std::string text_of(const std::set<int64_t>& numbers) {
  const int64_t first = *numbers.begin(), last = *numbers.rbegin();
  if (first == last) return std::to_string(first);
  if (last - first + 1 == static_cast<int64_t>(numbers.size()))
    return formatted("{{{}..{}}}", first, last);
  constexpr size_t kShown = 6;
  std::string text;
  size_t count = 0;
  for (const int64_t number : numbers) {
    if (++count > kShown) return formatted("{{{},…,{}}}", text, last);
    text += formatted("{}{}", text.empty() ? "" : ",", number);
  }
  return formatted("{{{}}}", text);
}

// One name for all, if they are every combination of their numbers; else "".
std::string common_name(const std::vector<std::vector<std::string>>& names) {
  std::vector<std::set<int64_t>> numbers(names[0].size());
  for (const auto& steps : names)
    for (size_t i = 0; i < steps.size(); ++i)
      if (is_number(steps[i])) numbers[i].insert(std::stoll(steps[i]));
  size_t combinations = 1;
  std::string text;
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (!numbers[i].empty()) combinations *= numbers[i].size();
    if (combinations > names.size()) return "";
    text += (i ? "." : "") + (numbers[i].empty() ? names[0][i] : text_of(numbers[i]));
  }
  return combinations == names.size() ? text : "";
}

}  // namespace

fs::path checkpoint_at(const std::string& dir) {
  std::error_code problem;
  const bool ours = fs::exists(fs::path(dir) / ".metadata", problem);
  if (!ours && fs::is_directory(dir, problem) &&
      (is_damaged_checkpoint(dir) || checkpoint::is_hugging_face(dir)))
    return dir;
  return train::find_checkpoint(dir).checkpoint;
}

fs::path newest_at(const std::string& dir) {
  std::error_code problem;
  if (fs::exists(fs::path(dir) / ".metadata", problem)) return checkpoint_at(dir);
  for (const fs::path& folder : {fs::path(dir) / "checkpoints", fs::path(dir)}) {
    const fs::path named = fs::read_symlink(folder / "latest", problem);
    if (!problem && fs::is_directory(folder / named, problem)) return folder / named;
  }
  return checkpoint_at(dir);
}

std::string visible(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const auto step = data::utf8_step(text, at);
    if (step.valid) {
      size_t next = at;
      const char32_t c = data::next_code(text, next);
      using data::Category;
      constexpr uint32_t kHidden = bit(Category::Cc) | bit(Category::Cf) | bit(Category::Zl) |
                                   bit(Category::Zp) | bit(Category::Co) | bit(Category::Cn);
      if (!(bit(data::category(c)) & kHidden)) {
        out += text.substr(at, next - at);
      } else if (c == '\n' || c == '\t') {
        out += c == '\n' ? "\\n" : "\\t";
      } else {
        out += c < 0x80 ? formatted("\\x{:02x}", c) : formatted("\\u{{{:x}}}", c);
      }
      at = next;
      continue;
    }
    out += formatted("\\x{:02x}", static_cast<unsigned char>(text[at]));
    ++at;
  }
  return out;
}

std::string shortened(std::string_view text, size_t columns) {
  const std::string whole = visible(text.substr(0, 4 * columns + 4));
  std::string out;
  size_t width = 0;
  for (const char c : whole) {
    if (!data::continues(c) && ++width > columns) return out + "…";
    out += c;
  }
  return out;
}

bool natural_less(const std::string& a, const std::string& b) {
  const auto one = steps_of(a), other = steps_of(b);
  if (const int x = turn_of(one[0]), y = turn_of(other[0]); x != y) return x < y;
  for (size_t i = 0; i < std::min(one.size(), other.size()); ++i) {
    if (one[i] == other[i]) continue;
    const bool number = is_number(one[i]);
    if (number != is_number(other[i])) return number;
    return number ? std::stoll(one[i]) < std::stoll(other[i]) : one[i] < other[i];
  }
  return one.size() < other.size();
}

std::vector<Folded> fold(const std::vector<Foldable>& names) {
  std::vector<size_t> order(names.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return natural_less(names[a].name, names[b].name); });
  std::map<std::pair<std::vector<std::string>, std::string>, std::vector<size_t>> groups;
  for (const size_t i : order) {
    auto pattern = steps_of(names[i].name);
    for (auto& step : pattern)
      if (is_number(step)) step = "#";
    groups[{std::move(pattern), names[i].alike}].push_back(i);
  }
  std::vector<Folded> folded;
  for (const auto& [pattern, members] : groups) {
    std::vector<std::vector<std::string>> steps;
    for (const size_t i : members) steps.push_back(steps_of(names[i].name));
    auto common = common_name(steps);
    if (!common.empty())
      folded.push_back({std::move(common), members});
    else
      for (const size_t i : members) folded.push_back({names[i].name, {i}});
  }
  std::stable_sort(folded.begin(), folded.end(), [&](const Folded& a, const Folded& b) {
    return natural_less(names[a.members[0]].name, names[b.members[0]].name);
  });
  return folded;
}

std::string numbers_in(const std::string& name) {
  std::string text;
  for (const auto& step : steps_of(name))
    if (is_number(step)) text += (text.empty() ? "{" : ",") + step;
  return text.empty() ? "" : text + "}";
}

std::string byte_range(int64_t begin, int64_t end) {
  return formatted("bytes {} to {}", with_separators(begin), with_separators(end));
}

ByteProgress::ByteProgress(std::string what)
    : what_(std::move(what)), shown_(isatty(STDERR_FILENO) != 0) {}

ByteProgress::~ByteProgress() {
  if (printed_) std::cerr << "\r\033[K";
}

void ByteProgress::at(int64_t done, int64_t total) {
  const auto now = Clock::now();
  if (!shown_ || total <= 0 || (printed_ && now - last_ < std::chrono::milliseconds(200))) return;
  last_ = now;
  printed_ = true;
  const double seconds = std::max(1e-3, std::chrono::duration<double>(now - begin_).count());
  std::cerr << formatted("\r\033[K{}: {:3.0f} % of {}, {:.0f} MB/s", what_,
                         100.0 * static_cast<double>(done) / static_cast<double>(total),
                         human_bytes(static_cast<double>(total)),
                         static_cast<double>(done) / 1e6 / seconds);
}

}  // namespace fsdp::cli
