#include "checkpoint/manifest.h"

#include <charconv>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "checkpoint/files.h"
#include "checkpoint/damaged.h"

namespace fsdp::checkpoint {
namespace {

using Json = nlohmann::json;

constexpr const char* kFormat = "fsdp manifest 1";
constexpr size_t kDigits = 16;

std::string hex(uint64_t number) {
  constexpr const char* kHex = "0123456789abcdef";
  std::string text(kDigits, '0');
  for (size_t i = kDigits; number > 0; number >>= 4) text[--i] = kHex[number & 15];
  return text;
}

std::optional<uint64_t> parse_hex(std::string_view text) {
  uint64_t number = 0;
  const auto* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, number, 16);
  if (text.size() != kDigits || result.ec != std::errc() || result.ptr != end) return std::nullopt;
  return number;
}

struct Reading {
  const std::string& where;

  [[noreturn]] void fail(const std::string& what) const {
    throw Damaged(formatted("{}: {}.", where, what),
                  "the manifest is damaged; check the rest with `fsdp ckpt verify`, or load another "
                  "checkpoint.");
  }

  FileSums file(const std::string& name, const Json& json) const {
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos)
      fail(formatted("\"{}\" isn't a valid file name", name));
    if (!json.is_object() || !json.contains("size") || !json.contains("sums") ||
        !json["size"].is_number_integer() || !json["sums"].is_string())
      fail(formatted("\"{}\" has no size or no sums", name));
    FileSums file{json["size"].get<int64_t>(), {}};
    const auto& digits = json["sums"].get_ref<const std::string&>();
    if (file.size < 0 || digits.size() % kDigits != 0 ||
        file.size / kSumBlock + (file.size % kSumBlock != 0) !=
            static_cast<int64_t>(digits.size() / kDigits))
      fail(formatted("\"{}\" has a different number of sums than blocks", name));
    file.sums.reserve(digits.size() / kDigits);
    for (size_t at = 0; at < digits.size(); at += kDigits) {
      const auto sum = parse_hex(std::string_view(digits).substr(at, kDigits));
      if (!sum) fail(formatted("\"{}\" has a sum that isn't a number", name));
      file.sums.push_back(*sum);
    }
    return file;
  }
};

std::string own_sum(const Json& json) {
  const std::string text = json.dump(-1, ' ', /*ensure_ascii=*/true);
  return hex(block_sum(text.data(), text.size()));
}

}  // namespace

std::string encode_manifest(const Manifest& manifest) {
  Json files = Json::object();
  for (const auto& [name, file] : manifest.files) {
    std::string sums;
    sums.reserve(file.sums.size() * kDigits);
    for (const uint64_t sum : file.sums) sums += hex(sum);
    files[name] = {{"size", file.size}, {"sums", std::move(sums)}};
  }
  Json json = {{"format", kFormat}, {"block", kSumBlock}, {"files", std::move(files)}};
  json["own"] = own_sum(json);
  return json.dump(-1, ' ', true) + "\n";
}

Manifest decode_manifest(std::string_view text, const std::string& where) {
  const Reading reading{where};
  constexpr int kDeepest = 4;  // bounds the parser's stack
  const auto shallow = [&](int depth, Json::parse_event_t, Json&) {
    if (depth > kDeepest) reading.fail("isn't a manifest");
    return true;
  };
  Json json = Json::parse(text, shallow, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("format") || !json.contains("own") ||
      !json.contains("block") || !json.contains("files") || !json["files"].is_object())
    reading.fail("isn't a manifest");
  if (json["format"] != kFormat)
    throw Error(formatted("{}: has an unknown format version.", where),
                "a newer fsdp.cpp wrote it; load the checkpoint with that version.");
  if (json["block"] != kSumBlock) reading.fail("has an unexpected block size");
  const Json own = json["own"];
  json.erase("own");
  try {
    if (own != own_sum(json)) reading.fail("doesn't match its own checksum");
  } catch (const Json::exception&) {  // invalid UTF-8
    reading.fail("isn't valid UTF-8");
  }
  Manifest manifest;
  for (const auto& [name, file] : json["files"].items())
    manifest.files.emplace(name, reading.file(name, file));
  return manifest;
}

std::string mark_of(const Manifest& manifest) {
  Manifest others = manifest;
  others.files.erase(kMetadataName);  // which has the mark
  const std::string text = encode_manifest(others);
  return kMarkPrefix + hex(block_sum(text.data(), text.size()));
}

std::optional<Manifest> read_manifest(const std::filesystem::path& dir) {
  constexpr int64_t kLargest = int64_t{1} << 30;
  const auto file = dir / kManifestName;
  std::error_code problem;
  if (!std::filesystem::exists(file, problem)) return std::nullopt;
  return decode_manifest(files::read_whole(file, kLargest), file.string());
}

void write_manifest(const std::filesystem::path& dir, const Manifest& manifest) {
  files::write_whole(dir / kManifestName, encode_manifest(manifest));
}

}  // namespace fsdp::checkpoint
