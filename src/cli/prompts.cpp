#include "cli/prompts.h"

#include <chrono>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "base/regular_file.h"
#include "base/shallow_json.h"
#include "base/table.h"
#include "data/conversations.h"
#include "data/files.h"
#include "fsdp/error.h"

namespace fsdp::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Question {
  Json conversation;   // null: a text
  std::string prompt;  // the text, or the only message of the conversation
};

// The lines of a file that aren't empty.
class Questions {
 public:
  explicit Questions(const std::string& path)
      : path_(path), json_(data::is_json_lines(path)), file_(path), lines_(file_.or_throw()) {}

  // The next one; nullopt at the end. Throws Error with the line.
  std::optional<Question> next() {
    std::string line;
    do {
      if (!lines_.next(line)) return std::nullopt;
      ++number_;
    } while (line.find_first_not_of(" \t\r") == std::string::npos);
    if (line.ends_with('\r')) line.pop_back();
    if (!json_) return Question{{}, line};
    try {
      return read(line);
    } catch (const data::BadLine& bad) {
      throw Error(formatted("{}: line {}: {}.", path_, number_, bad.why),
                  "each line of a .jsonl file is {\"prompt\": \"…\"} or {\"messages\": [{\"role\": "
                  "\"user\", \"content\": \"…\"}]}.");
    }
  }

 private:
  static Question read(const std::string& line) {
    const Json value = parse_shallow<Json>(line, data::kMostLevels);
    if (!value.is_object()) throw data::BadLine{"isn't a JSON object"};
    if (value.contains("messages") && value["messages"].is_array())
      return {data::conversation_of(value, data::LineKind::kMessages), ""};
    return {{}, data::text_of(value, "prompt")};
  }

  std::string path_;
  bool json_;
  RegularFile file_;
  LineReader lines_;
  int64_t number_ = 0;
};

Json answered(const Question& question, const Writer::Written& written) {
  Json line;
  if (question.conversation.is_null()) {
    line = {{"prompt", question.prompt}, {"completion", written.text}};
  } else {
    line["messages"] = question.conversation["messages"];
    line["messages"].push_back({{"role", "assistant"}, {"content", written.text}});
  }
  line["tokens"] = written.tokens;
  line["end"] = written.ended ? "stop" : "length";
  return line;
}

}  // namespace

bool has_conversations(const std::string& file) {
  const auto first = Questions(file).next();
  if (!first) throw Error(formatted("{} has no prompts.", file), "put one on each line.");
  return !first->conversation.is_null();
}

int answer_prompts(Writer& writer, const Chat* chat, const PromptsOptions& options,
                   const train::SampleOptions& sample) {
  Questions questions(options.file);
  const auto start = std::chrono::steady_clock::now();
  int64_t tokens = 0;
  uint64_t answers = 0;
  for (bool more = true; more && std::cout;) {
    std::vector<Question> batch;
    std::vector<std::vector<int64_t>> prompts;
    while (static_cast<int64_t>(batch.size()) < options.batch) {
      auto question = questions.next();
      more = question.has_value();
      if (!more) break;
      if (chat && question->conversation.is_null()) {
        question->conversation = Chat::begin(options.system);
        Chat::say(question->conversation, "user", question->prompt);
      }
      const bool asked = !question->conversation.is_null();
      if (asked && !chat)
        throw Error(formatted("{} has texts and conversations.", options.file),
                    "add --chat, which makes a conversation of each text.");
      prompts.push_back(asked ? chat->prompt(question->conversation)
                              : writer.encode(question->prompt));
      batch.push_back(std::move(*question));
    }
    const auto written = writer.write_batch(prompts, sample, answers);
    for (size_t i = 0; i < written.size(); ++i) {
      std::cout
          << answered(batch[i], written[i]).dump(-1, ' ', false, Json::error_handler_t::replace)
          << "\n";
      tokens += written[i].tokens;
    }
    std::cout << std::flush;
    answers += written.size();
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  if (!options.quiet)
    std::cerr << "fsdp: " << answers << " answers, " << tokens << " tokens, "
              << number(static_cast<double>(tokens) / took.count(), 1).text << " per second\n";
  return 0;
}

}  // namespace fsdp::cli
