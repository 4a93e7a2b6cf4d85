// A config.json of Hugging Face. A config that can be read is written and must read the same.
#include <cstdlib>

#include "fsdp/error.h"
#include "fsdp/models/hugging_face.h"

namespace models = fsdp::models;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  models::AnyConfig config;
  try {
    config =
        models::parse_hugging_face_config({reinterpret_cast<const char*>(data), size}, "fuzzed");
  } catch (const fsdp::Error&) {
    return 0;
  }
  const std::string written = models::hugging_face_config(config, "float32");
  const auto again = models::parse_hugging_face_config(written, "written");
  if (models::hugging_face_config(again, "float32") != written) std::abort();
  return 0;
}
