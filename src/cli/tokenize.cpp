// fsdp tokenize: writes token files, and shows the tokens of a text or the text of a token file.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <memory>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/table.h"
#include "base/terminal.h"
#include "cli/commands.h"
#include "cli/show_lines.h"
#include "data/files.h"
#include "data/jsonl.h"
#include "data/split.h"
#include "data/text_source.h"
#include "data/token_file.h"
#include "data/token_writer.h"
#include "data/unicode.h"
#include "fsdp/error.h"
#include "fsdp/tokenizer.h"
#include "train/hub_cache.h"

namespace fsdp::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTokenizeExamples =
    "Examples:\n"
    "  fsdp tokenize book.txt notes/ --out books.bin                    one token per byte\n"
    "  fsdp tokenize corpus/ --tokenizer llama3/ --out corpus.bin       with a tokenizer.json\n"
    "  fsdp tokenize chats.jsonl --tokenizer llama3/ --out chats.bin    conversations, one per "
    "line\n"
    "  fsdp tokenize chats.jsonl --tokenizer llama3/ --show 3           show what is trained on\n"
    "  fsdp tokenize --tokenizer t.json --show \"How is this split?\"     show the tokens of a "
    "text\n"
    "  fsdp tokenize --tokenizer t.json --decode corpus.bin --first 50  show the text of a file\n"
    "\n"
    "Formats: llmc (a header, then uint16, or uint32 for large vocabularies), nanogpt (uint16 "
    "without\n"
    "a header), megatron (.bin and .idx). fsdp train reads all of them. A document is a file, or a "
    "line\n"
    "of JSON lines, and ends with the tokenizer's end-of-document token. Lines have messages,\n"
    "conversations (ShareGPT), instruction and output (Alpaca), prompt and completion, or text. "
    "If\n"
    "only a part of each counts in the loss, FILE.mask is written, too.";

struct TokenizeFlags {
  std::vector<std::string> inputs;
  std::string tokenizer = "bytes";
  std::string out;
  std::string format = "llmc";
  bool jsonl = false, skip_bad_lines = false;
  data::JsonlOptions fields;
  double valid_share = 0;
  int threads = 0;
  bool force = false;
  std::string show, decode;
  int64_t first = 100, skip = 0;
};

std::shared_ptr<const data::Tokenizer> chosen_tokenizer(const TokenizeFlags& flags) {
  return data::Tokenizer::load(train::local_model(flags.tokenizer).string());
}

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// A progress line on stderr; nothing if stderr isn't a terminal.
class Progress {
 public:
  explicit Progress(int64_t total) : total_(total), shown_(isatty(STDERR_FILENO)) {}
  ~Progress() {
    if (shown_ && printed_) std::cerr << "\r\033[K";
  }
  void at(int64_t bytes) {
    if (!shown_ || (printed_ && seconds_since(last_) < 0.2)) return;
    last_ = Clock::now();
    printed_ = true;
    std::cerr << formatted("\r\033[K{:3.0f} % of {}, {:.0f} MB/s",
                           100.0 * static_cast<double>(bytes) / static_cast<double>(total_),
                           human_bytes(static_cast<double>(total_)),
                           static_cast<double>(bytes) / 1e6 / seconds_since(begin_));
  }

 private:
  int64_t total_;
  bool shown_, printed_ = false;
  Clock::time_point begin_ = Clock::now(), last_ = begin_;
};

// Whether the inputs are JSON lines: because a flag or their names say so.
bool are_lines(const TokenizeFlags& flags) {
  const auto is_lines = [](const std::string& path) {
    std::error_code ignored;
    return fs::is_directory(path, ignored) ? !data::json_lines_below(path).empty()
                                           : data::is_json_lines(path);
  };
  const auto lines = std::count_if(flags.inputs.begin(), flags.inputs.end(), is_lines);
  if (!flags.jsonl && lines > 0 && lines < static_cast<int64_t>(flags.inputs.size()))
    throw Error("some inputs are JSON lines, and some are text.", "tokenize them separately.");
  return flags.jsonl || lines > 0;
}

std::vector<data::FoundFile> input_files(const TokenizeFlags& flags) {
  std::vector<data::FoundFile> files;
  for (const std::string& path : flags.inputs) {
    std::error_code ignored;
    if (fs::is_directory(path, ignored)) {
      auto below = flags.jsonl ? data::files_below(path) : data::text_files_below(path);
      if (flags.jsonl)
        std::erase_if(below, [](auto& file) { return !data::is_json_lines(file.path); });
      files.insert(files.end(), below.begin(), below.end());
      continue;
    }
    files.push_back(data::describe_file(path));
    if (data::looks_binary(path)) {
      throw Error(path + " isn't text: it has a zero byte.",
                  "name text files, or folders of them.");
    }
  }
  if (files.empty()) {
    throw Error("the inputs hold no text.",
                "empty, hidden and binary files are skipped; name a text file.");
  }
  return files;
}

