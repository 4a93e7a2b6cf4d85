// The manifest, as given and again with the right checksum; otherwise few inputs would get past
// that.
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "checkpoint/manifest.h"
#include "fsdp/error.h"

namespace checkpoint = fsdp::checkpoint;

namespace {

void decode(const std::string& text) {
  checkpoint::Manifest manifest;
  try {
    manifest = checkpoint::decode_manifest(text, "fuzzed");
  } catch (const fsdp::Error&) {
    return;
  }
  const std::string written = checkpoint::encode_manifest(manifest);
  const auto again = checkpoint::decode_manifest(written, "written");
  if (checkpoint::encode_manifest(again) != written) std::abort();
}

// The JSON parser needs no stack for nesting, but code that walks the result does.
bool is_deep(const std::string& text) {
  int depth = 0, deepest = 0;
  for (const char c : text) {
    depth += (c == '[' || c == '{') - (c == ']' || c == '}');
    deepest = std::max(deepest, depth);
  }
  return deepest > 100;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  decode(text);
  if (is_deep(text)) return 0;
  auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return 0;
  json.erase("own");
  const std::string rest = json.dump(-1, ' ', true);
  char sum[17];
  std::snprintf(sum, sizeof sum, "%016llx",
                static_cast<unsigned long long>(checkpoint::block_sum(rest.data(), rest.size())));
  json["own"] = sum;
  decode(json.dump(-1, ' ', true));
  return 0;
}
