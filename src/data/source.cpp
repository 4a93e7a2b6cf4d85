// Opening paths, and joining sources.
#include "data/source.h"

#include <algorithm>
#include <filesystem>
#include <functional>

#include "base/format.h"
#include "data/files.h"
#include "data/jsonl.h"
#include "data/text_source.h"
#include "data/token_file.h"
#include "fsdp/error.h"

namespace fsdp::data {
namespace {

namespace fs = std::filesystem;

class FileSource : public TokenSource {
 public:
  FileSource(const std::string& path, Format format, bool mask)
      : file_(TokenFile::open(path, format)),
        mask_(mask ? std::make_unique<MaskFile>(*file_) : nullptr) {}
  int64_t tokens() const override { return file_->tokens(); }
  void read(int64_t first, int64_t count, int64_t* ids) const override {
    file_->read(first, count, ids);
  }
  void read_mask(int64_t first, int64_t count, uint8_t* counts) const override {
    if (mask_) return mask_->read(first, count, counts);
    TokenSource::read_mask(first, count, counts);
  }
  bool has_mask() const override { return mask_ != nullptr; }
  std::vector<int64_t> document_starts(int64_t first, int64_t count) const override {
    return file_->document_starts(first, count);
  }
  bool lists_documents() const override { return file_->format() == Format::kMegatron; }
  std::string where(int64_t token) const override {
    return formatted("{}: token {}", file_->path(), token);
  }
  SourceInfo info() const override { return {enum_name(file_->format()), 1, file_->file_bytes()}; }

 private:
  std::shared_ptr<TokenFile> file_;
  std::unique_ptr<MaskFile> mask_;
};

class JoinedSource : public TokenSource {
 public:
  explicit JoinedSource(std::vector<std::shared_ptr<TokenSource>> parts)
      : parts_(std::move(parts)), starts_{0} {
    for (const auto& part : parts_) {
      starts_.push_back(starts_.back() + part->tokens());
      masked_ = masked_ || part->has_mask();
    }
  }
  int64_t tokens() const override { return starts_.back(); }
  void read(int64_t first, int64_t count, int64_t* ids) const override {
    each(first, count, [&](const TokenSource& part, int64_t from, int64_t number, int64_t done) {
      part.read(from, number, ids + done);
    });
  }
  void read_mask(int64_t first, int64_t count, uint8_t* counts) const override {
    each(first, count, [&](const TokenSource& part, int64_t from, int64_t number, int64_t done) {
      part.read_mask(from, number, counts + done);
    });
  }
  bool has_mask() const override { return masked_; }
  std::vector<int64_t> document_starts(int64_t first, int64_t count) const override {
    std::vector<int64_t> all;
    each(first, count, [&](const TokenSource& part, int64_t from, int64_t number, int64_t done) {
      for (int64_t start : part.document_starts(from, number))
        all.push_back(first + done + start - from);
    });
    return all;
  }
  bool lists_documents() const override {
    return std::all_of(parts_.begin(), parts_.end(),
                       [](const auto& part) { return part->lists_documents(); });
  }
  bool ends_document(int64_t token) const override {
    const size_t part = part_of(token);
    return parts_[part]->ends_document(token - starts_[part]);
  }
  std::string where(int64_t token) const override {
    size_t part = part_of(token);
    return parts_[part]->where(token - starts_[part]);
  }
  SourceInfo info() const override {
    SourceInfo sum;
    for (const auto& part : parts_) {
      SourceInfo one = part->info();
      sum.kind = sum.kind.empty() || sum.kind == one.kind ? one.kind : "mixed";
      sum.files += one.files;
      sum.bytes += one.bytes;
      sum.pairs = one.pairs && (sum.pairs || &part == &parts_.front());
    }
    return sum;
  }

 private:
  size_t part_of(int64_t token) const {
    return std::upper_bound(starts_.begin(), starts_.end(), token) - starts_.begin() - 1;
  }
  template <class Read>
  void each(int64_t first, int64_t count, Read read) const {
    size_t part = count > 0 ? part_of(first) : 0;
    for (int64_t done = 0; done < count; ++part) {
      int64_t from = first + done - starts_[part];
      int64_t number = std::min(count - done, parts_[part]->tokens() - from);
      if (number > 0) read(*parts_[part], from, number, done);
      done += std::max<int64_t>(number, 0);
    }
  }