// FILE.bin becomes FILE.valid.bin.
std::string valid_path(const std::string& out) {
  fs::path path = out;
  return path.replace_extension(".valid" + path.extension().string()).string();
}

void refuse_to_overwrite(const TokenizeFlags& flags) {
  std::vector<std::string> outputs = {flags.out};
  if (flags.valid_share > 0) outputs.push_back(valid_path(flags.out));
  for (const std::string& path : outputs) {
    for (const char* extension : {"", ".idx", ".mask"}) {
      std::string file = *extension ? data::sibling(path, extension) : path;
      std::error_code ignored;
      if (!flags.force && fs::exists(file, ignored)) {
        throw Error(file + " already exists.", "choose another name, or replace it with --force.");
      }
    }
  }
}

struct Output {
  std::unique_ptr<data::TokenWriter> training, validation;
  double valid_share = 0;
  int64_t documents = 0;

  void add(const std::vector<int32_t>& ids, const std::vector<uint8_t>& counts = {}) {
    (data::is_held_out(documents++, valid_share) ? validation : training)->add(ids, counts);
  }
};

data::JsonlOptions lines_of(const TokenizeFlags& flags) {
  data::JsonlOptions options = flags.fields;
  options.threads = flags.threads;
  if (flags.skip_bad_lines) options.bad_lines = data::BadLines::kSkip;
  return options;
}

// The kind of all files.
data::LineKind kind_of_files(const TokenizeFlags& flags,
                             const std::vector<data::FoundFile>& files) {
  const data::LineKind kind = data::kind_of_lines(files[0].path, lines_of(flags));
  for (const data::FoundFile& file : files)
    if (const auto other = data::kind_of_lines(file.path, lines_of(flags)); other != kind)
      throw Error(formatted("{} has {}, unlike {}, which has {}.", file.path,
                            data::described(other), files[0].path, data::described(kind)),
                  "tokenize files of different kinds separately.");
  return kind;
}

void tokenise(const TokenizeFlags& flags, const std::vector<data::FoundFile>& files,
              const data::Tokenizer& tokenizer, int64_t bytes, bool mask, Output& output) {
  Progress progress(bytes);
  int64_t done = 0;
  if (!flags.jsonl) {
    auto document = [&](std::vector<int32_t>&& ids) { output.add(ids); };
    return data::tokenise_files(files, tokenizer, flags.threads, document,
                                [&](int64_t at) { progress.at(at); });
  }
  for (const data::FoundFile& file : files) {
    const auto skipped = data::tokenise_jsonl(file.path, tokenizer, lines_of(flags),
                                              [&](data::JsonlDocument&& document) {
                                                if (!mask) document.counts.clear();
                                                output.add(document.ids, document.counts);
                                                done += document.bytes;
                                                progress.at(done);
                                              });
    say_skipped(file.path, skipped);
  }
}

