#include "cli/chat.h"

#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "base/table.h"
#include "base/terminal.h"
#include "fsdp/error.h"

namespace fsdp::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string template_file(const Writer& writer, const std::string& file) {
  const std::string& trained = writer.files().config.data.chat_template;
  std::error_code problem;
  return file.empty() && std::filesystem::exists(trained, problem) ? trained : file;
}

// What `fsdp generate --chat` says and reads around the answers.
class Screen {
 public:
  explicit Screen(bool quiet)
      : typed_(isatty(STDIN_FILENO) && isatty(STDOUT_FILENO)), quiet_(quiet) {}

  void greet() const {
    if (typed_ && !quiet_)
      std::cerr
          << "fsdp: type a message and Enter; /new begins another conversation, Ctrl-D ends\n";
  }
  // The next message; false at the end of stdin.
  bool ask(std::string& line) const {
    do {
      if (typed_) std::cout << "\n" << paint(STDOUT, "1", "> ") << std::flush;
      if (!std::getline(std::cin, line)) return false;
      if (line.ends_with('\r')) line.pop_back();
    } while (line.find_first_not_of(" \t") == std::string::npos);
    return true;
  }
  bool begins_anew(const std::string& line) const { return typed_ && line == "/new"; }
  void end(int64_t tokens, double seconds) const {
    if (typed_) std::cout << "\n";
    if (!quiet_ && tokens > 0)
      std::cerr << "fsdp: " << tokens << " tokens, "
                << number(static_cast<double>(tokens) / seconds, 1).text << " per second\n";
  }

 private:
  bool typed_, quiet_;
};

struct Pace {
  int64_t tokens = 0;
  double seconds = 0;
};

// Writes the next answer and adds it to the conversation. False: nobody reads on.
bool answer(Writer& writer, const Chat& chat, Json& conversation,
            const train::SampleOptions& sample, Pace& pace) {
  const auto start = std::chrono::steady_clock::now();
  std::string text;
  pace.tokens += writer.write(chat.prompt(conversation), sample, [&](const std::string& piece) {
    text += piece;
    std::cout << piece << std::flush;
    return static_cast<bool>(std::cout);
  });
  std::cout << std::endl;
  pace.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  Chat::say(conversation, "assistant", text);
  return static_cast<bool>(std::cout);
}

}  // namespace

Chat::Chat(Writer& writer, const std::string& file)
    : writer_(writer), format_(writer.tokenizer(), template_file(writer, file)) {
  if (!format_.exists())
    throw Error(formatted("{} has no chat template, so it wasn't made for conversations.",
                          writer.files().weights),
                "leave out --chat to let it continue a text, or pass --chat-template FILE.jinja.");
  if (const auto end = format_.end_of_turn(writer.tokenizer())) writer.add_end(*end);
}

std::vector<int64_t> Chat::prompt(const Json& conversation) const {
  return writer_.encode(format_.prompt(conversation), /*template_written=*/true);
}

Json Chat::begin(const std::string& system) {
  Json conversation = {{"messages", Json::array()}, {"tools", nullptr}, {"documents", nullptr}};
  if (!system.empty()) say(conversation, "system", system);
  return conversation;
}

void Chat::say(Json& conversation, const char* role, const std::string& text) {
  conversation["messages"].push_back({{"role", role}, {"content", text}});
}

int converse(Writer& writer, const Chat& chat, const ChatOptions& options,
             const train::SampleOptions& sample) {
  const Screen screen(options.quiet);
  Json conversation = Chat::begin(options.system);
  Pace pace;
  if (!options.prompt.empty()) {
    Chat::say(conversation, "user", options.prompt);
    answer(writer, chat, conversation, sample, pace);
    screen.end(pace.tokens, pace.seconds);
    return 0;
  }
  screen.greet();
  for (std::string line; screen.ask(line);) {
    if (screen.begins_anew(line)) {
      conversation = Chat::begin(options.system);
      continue;
    }
    Chat::say(conversation, "user", line);
    if (!answer(writer, chat, conversation, sample, pace)) break;
  }
  screen.end(pace.tokens, pace.seconds);
  return 0;
}

}  // namespace fsdp::cli
