/// @file
/// Reads and writes configurations as Hugging Face's transformers store them (config.json).
///
///     models::AnyConfig config = models::read_hugging_face_config("SmolLM2-135M/config.json");
///     if (auto* decoder = std::get_if<models::DecoderConfig>(&config))
///       models::Decoder model(*decoder);
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "fsdp/models/decoder.h"
#include "fsdp/models/gpt2.h"

namespace fsdp::models {

/// A configuration of any model here. All but GPT-2 are decoders.
using AnyConfig = std::variant<DecoderConfig, GPT2Config>;

/// The model that the text of a config.json describes. A setting that changes the mathematics and
/// isn't supported is an Error that names it, and so is a key that isn't known. `where` is the
/// file's name, for errors.
AnyConfig parse_hugging_face_config(std::string_view json, const std::string& where);
/// The same from a file.
AnyConfig read_hugging_face_config(const std::filesystem::path& file);

/// Token ids that a config.json names.
struct SpecialTokens {
  std::optional<int64_t> bos;  ///< Begins a text.
  std::optional<int64_t> eos;  ///< Ends a text.
};

/// The text of a config.json from which transformers (4 and 5) makes the same model.
///
/// `dtype` is the weights' ("float32", "bfloat16"). `max_positions` is the longest sequence; 0: a
/// GPT-2's own, else transformers' default.
std::string hugging_face_config(const AnyConfig& config, const std::string& dtype,
                                int64_t max_positions = 0, const SpecialTokens& tokens = {});

}  // namespace fsdp::models