int write(TokenizeFlags flags) {
  if (flags.inputs.empty())
    throw CodedError(kExitUsage, "no input was given.",
                     "name files or folders; fsdp tokenize --help has examples.");
  if (flags.out.empty())
    throw CodedError(kExitUsage, "no output file was given.", "add --out FILE.bin.");
  if (fs::path(flags.out).extension() != ".bin")
    throw CodedError(kExitUsage,
                     formatted("a token file's name must end in .bin, unlike {}.", flags.out),
                     "fsdp train recognizes token files by that extension.");
  refuse_to_overwrite(flags);
  auto tokenizer = chosen_tokenizer(flags);
  flags.jsonl = are_lines(flags);
  auto files = input_files(flags);
  int64_t bytes = 0;
  for (const auto& file : files) bytes += file.bytes;
  const auto kind = flags.jsonl ? kind_of_files(flags, files) : data::LineKind::kText;
  if (kind == data::LineKind::kPairs)
    throw Error(formatted("{} has {}, which token files don't tell apart.", files[0].path,
                          data::described(kind)),
                "pass the file itself: fsdp train --data.train FILE.jsonl; --show shows it.");
  const bool mask = data::has_mask(kind);

  auto begin = Clock::now();
  Output output;
  const data::Format format = parse_enum<data::Format>(flags.format).value();
  auto writer = [&](const std::string& path) {
    return std::make_unique<data::TokenWriter>(path, format, tokenizer->vocab_size(), mask);
  };
  output.training = writer(flags.out);
  if (flags.valid_share > 0) output.validation = writer(valid_path(flags.out));
  output.valid_share = flags.valid_share;
  tokenise(flags, files, *tokenizer, bytes, mask, output);
  if (output.validation && (!output.validation->tokens() || !output.training->tokens())) {
    throw Error("there are too few documents to split: --valid-share keeps documents whole.",
                "leave it out; fsdp train can split off a share of the tokens itself.");
  }
  output.training->finish();
  if (output.validation) output.validation->finish();

  double seconds = seconds_since(begin);
  int64_t tokens =
      output.training->tokens() + (output.validation ? output.validation->tokens() : 0);
  auto line = [](const char* name, const std::string& value) {
    std::cout << formatted("{:10} {}\n", name, value);
  };
  line("files", formatted("{}{}", with_separators(static_cast<int64_t>(files.size())),
                          flags.jsonl ? formatted(" ({})", data::described(kind)) : ""));
  line("text", human_bytes(static_cast<double>(bytes)));
  line("tokens", formatted("{} ({:.2f} bytes per token)", with_separators(tokens),
                           static_cast<double>(bytes) / static_cast<double>(tokens)));
  line("time",
       formatted("{:.1f} s ({:.1f} MB/s)", seconds, static_cast<double>(bytes) / 1e6 / seconds));
  line("wrote", flags.out + (mask ? ", " + data::sibling(flags.out, ".mask") : ""));
  if (output.validation)
    line("", formatted("{}, {} tokens", valid_path(flags.out),
                       with_separators(output.validation->tokens())));
  return 0;
}

// Text on one line: control characters and invalid bytes are escaped.
std::string spelled_out(std::string_view bytes) {
  std::string out;
  for (size_t at = 0; at < bytes.size();) {
    data::Utf8Step step = data::utf8_step(bytes, at);
    auto byte = static_cast<unsigned char>(bytes[at]);
    if (step.valid && byte >= 0x20 && byte != 0x7f) {
      out += bytes.substr(at, step.length);
      at += step.length;
      continue;
    }
    out += byte == '\n' ? "\\n" : byte == '\t' ? "\\t" : formatted("\\x{:02x}", byte);
    ++at;
  }
  return out;
}

int show(const TokenizeFlags& flags) {
  auto tokenizer = chosen_tokenizer(flags);
  Table table({{"id", "id"}, {"piece", "piece", Table::kLeft}});
  auto ids = tokenizer->encode(flags.show);
  for (int32_t id : ids)
    table.add(
        {{id, std::to_string(id)}, text(formatted("[{}]", spelled_out(tokenizer->piece(id))))});
  table.print(std::cout, false);
  std::cout << ids.size() << " tokens, " << flags.show.size() << " bytes; vocabulary of "
            << with_separators(tokenizer->vocab_size()) << "\n";
  return 0;
}

// Shows the first documents of JSON lines, and what of them is trained on.
int show_examples(TokenizeFlags flags) {
  int64_t count = 0;
  const char* end = flags.show.data() + flags.show.size();
  const auto read = std::from_chars(flags.show.data(), end, count);
  if (read.ec != std::errc{} || read.ptr != end || count < 1)
    throw CodedError(kExitUsage, "--show with inputs takes a number of examples.",
                     "--show 3 shows three; without inputs --show shows the tokens of a text.");
  flags.jsonl = are_lines(flags);
  if (!flags.jsonl)
    throw Error(formatted("{} is text, all of which is trained on.", flags.inputs[0]),
                "pass JSON lines; without inputs --show shows the tokens of a text.");
  auto tokenizer = chosen_tokenizer(flags);
  for (const auto& file : input_files(flags)) {
    if (count == 0) break;
    const auto kind = data::kind_of_lines(file.path, lines_of(flags));
    std::cerr << file.path << ": " << data::described(kind) << "; what is trained on is "
              << (has_colour(STDOUT) ? "green" : "between [[ and ]]") << "\n";
    count -= show_lines(file.path, *tokenizer, lines_of(flags), count, std::cout);
  }
  return 0;
}

int decode(const TokenizeFlags& flags) {
  auto tokenizer = chosen_tokenizer(flags);
  auto file = data::TokenFile::open(flags.decode);
  if (flags.skip >= file->tokens())
    throw Error(formatted("{} has only {} tokens.", flags.decode, with_separators(file->tokens())),
                "lower --skip.");
  int64_t count = std::min(flags.first, file->tokens() - flags.skip);
  std::vector<int64_t> ids(count);
  file->read(flags.skip, count, ids.data());
  std::vector<int32_t> narrow;
  for (int64_t id : ids) narrow.push_back(id < 0 || id > INT32_MAX ? -1 : static_cast<int32_t>(id));
  std::cout << data::repaired(tokenizer->decode(narrow)) << "\n";
  std::cerr << "tokens " << with_separators(flags.skip) << " to "
            << with_separators(flags.skip + count) << " of " << with_separators(file->tokens())
            << " (" << enum_name(file->format()) << ")\n";
  return 0;
}

