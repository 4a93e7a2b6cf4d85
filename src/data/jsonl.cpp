#include "data/jsonl.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/format.h"
#include "data/data_file.h"
#include "data/parallel.h"
#include "fsdp/error.h"

namespace fsdp::data {
namespace {

constexpr int64_t kFirstRead = 1 << 16;  // bytes, for the first line

struct Line {
  std::string_view text;
  int64_t number;
};

struct Parts {
  std::string prompt, text;
};

struct JsonlReader {
  const std::string& path;
  const JsonlOptions& options;

  [[noreturn]] void refuse(int64_t line, const std::string& why) const {
    throw Error(formatted("{}: line {}: {}.", path, line, why),
                formatted("each line must be an object with \"{}\", or with \"{}\" and \"{}\"; "
                          "--text-field, --prompt-field and --completion-field set other names.",
                          options.text_field, options.prompt_field, options.completion_field));
  }

  nlohmann::json object(const Line& line) const {
    auto value = nlohmann::json::parse(line.text, nullptr, false);
    if (value.is_discarded()) refuse(line.number, "isn't JSON");
    if (!value.is_object()) refuse(line.number, "isn't an object");
    return value;
  }

  bool prompts(const nlohmann::json& value, int64_t line) const {
    bool both = value.contains(options.prompt_field) && value.contains(options.completion_field);
    if (!both && !value.contains(options.text_field)) {
      refuse(line, formatted("has no \"{}\"", options.text_field));
    }
    return both;
  }

  std::string field(nlohmann::json& value, const std::string& name, int64_t line) const {
    auto found = value.find(name);
    if (found == value.end() || !found->is_string())
      refuse(line, formatted("\"{}\" isn't a string", name));
    return std::move(found->get_ref<std::string&>());
  }

  Parts parts(const Line& line, bool with_prompts) const {
    auto value = object(line);
    if (prompts(value, line.number) != with_prompts) {
      refuse(line.number, with_prompts ? "has no prompt and completion, unlike the first line"
                                       : "has a prompt and a completion, unlike the first line");
    }
    if (!with_prompts) return {"", field(value, options.text_field, line.number)};
    return {field(value, options.prompt_field, line.number),
            field(value, options.completion_field, line.number)};
  }
};

// Moves to the next line that isn't empty; false at the end.
bool next_line(std::string_view& rest, Line& line) {
  while (!rest.empty()) {
    size_t end = rest.find('\n');
    line.text = rest.substr(0, end);
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
    ++line.number;
    if (line.text.find_first_not_of(" \t\r") != std::string_view::npos) return true;
  }
  return false;
}

// The lines of a file, many at a time. The file is read from front to end.
class LineBatches {
 public:
  LineBatches(const std::string& path, int64_t batch) : file_(path), batch_(batch) {}

  // Some lines that aren't empty; none at the end. They are valid until the next call.
  std::vector<Line> next() {
    std::vector<Line> lines;
    while (lines.empty() && read_lines()) {
      std::string_view rest = std::string_view(text_).substr(0, whole_);
      Line line{{}, number_};
      while (next_line(rest, line)) lines.push_back(line);
      number_ = line.number;
    }
    return lines;
  }

 private:
  bool read_lines();

  DataFile file_;
  const int64_t batch_;
  std::string text_;    // whole lines, and the beginning of another one
  size_t whole_ = 0;    // bytes of the whole lines
  int64_t read_ = 0;    // bytes of the file
  int64_t number_ = 0;  // of the last line
};

// Reads on until there are whole lines. False at the end of the file.
bool LineBatches::read_lines() {
  text_.erase(0, whole_);
  for (whole_ = 0; whole_ == 0 && read_ < file_.size();) {
    const size_t had = text_.size();
    const int64_t more = std::min(batch_, file_.size() - read_);
    text_.resize(had + static_cast<size_t>(more));
    file_.read(read_, text_.data() + had, more);
    read_ += more;
    const size_t end = std::string_view(text_).substr(had).rfind('\n');
    if (read_ == file_.size())
      whole_ = text_.size();
    else if (end != std::string_view::npos)
      whole_ = had + end + 1;
  }
  return whole_ > 0;
}

}  // namespace

bool has_prompts(const std::string& path, const JsonlOptions& options) {
  LineBatches file(path, std::min(options.batch, kFirstRead));
  const auto lines = file.next();
  if (lines.empty()) throw Error(formatted("{} has no lines.", path), "is it complete?");
  JsonlReader reader{path, options};
  return reader.prompts(reader.object(lines[0]), lines[0].number);
}

void tokenise_jsonl(const std::string& path, const Tokenizer& tokenizer,
                    const JsonlOptions& options,
                    const std::function<void(JsonlDocument&&)>& document) {
  bool with_prompts = has_prompts(path, options);
  LineBatches file(path, options.batch);
  JsonlReader reader{path, options};
  EncodeOptions encode;
  encode.threads = options.threads;
  for (auto lines = file.next(); !lines.empty(); lines = file.next()) {
    std::vector<Parts> parts(lines.size());
    for_each_index(lines.size(), options.threads,
                   [&](size_t i) { parts[i] = reader.parts(lines[i], with_prompts); });
    std::vector<std::string_view> texts;
    for (const Parts& part : parts) texts.insert(texts.end(), {part.prompt, part.text});
    auto ids = tokenizer.encode_batch(texts, encode);
    for (size_t i = 0; i < lines.size(); ++i) {
      JsonlDocument result;
      result.ids = std::move(ids[2 * i]);
      result.counts.assign(result.ids.size(), 0);
      result.ids.insert(result.ids.end(), ids[2 * i + 1].begin(), ids[2 * i + 1].end());
      if (tokenizer.eos()) result.ids.push_back(*tokenizer.eos());
      result.counts.resize(result.ids.size(), 1);
      result.bytes = static_cast<int64_t>(lines[i].text.size()) + 1;
      document(std::move(result));
    }
  }
}

}  // namespace fsdp::data
