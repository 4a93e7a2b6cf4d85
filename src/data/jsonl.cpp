#include "data/jsonl.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "base/format.h"
#include "base/shallow_json.h"
#include "data/chat_format.h"
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

// A line's pieces, or why it is skipped.
struct Pieces {
  std::vector<ChatPiece> pieces;
  bool ends = true;   // with the token that ends a document
  size_t chosen = 0;  // pieces of the first of two documents; 0: there is one
  std::string bad;
};

bool is_empty(const std::vector<ChatPiece>& pieces) {
  return std::all_of(pieces.begin(), pieces.end(),
                     [](const ChatPiece& piece) { return piece.text.empty(); });
}

// What two answers to one prompt have in common isn't learned from.
void keep_differences(std::vector<ChatPiece>& chosen, std::vector<ChatPiece>& rejected) {
  for (size_t i = 0; i < std::min(chosen.size(), rejected.size()); ++i) {
    if (chosen[i].text != rejected[i].text || chosen[i].counts != rejected[i].counts) return;
    chosen[i].counts = rejected[i].counts = false;
  }
}

struct JsonlReader {
  const std::string& path;
  const JsonlOptions& options;
  const ChatFormat* chat = nullptr;

  std::string where(const Line& line, const std::string& why) const {
    return formatted("{}: line {}: {}", path, line.number, why);
  }

  [[noreturn]] void refuse(const Line& line, const std::string& why) const {
    throw Error(
        where(line, why) + ".",
        formatted("each line is an object with \"messages\", \"conversations\", "
                  "\"instruction\" and \"output\", \"{}\" and \"{}\", or \"{}\" (see "
                  "docs/data.md); data.bad_lines = skip leaves bad lines out. fsdp tokenize has "
                  "--skip-bad-lines, and --text-field, --prompt-field and "
                  "--completion-field for other names.",
                  options.prompt_field, options.completion_field, options.text_field));
  }

  static OrderedJson object(const Line& line) {
    OrderedJson value = parse_shallow<OrderedJson>(line.text, kMostLevels);
    if (value.is_discarded())
      throw BadLine{formatted("isn't JSON, or has more than {} levels", kMostLevels)};
    return value;
  }

  void read(const OrderedJson& value, LineKind kind, Pieces& out) const {
    if (kind_of(value, options) != kind)
      throw BadLine{formatted("is unlike the first line, which has {}", described(kind))};
    if (kind == LineKind::kText) {
      out.pieces = {{text_of(value, options.text_field), true}};
    } else if (kind == LineKind::kPrompts) {
      out.pieces = {{text_of(value, options.prompt_field), false},
                    {text_of(value, options.completion_field), true}};
    } else if (kind == LineKind::kPairs) {
      read_pair(value, out);
    } else if (kind == LineKind::kAlpaca && !chat->exists()) {
      out.pieces = {{alpaca_prompt(value), false}, {text_of(value, "output"), true}};
    } else {
      out.pieces = chat->pieces(conversation_of(value, kind));
      out.ends = false;
    }
  }

  std::vector<ChatPiece> answer(const OrderedJson& value, const char* side) const {
    if (value[side].is_array()) return chat->pieces(conversation_of_pair(value, side));
    return {{text_of(value, options.prompt_field), false}, {text_of(value, side), true}};
  }

  void read_pair(const OrderedJson& value, Pieces& out) const {
    out.ends = !value["chosen"].is_array();
    if (out.ends == value["rejected"].is_array())
      throw BadLine{"has messages and a text as answers"};
    if (!out.ends && !chat->exists()) throw BadLine{"has messages, but there is no chat template"};
    out.pieces = answer(value, "chosen");
    std::vector<ChatPiece> rejected = answer(value, "rejected");
    if (is_empty(out.pieces) || is_empty(rejected)) throw BadLine{"has an answer without text"};
    if (!out.ends) keep_differences(out.pieces, rejected);
    out.chosen = out.pieces.size();
    out.pieces.insert(out.pieces.end(), rejected.begin(), rejected.end());
  }

