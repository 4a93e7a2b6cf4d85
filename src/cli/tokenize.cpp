// fsdp tokenize: writes token files, and shows the tokens of a text or the text of a token file.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <memory>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/table.h"
#include "cli/commands.h"
#include "data/files.h"
#include "data/jsonl.h"
#include "data/split.h"
#include "data/text_source.h"
#include "data/token_file.h"
#include "data/token_writer.h"
#include "data/unicode.h"
#include "fsdp/error.h"
#include "fsdp/tokenizer.h"

namespace fsdp::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTokenizeExamples =
    "Examples:\n"
    "  fsdp tokenize book.txt notes/ --out books.bin                    one token per byte\n"
    "  fsdp tokenize corpus/ --tokenizer llama3/ --out corpus.bin       with a tokenizer.json\n"
    "  fsdp tokenize chats.jsonl --jsonl --tokenizer t.json --out chats.bin\n"
    "                      {\"text\": ..} or {\"prompt\": .., \"completion\": ..} on each line\n"
    "  fsdp tokenize --tokenizer t.json --show \"How is this split?\"     show the tokens of a "
    "text\n"
    "  fsdp tokenize --tokenizer t.json --decode corpus.bin --first 50  show the text of a file\n"
    "\n"
    "Formats: llmc (a header, then uint16, or uint32 for large vocabularies), nanogpt (uint16 "
    "without\n"
    "a header), megatron (.bin and .idx). fsdp train reads all of them. A document is a file, or a "
    "line\n"
    "of JSON lines, and ends with the tokenizer's end-of-document token. For prompts and "
    "completions,\n"
    "FILE.mask is written too: only completions count in the loss.";

struct TokenizeFlags {
  std::vector<std::string> inputs;
  std::string tokenizer = "bytes";
  std::string out;
  std::string format = "llmc";
  bool jsonl = false;
  data::JsonlOptions fields;
  double valid_share = 0;
  int threads = 0;
  bool force = false;
  std::string show, decode;
  int64_t first = 100, skip = 0;
};

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

std::vector<data::FoundFile> input_files(const TokenizeFlags& flags) {
  std::vector<data::FoundFile> files;
  for (const std::string& path : flags.inputs) {
    std::error_code ignored;
    if (fs::is_directory(path, ignored)) {
      auto below = flags.jsonl ? data::files_below(path) : data::text_files_below(path);
      if (flags.jsonl)
        std::erase_if(below,
                      [](auto& file) { return fs::path(file.path).extension() != ".jsonl"; });
      files.insert(files.end(), below.begin(), below.end());
      continue;
    }
    files.push_back(data::describe_file(path));
    if (data::looks_binary(path)) {
      throw Error(path + " isn't text: it has a zero byte.",
                  "name text files, or folders of them.");
    }
    if (!flags.jsonl && fs::path(path).extension() == ".jsonl") {
      throw Error(path + " is a JSON lines file.", "add --jsonl to read one document per line.");
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

void tokenise(const TokenizeFlags& flags, const std::vector<data::FoundFile>& files,
              const data::Tokenizer& tokenizer, int64_t bytes, bool mask, Output& output) {
  Progress progress(bytes);
  int64_t done = 0;
  if (!flags.jsonl) {
    auto document = [&](std::vector<int32_t>&& ids) { output.add(ids); };
    return data::tokenise_files(files, tokenizer, flags.threads, document,
                                [&](int64_t at) { progress.at(at); });
  }
  data::JsonlOptions fields = flags.fields;
  fields.threads = flags.threads;
  for (const data::FoundFile& file : files) {
    if (data::has_prompts(file.path, fields) != mask)
      throw Error(
          formatted("{} has {}prompts, unlike {}.", file.path, mask ? "no " : "", files[0].path),
          "tokenize files with and without prompts separately.");
    data::tokenise_jsonl(file.path, tokenizer, fields, [&](data::JsonlDocument&& document) {
      if (!mask) document.counts.clear();
      output.add(document.ids, document.counts);
      done += document.bytes;
      progress.at(done);
    });
  }
}

int write(const TokenizeFlags& flags) {
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
  auto tokenizer = data::Tokenizer::load(flags.tokenizer);
  auto files = input_files(flags);
  int64_t bytes = 0;
  for (const auto& file : files) bytes += file.bytes;
  bool mask = flags.jsonl && data::has_prompts(files[0].path, flags.fields);

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
  line("files", with_separators(static_cast<int64_t>(files.size())));
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
  auto tokenizer = data::Tokenizer::load(flags.tokenizer);
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

int decode(const TokenizeFlags& flags) {
  auto tokenizer = data::Tokenizer::load(flags.tokenizer);
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
      ->add_option("--tokenizer", flags->tokenizer,
                   "bytes, a tokenizer.json, or a folder that has one")
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
  command->add_flag("--jsonl", flags->jsonl, "Inputs are JSON lines: one document per line")
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
  auto* shown = command->add_option("--show", flags->show, "Show the tokens of this text")
                    ->type_name("TEXT")
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
    if (command->count("--show"))
      action = [flags] { return show(*flags); };
    else if (command->count("--decode"))
      action = [flags] { return decode(*flags); };
    else
      action = [flags] { return write(*flags); };
  });
}

}  // namespace fsdp::cli
