// A config.json of Hugging Face's transformers, or an adapter_config.json of its PEFT. A config
// that can be read is written and must read the same.
#include <cstdlib>

#include "fsdp/error.h"
#include "fsdp/models/hugging_face.h"
#include "models/peft.h"

namespace models = fsdp::models;

namespace {

void read_model(std::string_view text) {
  models::AnyConfig config;
  try {
    config = models::parse_hugging_face_config(text, "fuzzed");
  } catch (const fsdp::Error&) {
    return;
  }
  const std::string written = models::hugging_face_config(config, "float32");
  const auto again = models::parse_hugging_face_config(written, "written");
  if (models::hugging_face_config(again, "float32") != written) std::abort();
}

void read_adapters(std::string_view text) {
  models::PeftConfig config;
  try {
    config = models::parse_peft_config(text, "fuzzed");
  } catch (const fsdp::Error&) {
    return;
  }
  const std::string written = models::peft_config(config);
  if (models::peft_config(models::parse_peft_config(written, "written")) != written) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  read_model(text);
  read_adapters(text);
  return 0;
}