  Pieces pieces(const Line& line, LineKind kind) const {
    Pieces out;
    const bool skips = options.bad_lines == BadLines::kSkip;
    try {
      read(object(line), kind, out);
    } catch (const BadLine& bad) {
      if (!skips) refuse(line, bad.why);
      out.bad = where(line, bad.why);
    } catch (const Error& problem) {  // of the chat template
      if (!skips) throw Error(where(line, problem.message()), problem.hint());
      out.bad = where(line, problem.message());
    }
    return out;
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

// Of some of a line's pieces. `ids` are those of all lines' pieces, from `first` on the line's.
JsonlDocument document_of(const Line& line, const Pieces& pieces, size_t from, size_t to,
                          const std::vector<std::vector<int32_t>>& ids, size_t first,
                          const Tokenizer& tokenizer) {
  JsonlDocument result;
  for (size_t i = from; i < to; ++i) {
    result.ids.insert(result.ids.end(), ids[first + i].begin(), ids[first + i].end());
    result.counts.resize(result.ids.size(), pieces.pieces[i].counts);
  }
  if (pieces.ends && tokenizer.eos()) {
    result.ids.push_back(*tokenizer.eos());
    result.counts.push_back(1);
  }
  result.bytes = static_cast<int64_t>(line.text.size()) + 1;
  result.line = line.number;
  return result;
}

// A format for files that need one.
std::optional<ChatFormat> chat_format(const std::string& path, LineKind kind,
                                      const Tokenizer& tokenizer, const JsonlOptions& options) {
  if (kind == LineKind::kText || kind == LineKind::kPrompts) return std::nullopt;
  std::optional<ChatFormat> chat(std::in_place, tokenizer, options.chat_template);
  if (!chat->exists() && kind != LineKind::kAlpaca && kind != LineKind::kPairs)
    throw Error(
        formatted("{} has {}, but tokenizer {} has no chat template.", path, described(kind),
                  tokenizer.name()),
        "pass the template's file: --data.chat_template FILE.jinja (--chat-template of fsdp "
        "tokenize).");
  return chat;
}

}  // namespace

LineKind kind_of_lines(const std::string& path, const JsonlOptions& options) {
  LineBatches file(path, std::min(options.batch, kFirstRead));
  const JsonlReader reader{path, options};
  for (auto lines = file.next(); !lines.empty(); lines = file.next()) {
    for (const Line& line : lines) {
      try {
        return kind_of(JsonlReader::object(line), options);
      } catch (const BadLine& bad) {
        if (options.bad_lines == BadLines::kStop) reader.refuse(line, bad.why);
      }
    }
  }
  throw Error(formatted("{} has no lines that can be read.", path), "is it complete?");
}

SkippedLines tokenise_jsonl(const std::string& path, const Tokenizer& tokenizer,
                            const JsonlOptions& options,
                            const std::function<void(JsonlDocument&&)>& document) {
  const LineKind kind = kind_of_lines(path, options);
  const auto chat = chat_format(path, kind, tokenizer, options);
  LineBatches file(path, options.batch);
  JsonlReader reader{path, options, chat ? &*chat : nullptr};
  EncodeOptions encode;
  encode.threads = options.threads;
  SkippedLines skipped;
  for (auto lines = file.next(); !lines.empty(); lines = file.next()) {
    std::vector<Pieces> all(lines.size());
    for_each_index(lines.size(), options.threads,
                   [&](size_t i) { all[i] = reader.pieces(lines[i], kind); });
    std::vector<std::string_view> texts;
    for (const Pieces& one : all)
      for (const ChatPiece& piece : one.pieces) texts.push_back(piece.text);
    auto ids = tokenizer.encode_batch(texts, encode);
    size_t first = 0;
    for (size_t i = 0; i < lines.size(); ++i) {
      if (!all[i].bad.empty()) {
        if (skipped.count++ == 0) skipped.first = all[i].bad;
        continue;
      }
      const size_t count = all[i].pieces.size(), chosen = all[i].chosen;
      if (chosen > 0) document(document_of(lines[i], all[i], 0, chosen, ids, first, tokenizer));
      document(document_of(lines[i], all[i], chosen, count, ids, first, tokenizer));
      first += count;
    }
  }
  return skipped;
}

}  // namespace fsdp::data
