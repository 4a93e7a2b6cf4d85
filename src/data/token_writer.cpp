#include "data/token_writer.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/file_error.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "data/token_file.h"
#include "fsdp/error.h"

namespace fsdp::data {
namespace {

constexpr int64_t kIdsOf16Bits = 65536;  // smaller ids have 16 bits

[[noreturn]] void failed(const std::string& path) {
  int reason = errno;
  throw Error(formatted("can't write {}: {}.", path, errno_text(reason)), file_hint(reason));
}

}  // namespace

TokenWriter::TokenWriter(const std::string& path, Format format, int64_t vocab, bool mask)
    : format_(format), vocab_(vocab), width_(vocab > kIdsOf16Bits ? 4 : 2), mask_(mask) {
  if (format == Format::kAuto || format == Format::kText) {
    throw Error(formatted("token files can't be written as \"{}\".", enum_name(format)),
                "formats are llmc, nanogpt, megatron.");
  }
  if (format == Format::kNanogpt && width_ == 4) {
    throw Error(formatted("a vocabulary of {} doesn't fit in nanoGPT's 16 bits.", vocab),
                "use --format llmc or megatron.");
  }
  ignore_size_signal();
  files_.reserve(3);  // keeps references to them valid
  File& tokens = create(path);
  if (format == Format::kLlmc) {
    char header[1024] = {};
    write(tokens, header, sizeof header);
  }
  if (mask) create(sibling(path, ".mask"));
}

TokenWriter::~TokenWriter() {
  for (File& file : files_) {
    if (file.stream) std::fclose(file.stream);
    if (!file.temporary.empty()) std::remove(file.temporary.c_str());
  }
}

TokenWriter::File& TokenWriter::create(const std::string& path) {
  File& file = files_.emplace_back();
  file.path = path;
  std::string name = formatted("{}.part-{}", path, getpid());
  file.stream = std::fopen(place_of_file(name).c_str(), "wb");
  if (!file.stream) failed(name);
  file.temporary = name;
  return file;
}

void TokenWriter::write(File& file, const void* data, size_t bytes) {
  if (bytes && std::fwrite(data, 1, bytes, file.stream) != bytes) failed(file.temporary);
}

void TokenWriter::add(const std::vector<int32_t>& ids, const std::vector<uint8_t>& counts) {
  if (mask_ && counts.size() != ids.size()) {
    throw Error(
        formatted("a document has {} tokens but a loss mask of {}.", ids.size(), counts.size()),
        "pass one value per token.");
  }
  if (format_ == Format::kMegatron && ids.size() > INT32_MAX) {
    throw Error(formatted("a document of {} tokens doesn't fit in Megatron's index.", ids.size()),
                "split the text into several files.");
  }
  buffer_.resize(ids.size() * width_);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocab_) {
      throw Error(formatted("id {} is beyond the vocabulary of {}.", ids[i], vocab_),
                  "was the text encoded with another tokenizer?");
    }
    auto narrow = static_cast<uint16_t>(ids[i]);
    std::memcpy(buffer_.data() + i * width_,
                width_ == 2 ? static_cast<const void*>(&narrow) : &ids[i], width_);
  }
  write(files_[0], buffer_.data(), buffer_.size());
  if (mask_) write(files_[1], counts.data(), counts.size());
  tokens_ += static_cast<int64_t>(ids.size());
  if (format_ == Format::kMegatron) lengths_.push_back(static_cast<int32_t>(ids.size()));
}

void TokenWriter::write_index() {
  File& file = create(sibling(files_[0].path, ".idx"));
  auto put = [&](auto value) { write(file, &value, sizeof value); };
  write(file, "MMIDIDX\0\0", 9);
  put(uint64_t{1});
  put(static_cast<uint8_t>(width_ == 2 ? 8 : 4));
  put(static_cast<uint64_t>(lengths_.size()));
  put(static_cast<uint64_t>(lengths_.size() + 1));
  write(file, lengths_.data(), lengths_.size() * sizeof(int32_t));
  int64_t at = 0;
  for (int32_t length : lengths_) {
    put(at);
    at += int64_t{length} * width_;
  }
  for (int64_t i = 0; i <= static_cast<int64_t>(lengths_.size()); ++i) put(i);
}

void TokenWriter::finish() {
  if (tokens_ == 0)
    throw Error(formatted("{}: there are no tokens to write.", files_[0].path),
                "was the text empty?");
  if (format_ == Format::kMegatron) write_index();
  if (format_ == Format::kLlmc) {
    if (tokens_ > INT32_MAX) {
      throw Error(
          formatted("{}: {} tokens don't fit in one file of llm.c.", files_[0].path, tokens_),
          "use --format megatron, or write several files.");
    }
    int32_t header[3] = {width_ == 2 ? 20240520 : 20240801, width_ == 2 ? 1 : 7,
                         static_cast<int32_t>(tokens_)};
    if (std::fseek(files_[0].stream, 0, SEEK_SET)) failed(files_[0].temporary);
    write(files_[0], header, sizeof header);
  }
  for (File& file : files_) {
    std::FILE* stream = file.stream;
    file.stream = nullptr;
    bool flushed = std::fflush(stream) == 0 && fsync(fileno(stream)) == 0;
    if (std::fclose(stream) != 0 || !flushed) failed(file.temporary);
  }
  // An older file's .idx or .mask would be taken for a part of this one.
  std::error_code ignored;
  for (const char* extension : {".idx", ".mask"}) {
    std::filesystem::remove(sibling(files_[0].path, extension), ignored);
  }
  for (File& file : files_) {  // the index is the last: if it exists, so do the tokens
    if (std::rename(file.temporary.c_str(), file.path.c_str())) failed(file.path);
    file.temporary.clear();
  }
}

}  // namespace fsdp::data
