#include "data/text_source.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "base/format.h"
#include "base/log.h"
#include "base/regular_file.h"
#include "base/table.h"
#include "data/data_file.h"
#include "data/parallel.h"
#include "data/token_writer.h"
#include "fsdp/error.h"

namespace fsdp::data {
namespace {

constexpr int64_t kKeptOpen = int64_t{1} << 20;      // bytes; smaller files are opened to be read
constexpr int64_t kBatchOfText = int64_t{64} << 20;  // bytes of text tokenized at a time
constexpr size_t kFilesAtOnce = 10'000;

class BytesSource : public TokenSource {
 public:
  BytesSource(const FoundFile& file, int32_t end) : path_(file.path), size_(file.bytes), end_(end) {
    if (size_ >= kKeptOpen) file_ = std::make_unique<DataFile>(path_, size_);
  }
  int64_t tokens() const override { return size_ + 1; }

  void read(int64_t first, int64_t count, int64_t* ids) const override {
    int64_t bytes = std::min(count, size_ - first);
    std::string text(static_cast<size_t>(bytes), '\0');
    if (file_)
      file_->read(first, text.data(), bytes);
    else
      DataFile(path_, size_).read(first, text.data(), bytes);
    for (int64_t i = 0; i < bytes; ++i) ids[i] = static_cast<unsigned char>(text[i]);
    if (bytes < count) ids[bytes] = end_;
  }
  std::string where(int64_t token) const override { return formatted("{}: byte {}", path_, token); }
  SourceInfo info() const override { return {"text as bytes", 1, size_}; }

 private:
  std::string path_;
  int64_t size_;
  int32_t end_;
  std::unique_ptr<DataFile> file_;
};

class MemorySource : public TokenSource {
 public:
  MemorySource(std::vector<int32_t> ids, SourceInfo info)
      : ids_(std::move(ids)), info_(std::move(info)) {}
  int64_t tokens() const override { return static_cast<int64_t>(ids_.size()); }
  void read(int64_t first, int64_t count, int64_t* ids) const override {
    std::copy_n(ids_.begin() + first, count, ids);
  }
  std::string where(int64_t token) const override {
    return formatted("tokenized text: token {}", token);
  }
  SourceInfo info() const override { return info_; }

 private:
  std::vector<int32_t> ids_;
  SourceInfo info_;
};

// A cached token file, with the info of the text it was made from.
class CachedSource : public TokenSource {
 public:
  CachedSource(std::shared_ptr<TokenSource> tokens, SourceInfo info)
      : tokens_(std::move(tokens)), info_(std::move(info)) {}
  int64_t tokens() const override { return tokens_->tokens(); }
  void read(int64_t first, int64_t count, int64_t* ids) const override {
    tokens_->read(first, count, ids);
  }
  std::vector<int64_t> document_starts(int64_t first, int64_t count) const override {
    return tokens_->document_starts(first, count);
  }
  std::string where(int64_t token) const override { return tokens_->where(token); }
  SourceInfo info() const override { return info_; }

 private:
  std::shared_ptr<TokenSource> tokens_;
  SourceInfo info_;
};

// FNV-1a, 64 bits: names a cache entry; not cryptographic.
class Fingerprint {
 public:
  void add(std::string_view bytes) {
    for (unsigned char byte : bytes) value_ = (value_ ^ byte) * 0x100000001b3ull;
    value_ = (value_ ^ 0xff) * 0x100000001b3ull;  // so that "ab", "c" differs from "a", "bc"
  }
  void add(int64_t number) { add(std::to_string(number)); }
  std::string text() const { return formatted("{:016x}", value_); }

 private:
  uint64_t value_ = 0xcbf29ce484222325ull;
};

// Held while one process makes a file that others want, too. If the file system doesn't support
// locks, all of them make it, and the last one wins.
class FileLock {
 public:
  explicit FileLock(const std::string& path)
      : file_(open(place_of_file(path).c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0666)) {
    if (file_ >= 0) flock(file_, LOCK_EX);
  }
  ~FileLock() {
    if (file_ >= 0) close(file_);
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int file_;
};

}  // namespace

std::shared_ptr<TokenSource> bytes_source(const std::vector<FoundFile>& files, int32_t end) {
  std::vector<std::shared_ptr<TokenSource>> parts;
  for (const FoundFile& file : files) parts.push_back(std::make_shared<BytesSource>(file, end));
  return joined(std::move(parts));
}

void tokenise_files(const std::vector<FoundFile>& files, const Tokenizer& tokenizer, int threads,
                    const std::function<void(std::vector<int32_t>&&)>& document,
                    const std::function<void(int64_t)>& progress) {
  EncodeOptions options;
  options.threads = threads;
  int64_t done = 0;
  for (size_t first = 0; first < files.size();) {
    size_t last = first;
    int64_t bytes = 0;
    while (last < files.size() && last - first < kFilesAtOnce &&
           (last == first || bytes + files[last].bytes <= kBatchOfText))
      bytes += files[last++].bytes;
    std::vector<std::string> contents(last - first);
    for_each_index(contents.size(), threads, [&](size_t i) {
      const FoundFile& file = files[first + i];
      contents[i] = DataFile(file.path, file.bytes).front(file.bytes);
    });
    first = last;
    const std::vector<std::string_view> texts(contents.begin(), contents.end());
    for (auto& ids : tokenizer.encode_batch(texts, options)) {
      if (tokenizer.eos()) ids.push_back(*tokenizer.eos());
      document(std::move(ids));
    }
    done += bytes;
    if (progress) progress(done);
  }
}

std::shared_ptr<TokenSource> tokenised_source(const std::vector<FoundFile>& files,
                                              std::shared_ptr<const Tokenizer> tokenizer,
                                              const std::string& cache_dir) {
  SourceInfo info{"text", static_cast<int64_t>(files.size()), 0};
  Fingerprint key;
  key.add("tokens 1");
  key.add(tokenizer->json());
  key.add(tokenizer->eos().value_or(-1));
  for (const FoundFile& file : files) {
    info.bytes += file.bytes;
    key.add(file.path);
    key.add(file.bytes);
    key.add(file.modified);
  }
  if (cache_dir.empty()) {
    std::vector<int32_t> all;
    tokenise_files(files, *tokenizer, 0, [&](std::vector<int32_t>&& ids) {
      all.insert(all.end(), ids.begin(), ids.end());
    });
    return std::make_shared<MemorySource>(std::move(all), info);
  }

  std::error_code problem;
  std::filesystem::create_directories(cache_dir, problem);
  std::string path =
      (std::filesystem::path(cache_dir) / ("tokens-" + key.text() + ".bin")).string();
  std::string index =
      path.substr(0, path.size() - 3) + "idx";  // written last: if it exists, all is complete
  FileLock lock(path + ".lock");
  if (!std::filesystem::exists(index, problem)) {
    log::info(formatted("tokenizing {} files, {}, into {}", with_separators(info.files),
                        human_bytes(static_cast<double>(info.bytes)), path));
    TokenWriter writer(path, Format::kMegatron, tokenizer->vocab_size());
    tokenise_files(files, *tokenizer, 0, [&](std::vector<int32_t>&& ids) { writer.add(ids); });
    writer.finish();
  }
  return std::make_shared<CachedSource>(file_source(path, Format::kMegatron, false), info);
}

}  // namespace fsdp::data