  std::vector<std::shared_ptr<TokenSource>> parts_;
  std::vector<int64_t> starts_;  // of each part, and the end
  bool masked_ = false;
};

void need_tokenizer(const std::vector<FoundFile>& files, const SourceOptions& options) {
  if (!options.tokenizer)
    throw Error(formatted("{} is text, but there is no tokenizer.", files[0].path),
                "pass bytes or a tokenizer.json.");
}

std::shared_ptr<TokenSource> open_text(const std::vector<FoundFile>& files,
                                       const SourceOptions& options) {
  need_tokenizer(files, options);
  if (options.tokenizer->name() == "bytes") return bytes_source(files, *options.tokenizer->eos());
  return tokenised_source(files, options.tokenizer, options.cache_dir);
}

// What a path contains: text files or token files.
struct Opened {
  std::vector<FoundFile> text;
  std::vector<std::shared_ptr<TokenSource>> tokens;
};

Opened open_lines(const std::vector<FoundFile>& files, const SourceOptions& options) {
  need_tokenizer(files, options);
  return {{}, {lines_source(files, options)}};
}

Opened open_folder(const std::string& path, const SourceOptions& options) {
  auto files = files_below(path);
  auto is_bin = [](const FoundFile& file) { return fs::path(file.path).extension() == ".bin"; };
  bool text = options.format == Format::kText;
  if (options.format == Format::kAuto) text = std::none_of(files.begin(), files.end(), is_bin);
  Opened opened;
  if (text && options.format == Format::kAuto)
    if (const auto lines = json_lines_below(path); !lines.empty())
      return open_lines(lines, options);
  if (text) {
    opened.text = text_files_below(path);
    return opened;
  }
  for (const FoundFile& file : files) {
    if (is_bin(file))
      opened.tokens.push_back(file_source(file.path, options.format, options.loss_mask));
  }
  if (opened.tokens.empty()) {
    throw Error(formatted("there is no token file (.bin) in {}.", path),
                "fsdp tokenize makes them from text.");
  }
  return opened;
}

Opened open_file(const std::string& path, const SourceOptions& options) {
  std::string extension = fs::path(path).extension().string();
  bool tokens = extension == ".bin" || extension == ".idx";
  if (options.format != Format::kText && (options.format != Format::kAuto || tokens)) {
    return {{}, {file_source(path, options.format, options.loss_mask)}};
  }
  if (looks_binary(path)) {
    throw Error(formatted("{} isn't text: it has a zero byte.", path),
                "token files end in .bin; convert other formats to text or tokens first.");
  }
  FoundFile file = describe_file(path);
  if (file.bytes == 0) return {};
  if (options.format == Format::kAuto && is_json_lines(path)) return open_lines({file}, options);
  return {{file}, {}};
}

}  // namespace

void TokenSource::read_mask(int64_t, int64_t count, uint8_t* counts) const {
  std::fill_n(counts, count, uint8_t{1});
}

std::vector<int64_t> TokenSource::document_starts(int64_t, int64_t) const {
  return {};
}

bool TokenSource::ends_document(int64_t) const {
  return true;
}

std::shared_ptr<TokenSource> file_source(const std::string& path, Format format, bool mask) {
  return std::make_shared<FileSource>(path, format, mask);
}

std::shared_ptr<TokenSource> joined(std::vector<std::shared_ptr<TokenSource>> parts) {
  if (parts.size() == 1) return parts[0];
  return std::make_shared<JoinedSource>(std::move(parts));
}

std::shared_ptr<TokenSource> open_source(const SourceOptions& options) {
  if (options.paths.empty()) throw Error("there is no data to read.", "pass files or folders.");
  std::vector<std::shared_ptr<TokenSource>> parts;
  std::vector<FoundFile> text;  // of consecutive paths, tokenized together
  auto close_text = [&] {
    if (!text.empty()) parts.push_back(open_text(text, options));
    text.clear();
  };
  for (const std::string& path : options.paths) {
    std::error_code ignored;
    bool folder = fs::is_directory(path, ignored);
    if (!folder && !fs::exists(path, ignored)) {
      throw Error(formatted("there is no {}.", path.empty() ? "file \"\"" : path),
                  "check the path.");
    }
    Opened opened = folder ? open_folder(path, options) : open_file(path, options);
    if (opened.text.empty() && opened.tokens.empty()) {
      throw Error(formatted("there is no text in {}.", path),
                  "empty, hidden and binary files are ignored.");
    }
    text.insert(text.end(), opened.text.begin(), opened.text.end());
    if (opened.tokens.empty()) continue;
    close_text();
    parts.insert(parts.end(), opened.tokens.begin(), opened.tokens.end());
  }
  close_text();
  auto source = joined(std::move(parts));
  if (options.loss_mask && !source->has_mask())
    throw Error(
        formatted("{} is text, which has no loss mask.", options.paths[0]),
        "conversations, prompts with completions, and token files with FILE.mask have one.");
  return source;
}

std::string reason_for_mask(const std::vector<std::string>& paths, const JsonlOptions& lines) {
  std::string reason;
  std::error_code problem;
  const auto look = [&](const fs::path& file) {
    const fs::path mask = sibling(file.string(), ".mask");
    const bool tokens = file.extension() == ".bin" || file.extension() == ".idx";
    if (reason.empty() && tokens && fs::is_regular_file(mask, problem))
      reason = formatted("{} selects the tokens that count in the loss", mask);
  };
  const auto look_inside = [&](const std::string& file) {
    if (!reason.empty()) return;
    try {
      const LineKind kind = kind_of_lines(file, lines);
      if (has_mask(kind))
        reason = formatted("{} has {}, and only {} count in the loss", file, described(kind),
                           kind == LineKind::kPrompts ? "completions" : "the assistant's words");
    } catch (const Error&) {  // whoever reads the file says what is wrong with it
    }
  };
  for (const std::string& path : paths) {
    look(path);
    if (!fs::is_directory(path, problem)) {
      if (is_json_lines(path)) look_inside(path);
      continue;
    }
    bool has_lines = false;
    for (const auto& entry : fs::recursive_directory_iterator(
             path, fs::directory_options::skip_permission_denied, problem)) {
      look(entry.path());
      has_lines = has_lines || is_json_lines(entry.path().string());
    }
    if (has_lines && reason.empty())
      for (const FoundFile& file : json_lines_below(path)) look_inside(file.path);
  }
  return reason;
}

namespace {

// Calls look(file, kind) for the JSON lines among the paths until it returns true.
void each_kind_of_lines(const std::vector<std::string>& paths, const JsonlOptions& lines,
                        const std::function<bool(const std::string&, LineKind)>& look) {
  std::error_code problem;
  for (const std::string& path : paths) {
    try {
      std::vector<FoundFile> files;
      if (fs::is_directory(path, problem))
        files = json_lines_below(path);
      else if (is_json_lines(path))
        files.push_back(describe_file(path));
      for (const FoundFile& file : files)
        if (look(file.path, kind_of_lines(file.path, lines))) return;
    } catch (const Error&) {  // whoever reads the file says what is wrong with it
    }
  }
}

}  // namespace

std::string reason_for_packing(const std::vector<std::string>& paths, const JsonlOptions& lines) {
  std::string reason;
  each_kind_of_lines(paths, lines, [&](const std::string& file, LineKind kind) {
    if (has_mask(kind))
      reason = formatted("{} has {}, and each stays whole", file, described(kind));
    return !reason.empty();
  });
  return reason;
}

bool has_pairs(const std::vector<std::string>& paths, const JsonlOptions& lines) {
  bool found = false;
  each_kind_of_lines(paths, lines, [&](const std::string&, LineKind kind) {
    return found = kind == LineKind::kPairs;
  });
  return found;
}

}  // namespace fsdp::data
