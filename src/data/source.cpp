// Opening paths, and sources made of sources: joined ones, and ranges of one.
#include "data/source.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/table.h"
#include "data/files.h"
#include "data/text_source.h"
#include "data/token_file.h"
#include "fsdp/error.h"

namespace fsdp::data {
namespace {

namespace fs = std::filesystem;

class FileSource : public TokenSource {
 public:
  FileSource(const std::string& path, const std::string& format, bool mask)
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
  std::string where(int64_t token) const override {
    return file_->path() + ": token " + std::to_string(token);
  }
  SourceInfo info() const override { return {file_->format(), 1, file_->file_bytes()}; }

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

class RangeSource : public TokenSource {
 public:
  RangeSource(std::shared_ptr<TokenSource> all, int64_t first, int64_t count)
      : all_(std::move(all)), first_(first), count_(count) {}
  int64_t tokens() const override { return count_; }
  void read(int64_t first, int64_t count, int64_t* ids) const override {
    all_->read(first_ + first, count, ids);
  }
  void read_mask(int64_t first, int64_t count, uint8_t* counts) const override {
    all_->read_mask(first_ + first, count, counts);
  }
  bool has_mask() const override { return all_->has_mask(); }
  std::vector<int64_t> document_starts(int64_t first, int64_t count) const override {
    auto starts = all_->document_starts(first_ + first, count);
    for (int64_t& start : starts) start -= first_;
    return starts;
  }
  std::string where(int64_t token) const override { return all_->where(first_ + token); }
  SourceInfo info() const override { return all_->info(); }

 private:
  std::shared_ptr<TokenSource> all_;
  int64_t first_, count_;
};

std::shared_ptr<TokenSource> open_text(const std::vector<FoundFile>& files,
                                       const SourceOptions& options) {
  if (!options.tokenizer) {
    throw Error(files[0].path + " is text, and there is no tokenizer.",
                "name one: bytes, or a tokenizer.json.");
  }
  if (options.loss_mask) {
    throw Error(files[0].path + " is text, and text has no loss mask.",
                "fsdp tokenize makes a token file with a mask from prompts and completions.");
  }
  if (options.tokenizer->name() == "bytes") return bytes_source(files, *options.tokenizer->eos());
  return tokenised_source(files, options.tokenizer, options.cache_dir);
}

// What a path turned out to be: files of text, or token files.
struct Opened {
  std::vector<FoundFile> text;
  std::vector<std::shared_ptr<TokenSource>> tokens;
};

Opened open_folder(const std::string& path, const SourceOptions& options) {
  auto files = files_below(path);
  auto is_bin = [](const FoundFile& file) { return fs::path(file.path).extension() == ".bin"; };
  bool text = options.format == "text";
  if (options.format == "auto") text = std::none_of(files.begin(), files.end(), is_bin);
  Opened opened;
  if (text) {
    opened.text = text_files_below(path);
    return opened;
  }
  for (const FoundFile& file : files) {
    if (is_bin(file))
      opened.tokens.push_back(file_source(file.path, options.format, options.loss_mask));
  }
  if (opened.tokens.empty()) {
    throw Error("there is no token file (.bin) in " + path + ".",
                "fsdp tokenize makes them from text.");
  }
  return opened;
}

Opened open_file(const std::string& path, const SourceOptions& options) {
  std::string extension = fs::path(path).extension().string();
  bool tokens = extension == ".bin" || extension == ".idx";
  if (options.format != "text" && (options.format != "auto" || tokens)) {
    return {{}, {file_source(path, options.format, options.loss_mask)}};
  }
  if (options.format == "auto" && extension == ".jsonl") {
    throw Error(
        path + " is JSON lines, not text.",
        "fsdp tokenize --jsonl makes a token file of it; --data.format text trains on its bytes.");
  }
  if (looks_binary(path)) {
    throw Error(path + " is not text: there is a zero byte in it.",
                "token files end in .bin; other formats must be made into text or tokens first.");
  }
  FoundFile file = describe_file(path);
  if (file.bytes == 0) return {};
  return {{file}, {}};
}

}  // namespace

void TokenSource::read_mask(int64_t, int64_t count, uint8_t* counts) const {
  std::fill_n(counts, count, uint8_t{1});
}

std::vector<int64_t> TokenSource::document_starts(int64_t, int64_t) const {
  return {};
}

std::shared_ptr<TokenSource> file_source(const std::string& path, const std::string& format,
                                         bool mask) {
  return std::make_shared<FileSource>(path, format, mask);
}

std::shared_ptr<TokenSource> joined(std::vector<std::shared_ptr<TokenSource>> parts) {
  if (parts.size() == 1) return parts[0];
  return std::make_shared<JoinedSource>(std::move(parts));
}

std::shared_ptr<TokenSource> open_source(const SourceOptions& options) {
  static const char* formats[] = {"auto", "text", "nanogpt", "llmc", "megatron"};
  if (std::find(std::begin(formats), std::end(formats), options.format) == std::end(formats)) {
    throw Error("there is no data format \"" + options.format + "\".",
                "formats are auto, text, nanogpt, llmc, megatron.");
  }
  if (options.paths.empty()) throw Error("there is no data to read.", "name files or folders.");
  std::vector<std::shared_ptr<TokenSource>> parts;
  std::vector<FoundFile> text;  // of paths one after the other: tokenised together
  auto close_text = [&] {
    if (!text.empty()) parts.push_back(open_text(text, options));
    text.clear();
  };
  for (const std::string& path : options.paths) {
    std::error_code ignored;
    bool folder = fs::is_directory(path, ignored);
    if (!folder && !fs::exists(path, ignored)) {
      throw Error("there is no " + (path.empty() ? "file \"\"" : path) + ".", "is the path right?");
    }
    Opened opened = folder ? open_folder(path, options) : open_file(path, options);
    if (opened.text.empty() && opened.tokens.empty()) {
      throw Error("there is no text in " + path + ".",
                  "empty, hidden and binary files do not count.");
    }
    text.insert(text.end(), opened.text.begin(), opened.text.end());
    if (opened.tokens.empty()) continue;
    close_text();
    parts.insert(parts.end(), opened.tokens.begin(), opened.tokens.end());
  }
  close_text();
  return joined(std::move(parts));
}

std::pair<std::shared_ptr<TokenSource>, std::shared_ptr<TokenSource>> split_tail(
    std::shared_ptr<TokenSource> source, double share, int64_t seq) {
  if (!(share >= 0 && share < 1)) {
    throw Error("a share of " + std::to_string(share) + " cannot be split off for validation.",
                "shares are from 0 to below 1; 0.01 is usual.");
  }
  if (seq < 1) throw Error("samples of " + std::to_string(seq) + " tokens cannot be made.", "");
  if (share == 0) return {std::move(source), nullptr};
  int64_t samples = (source->tokens() - 1) / seq;
  if (samples < 2) {
    throw Error("the data has " + with_separators(source->tokens()) +
                    " tokens, which is not enough for two samples of " + with_separators(seq) + ".",
                "use more data, shorter samples, or no validation.");
  }
  auto tail =
      std::clamp<int64_t>(std::llround(share * static_cast<double>(samples)), 1, samples - 1);
  int64_t cut = (samples - tail) * seq;
  int64_t rest = source->tokens() - cut;
  return {std::make_shared<RangeSource>(source, 0, cut + 1),
          std::make_shared<RangeSource>(source, cut, rest)};
}

}  // namespace fsdp::data
