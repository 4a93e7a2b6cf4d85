#include "data/token_file.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "base/format.h"
#include "base/table.h"
#include "data/data_file.h"
#include "fsdp/error.h"

namespace fsdp::data {
namespace {

constexpr int64_t kHeader = 1024;  // bytes, of llm.c
constexpr uint32_t kMagic16 = 20240520, kMagic32 = 20240801;
constexpr std::string_view kIndexMagic("MMIDIDX\0\0", 9);
constexpr int64_t kIndexHeader = 9 + 8 + 1 + 8 + 8;
constexpr int64_t kFront = 4096;      // bytes that tell the kind of a file
constexpr int64_t kEntries = 1 << 16;  // of a table, read at a time
constexpr int64_t kStride = 512;       // documents

template <class T>
T load(std::string_view bytes, int64_t at) {  // may be unaligned
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

std::string count(int64_t number) {
  return with_separators(number);
}

[[noreturn]] void refuse(const std::string& path, const std::string& why, const std::string& hint) {
  throw Error(formatted("{} isn't a token file: {}.", path, why), hint);
}

[[noreturn]] void cut_short(const std::string& path, int64_t has, int64_t needs) {
  throw Error(formatted("{}{}: it has {} bytes, but its header says {}.", path,
                        has < needs ? " is truncated" : " is too long", count(has), count(needs)),
              "copy or make the file again.");
}

// Calls use(index, value) for each entry of a table in a file, which begins at `offset`.
template <class T, class Use>
void each_entry(const DataFile& file, int64_t offset, int64_t entries, Use use) {
  std::vector<T> some(static_cast<size_t>(std::min(entries, kEntries)));
  for (int64_t begin = 0; begin < entries; begin += kEntries) {
    const int64_t number = std::min(entries - begin, kEntries);
    file.read(offset + begin * static_cast<int64_t>(sizeof(T)), some.data(),
              number * static_cast<int64_t>(sizeof(T)));
    for (int64_t i = 0; i < number; ++i) use(begin + i, some[static_cast<size_t>(i)]);
  }
}

template <class T>
T load(const DataFile& file, int64_t at) {
  T value;
  file.read(at, &value, sizeof value);
  return value;
}

// The kind of a file that holds no tokens, by its first bytes and its last one; "" if it isn't a
// known one.
std::string foreign_kind(std::string_view bytes, char last) {
  struct ElementType {
    std::string_view start;
    const char* name;
  };
  static const ElementType kinds[] = {
      {"\x7f"
       "ELF",
       "a program or library (ELF)"},
      {"PK\x03\x04", "a zip archive, as torch.save writes"},
      {"\x1f\x8b\x08", "compressed with gzip"},
      {"\x28\xb5\x2f\xfd", "compressed with zstd"},
      {"BZh91AY", "compressed with bzip2"},
      {"\xfd"
       "7zXZ",
       "compressed with xz"},
      {"\x93NUMPY", "a NumPy file"},
      {"PAR1", "a Parquet file"},
      {"ARROW1", "an Arrow file"},
      {"GGUF", "a GGUF model"},
      {"SQLite format 3", "an SQLite database"},
      {"\x89PNG", "an image"},
      {"\xff\xd8\xff", "an image"},
      {"%PDF", "a PDF"},
      {kIndexMagic, "the index of a Megatron file"},
      {"version https://git-lfs", "a Git LFS pointer, not the file itself"},
  };
  for (const ElementType& kind : kinds) {
    if (bytes.substr(0, kind.start.size()) == kind.start) return kind.name;
  }
  // Two bytes could also be a token, so check the last byte of a pickle, too.
  if (bytes.size() > 2 && bytes[0] == '\x80' && bytes[1] >= 2 && bytes[1] <= 5 &&
      last == '.') {
    return "a Python pickle";
  }
  // Tokens are two bytes each, and the upper bytes are small numbers, unlike text.
  bool text = bytes.size() >= 16;
  for (unsigned char c : bytes)
    text = text && (c >= 0x20 || c == '\n' || c == '\r' || c == '\t') && c != 0x7f;
  return text ? "text" : "";
}

[[noreturn]] void refuse_index(const DataFile& index, const std::string& tokens,
                               const std::string& why) {
  throw Error(formatted("{} isn't a usable index: {}.", index.path(), why),
              formatted("Megatron's preprocess_data.py writes it together with {}.", tokens));
}

uint32_t swapped(uint32_t value) {
  return __builtin_bswap32(value);
}

bool has_llmc_magic(std::string_view bytes) {
  if (bytes.size() < 4) return false;
  auto magic = load<uint32_t>(bytes, 0);
  for (uint32_t known : {kMagic16, kMagic32}) {
    if (magic == known || magic == swapped(known)) return true;
  }
  return false;
}

}  // namespace

std::string sibling(const std::string& path, const std::string& extension) {
  return std::filesystem::path(path).replace_extension(extension).string();
}

TokenFile::TokenFile() = default;
TokenFile::~TokenFile() = default;
const std::string& TokenFile::path() const {
  return file_->path();
}
int64_t TokenFile::file_bytes() const {
  return file_->size() + (index_ ? index_->size() : 0);
}

std::shared_ptr<TokenFile> TokenFile::open(const std::string& path, Format format) {
  auto tokens = std::make_shared<TokenFile>();
  bool named_index = std::filesystem::path(path).extension() == ".idx";
  tokens->file_ = std::make_unique<DataFile>(named_index ? sibling(path, ".bin") : path);
  std::string index = sibling(path, ".idx");
  if (format == Format::kAuto) {
    std::error_code ignored;
    format = has_llmc_magic(tokens->file_->front(4))                  ? Format::kLlmc
             : named_index || std::filesystem::exists(index, ignored) ? Format::kMegatron
                                                                      : Format::kNanogpt;
  }
  tokens->format_ = format;
  if (format == Format::kLlmc) {
    tokens->open_llmc();
  } else if (format == Format::kMegatron) {
    tokens->open_megatron(index);
  } else if (format == Format::kNanogpt) {
    tokens->open_nanogpt();
  } else {
    throw Error(formatted("there is no token file format \"{}\".", enum_name(format)),
                "formats are auto, nanogpt, llmc, megatron.");
  }
  return tokens;
}

void TokenFile::open_nanogpt() {
  const std::string hint = "fsdp tokenize turns text into tokens.";
  if (file_->size() == 0) refuse(path(), "it is empty", hint);
  std::string kind = foreign_kind(file_->front(kFront), load<char>(*file_, file_->size() - 1));
  if (!kind.empty()) refuse(path(), formatted("it is {}", kind), hint);
  if (file_->size() % 2) {
    refuse(path(),
           formatted("tokens have two bytes, but its size of {} is odd", count(file_->size())),
           "it may be truncated; copy or make it again.");
  }
  tokens_ = file_->size() / 2;
}

void TokenFile::open_llmc() {
  const std::string bytes = file_->front(kHeader);
  const std::string hint =
      "llm.c's files begin with a header of 1024 bytes; is this another format?";
  if (file_->size() < kHeader) refuse(path(), "it is shorter than llm.c's header", hint);
  auto magic = load<uint32_t>(bytes, 0), version = load<uint32_t>(bytes, 4);
  if (magic == swapped(kMagic16) || magic == swapped(kMagic32)) {
    refuse(path(), "its numbers are big-endian", "make it on a little-endian machine.");
  }
  if (magic != kMagic16 && magic != kMagic32)
    refuse(path(), "it doesn't have llm.c's magic number", hint);
  uint32_t expected = magic == kMagic16 ? 1 : 7;
  if (version != expected) {
    refuse(path(), formatted("its version is {}, not {}", version, expected), hint);
  }
  auto number = load<int32_t>(bytes, 8);
  if (number <= 0) refuse(path(), formatted("its header says {} tokens", count(number)), hint);
  type_ = magic == kMagic16 ? kUint16 : kUint32;
  int64_t needs = kHeader + int64_t{number} * (type_ == kUint16 ? 2 : 4);
  if (file_->size() != needs) cut_short(path(), file_->size(), needs);
  first_ = kHeader;
  tokens_ = number;
}

void TokenFile::open_megatron(const std::string& name) {
  index_ = std::make_unique<DataFile>(name);
  const std::string bytes = index_->front(kIndexHeader);
  const auto wrong = [&](const std::string& why) { refuse_index(*index_, path(), why); };
  if (index_->size() < kIndexHeader || bytes.substr(0, kIndexMagic.size()) != kIndexMagic) {
    wrong("it doesn't have Megatron's magic number");
  }
  if (auto version = load<uint64_t>(bytes, 9); version != 1) {
    wrong(version == __builtin_bswap64(1) ? "its numbers are big-endian"
                                          : "its version is " + std::to_string(version));
  }
  struct {
    Type type;
    int width;
  } types[] = {{},          {kUint8, 1}, {kInt8, 1}, {kInt16, 2}, {kInt32, 4},
               {kInt64, 8}, {},          {},         {kUint16, 2}};
  int code = static_cast<unsigned char>(bytes[17]);
  if (code > 8 || !types[code].width) wrong(formatted("its type {} isn't a type of ids", code));
  type_ = types[code].type;
  int64_t width = types[code].width;

  sequences_ = load<int64_t>(bytes, 18);
  documents_ = load<int64_t>(bytes, 26);
  int64_t most = index_->size();  // larger counts are invalid and would overflow below
  if (sequences_ < 1 || sequences_ > most || documents_ < 1 || documents_ > most) {
    wrong(formatted("it has {} sequences and {} document ends", sequences_, documents_));
  }
  int64_t needs = kIndexHeader + sequences_ * 12 + documents_ * 8;
  if (index_->size() == needs + sequences_) wrong("it is multimodal");
  if (index_->size() != needs) cut_short(name, index_->size(), needs);

  check_sequences(width);
  check_documents();
  if (tokens_ == 0) refuse(path(), "it has no tokens", "was the text empty?");
}

// The sequences must be contiguous, so that the file is one sequence of tokens.
void TokenFile::check_sequences(int64_t width) {
  const auto wrong = [&](const std::string& why) { refuse_index(*index_, path(), why); };
  std::vector<int64_t> starts(static_cast<size_t>(std::min(sequences_, kEntries)));
  int64_t at = 0;
  each_entry<int32_t>(*index_, kIndexHeader, sequences_, [&](int64_t i, int32_t length) {
    if (i % kEntries == 0)
      index_->read(kIndexHeader + 4 * sequences_ + 8 * i, starts.data(),
                   8 * std::min(sequences_ - i, kEntries));
    if (length < 0) wrong(formatted("sequence {} has a length of {}", count(i), count(length)));
    if (starts[static_cast<size_t>(i % kEntries)] != at)
      wrong(formatted("sequence {} doesn't follow the one before", count(i)));
    at += length * width;
  });
  if (file_->size() != at) cut_short(path(), file_->size(), at);
  tokens_ = at / width;
}

void TokenFile::check_documents() {
  int64_t last = 0;
  each_entry<int64_t>(*index_, kIndexHeader + 12 * sequences_, documents_,
                      [&](int64_t i, int64_t first) {
                        if (first < last || first > sequences_ || (i == 0 && first != 0))
                          refuse_index(*index_, path(), "its documents are out of order");
                        last = first;
                        if (i % kStride == 0 && tokens_ > 0) starts_.push_back(document_start(i));
                      });
}

int64_t TokenFile::document_start(int64_t document) const {
  const auto sequence = load<int64_t>(*index_, kIndexHeader + 12 * sequences_ + 8 * document);
  if (sequence == sequences_) return tokens_;
  const auto bytes = load<int64_t>(*index_, kIndexHeader + 4 * sequences_ + 8 * sequence);
  return bytes / (file_->size() / tokens_);
}

std::vector<int64_t> TokenFile::document_starts(int64_t first, int64_t number) const {
  std::vector<int64_t> starts;
  if (!index_) return starts;
  // The first document at or behind `first` follows the last of the stride whose start is before.
  const int64_t before = std::lower_bound(starts_.begin(), starts_.end(), first) - starts_.begin();
  int64_t low = std::max<int64_t>(before - 1, 0) * kStride;
  int64_t high = std::min(before * kStride + 1, documents_);
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    if (document_start(middle) < first)
      low = middle + 1;
    else
      high = middle;
  }
  for (; low < documents_; ++low) {
    int64_t start = document_start(low);
    if (start >= first + number) break;
    if (starts.empty() || starts.back() != start) starts.push_back(start);
  }
  return starts;
}

void TokenFile::read(int64_t first, int64_t number, int64_t* ids) const {
  constexpr int64_t kPiece = 32 << 10;  // bytes
  alignas(8) char piece[kPiece];
  auto widen = [&]<class T>(T) {
    constexpr auto width = static_cast<int64_t>(sizeof(T));
    for (int64_t done = 0; done < number; done += kPiece / width) {
      const int64_t some = std::min(number - done, kPiece / width);
      file_->read(first_ + (first + done) * width, piece, some * width);
      for (int64_t i = 0; i < some; ++i) {
        T value;
        std::memcpy(&value, piece + i * width, sizeof(T));
        ids[done + i] = static_cast<int64_t>(value);
      }
    }
  };
  switch (type_) {
    case kUint8:
      return widen(uint8_t{});
    case kInt8:
      return widen(int8_t{});
    case kInt16:
      return widen(int16_t{});
    case kUint16:
      return widen(uint16_t{});
    case kInt32:
      return widen(int32_t{});
    case kUint32:
      return widen(uint32_t{});
    case kInt64:
      return widen(int64_t{});
  }
}

MaskFile::MaskFile(const TokenFile& tokens) {
  std::string name = sibling(tokens.path(), ".mask");
  std::error_code ignored;
  if (!std::filesystem::exists(name, ignored)) {
    throw Error(
        formatted("there is no loss mask {} for {}.", name, tokens.path()),
        "fsdp tokenize writes one for prompts and completions; or set data.loss_mask to false.");
  }
  file_ = std::make_unique<DataFile>(name);
  if (file_->size() != tokens.tokens()) {
    throw Error(formatted("{} has {} bytes for {} tokens of {}.", name, count(file_->size()),
                          count(tokens.tokens()), tokens.path()),
                "a mask has one byte per token: make both again.");
  }
}

MaskFile::~MaskFile() = default;

void MaskFile::read(int64_t first, int64_t number, uint8_t* counts) const {
  file_->read(first, counts, number);
  auto* bad = std::find_if(counts, counts + number, [](uint8_t value) { return value > 1; });
  if (bad != counts + number) {
    throw Error(formatted("{}: byte {} is {}.", file_->path(), count(first + (bad - counts)), *bad),
                "a loss mask holds only 0 and 1.");
  }
}

}  // namespace fsdp::data
