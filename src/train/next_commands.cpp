#include "train/next_commands.h"

#include <iostream>
#include <string>

#include "base/format.h"
#include "base/terminal.h"
#include "train/shell.h"

namespace fsdp::train {
namespace {

// Prints a few commands to try next.
void suggest_next(const Training& training) {
  std::string fsdp = fsdp_command(), run = shell_word(training.directory.root.string());
  auto row = [&](const std::string& command, const std::string& what) {
    std::cout << "  " << paint(STDOUT, "1", fsdp + " " + command) << "\n      " << what << "\n";
  };
  std::cout << "\nNext:\n";
  if (training.task.text && training.corpus->tokenizer()) {
    const Config& config = training.config;  // without data.train it learned to write C++
    const bool chats =
        config.data.loss_mask && (!config.data.chat_template.empty() ||
                                  !training.corpus->tokenizer()->chat_template().empty());
    std::string prompt = config.data.train.empty() ? "class " : config.train.sample_prompt;
    if (chats)
      row(formatted("generate {} --chat", run), "converse with the model");
    else
      row(formatted("generate {}{}", run, prompt.empty() ? "" : " --prompt " + shell_word(prompt)),
          "let the model continue a text");
  }
  row(formatted("train --dir {} --resume --steps {}", run, 2 * training.steps),
      "train on from the last checkpoint");
  row(formatted("report {}", run), "see the run as a page in a browser");
  row("explain", "follow one sharded step, line by line");
}

}  // namespace

void say_what_is_next(const Training& training, const std::filesystem::path& checkpoint,
                      bool stopped) {
  const std::string run = shell_word(training.directory.root.string());
  if (!std::filesystem::exists(checkpoint)) {
    std::cout << "\nNo checkpoint was written: checkpoint.at_end is false.\n" << std::flush;
    return;
  }
  std::cout << "\nCheckpoint: " << checkpoint.string() << "\n";
  if (stopped)
    std::cout << "Resume with: "
              << paint(STDOUT, "1", formatted("{} train --dir {} --resume", fsdp_command(), run))
              << "\n";
  else
    suggest_next(training);
  std::cout << std::flush;
}

}  // namespace fsdp::train