void add_writing(CLI::App* command, const std::shared_ptr<TokenizeFlags>& flags) {
  command->add_option("input", flags->inputs, "Files, or folders to search for text files")
      ->type_name("PATH");
  command
      ->add_option(
          "--tokenizer", flags->tokenizer,
          "bytes, a tokenizer.json, a folder that has one, or the name of a downloaded model")
      ->type_name("T")
      ->capture_default_str();
  command->add_option("-o,--out", flags->out, "Token file to write")->type_name("FILE.bin");
  command->add_option("--format", flags->format, "llmc, nanogpt or megatron")
      ->check(CLI::IsMember({"llmc", "nanogpt", "megatron"}))
      ->type_name("F")
      ->capture_default_str();
  command
      ->add_option("--valid-share", flags->valid_share,
                   "Write this share of the documents to FILE.valid.bin: every tenth for 0.1")
      ->check(CLI::Range(0.0, 0.99))
      ->type_name("S");
  command->add_option("--threads", flags->threads, "Threads; 0: one per core")
      ->check(CLI::Range(0, 4096))
      ->type_name("N");
  command->add_flag("--force", flags->force, "Replace existing files");
}

void add_json_lines(CLI::App* command, const std::shared_ptr<TokenizeFlags>& flags) {
  const char* lines = "JSON lines";
  command
      ->add_flag("--jsonl", flags->jsonl,
                 "Inputs are JSON lines: one document per line; files named .jsonl are without it")
      ->group(lines);
  command
      ->add_option("--chat-template", flags->fields.chat_template,
                   "Chat template for conversations; default: the tokenizer's")
      ->type_name("FILE")
      ->group(lines);
  command
      ->add_flag("--skip-bad-lines", flags->skip_bad_lines,
                 "Count and skip lines that can't be used, instead of stopping")
      ->group(lines);
  command->add_option("--text-field", flags->fields.text_field, "Field with the text")
      ->type_name("NAME")
      ->capture_default_str()
      ->group(lines);
  command
      ->add_option("--prompt-field", flags->fields.prompt_field,
                   "Field with the prompt, which doesn't count in the loss")
      ->type_name("NAME")
      ->capture_default_str()
      ->group(lines);
  command
      ->add_option("--completion-field", flags->fields.completion_field,
                   "Field with the completion, which counts in the loss")
      ->type_name("NAME")
      ->capture_default_str()
      ->group(lines);
}

void add_looking(CLI::App* command, const std::shared_ptr<TokenizeFlags>& flags) {
  const char* looking = "Looking at tokens";
  auto* shown = command
                    ->add_option("--show", flags->show,
                                 "Show N documents of JSON lines and what of them is trained on; "
                                 "without inputs: the tokens of a text")
                    ->type_name("N|TEXT")
                    ->group(looking);
  auto* decoded = command->add_option("--decode", flags->decode, "Show the text of this token file")
                      ->type_name("FILE")
                      ->group(looking);
  decoded->excludes(shown);
  command->add_option("--first", flags->first, "--decode: number of tokens to show")
      ->check(CLI::Range(int64_t{1}, int64_t{1'000'000'000}))
      ->type_name("N")
      ->capture_default_str()
      ->group(looking);
  command->add_option("--skip", flags->skip, "--decode: number of tokens to skip first")
      ->check(CLI::NonNegativeNumber)
      ->type_name("N")
      ->group(looking);
}

}  // namespace

void add_tokenize(CLI::App& app, Action& action) {
  auto flags = std::make_shared<TokenizeFlags>();
  CLI::App* command =
      app.add_subcommand("tokenize", "Turn text into token files, or look into one");
  command->footer(kTokenizeExamples);
  add_writing(command, flags);
  add_json_lines(command, flags);
  add_looking(command, flags);
  command->callback([flags, command, &action] {
    if (command->count("--show") && !flags->inputs.empty())
      action = [flags] { return show_examples(*flags); };
    else if (command->count("--show"))
      action = [flags] { return show(*flags); };
    else if (command->count("--decode"))
      action = [flags] { return decode(*flags); };
    else
      action = [flags] { return write(*flags); };
  });
}

}  // namespace fsdp::cli
