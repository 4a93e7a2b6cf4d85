// Headers of safetensors files: valid ones, hostile ones, and our own.
#include "checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include "checkpoint/hugging_face.h"
#include "fsdp/error.h"

namespace fsdp::checkpoint {
namespace {

std::string with_length(const std::string& json, uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(length >> (8 * i));
  return bytes + json;
}

std::string with_length(const std::string& json) {
  return with_length(json, json.size());
}

// Parses a file with this header and `data` bytes of data.
SafeHeader parsed(const std::string& json, int64_t data) {
  const std::string bytes = with_length(json);
  return parse_header(bytes, static_cast<int64_t>(bytes.size()) + data, "f");
}

// The message of the refusal; "" if it is accepted.
std::string refusal_of(const std::string& bytes, int64_t file_size) {
  try {
    parse_header(bytes, file_size, "f.safetensors");
  } catch (const Error& problem) {
    EXPECT_FALSE(problem.hint().empty());
    EXPECT_TRUE(problem.message().starts_with("f.safetensors: ")) << problem.message();
    return problem.message();
  }
  return "";
}

std::string refusal(const std::string& json, int64_t data) {
  const std::string bytes = with_length(json);
  return refusal_of(bytes, static_cast<int64_t>(bytes.size()) + data);
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape +
         "],\"data_offsets\":[" + offsets + "]}";
}

TEST(Safetensors, TensorsAreSortedByOffset) {
  const auto header =
      parsed("{" + entry("b", "BF16", "3", "24,30") + "," + entry("a", "F32", "2,3", "0,24") + "," +
                 entry("c", "I64", "", "30,38") +
                 ",\"__metadata__\":{\"format\":"
                 "\"pt\"}}   ",
             38);
  ASSERT_EQ(header.tensors.size(), 3u);
  EXPECT_EQ(header.tensors[0].name, "a");
  EXPECT_EQ(header.tensors[0].dtype, at::kFloat);
  EXPECT_EQ(header.tensors[0].sizes, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(header.tensors[1].name, "b");
  EXPECT_EQ(header.tensors[1].begin, 24);
  EXPECT_EQ(header.tensors[1].end, 30);
  EXPECT_TRUE(header.tensors[2].sizes.empty());
  EXPECT_EQ(header.metadata.at("format"), "pt");
}

TEST(Safetensors, EmptyTensorsAndEmptyFilesAreFine) {
  EXPECT_TRUE(parsed("{}", 0).tensors.empty());
  const auto header =
      parsed("{" + entry("a", "F32", "0,7", "0,0") + "," + entry("b", "U8", "2", "0,2") + "}", 2);
  EXPECT_EQ(header.tensors[0].name, "a");
}

TEST(Safetensors, AWrittenHeaderReadsBack) {
  std::vector<SafeTensor> tensors;
  int64_t at = 0;
  for (at::ScalarType type : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong,
                              at::kInt, at::kShort, at::kChar, at::kByte, at::kBool, at::kUInt16,
                              at::kUInt32, at::kUInt64, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    SafeTensor tensor{std::string("tensor \"") + c10::toString(type), type, {3, 5}, at, 0};
    at += 15 * static_cast<int64_t>(c10::elementSize(type));
    tensor.end = at;
    tensors.push_back(tensor);
  }
  const SafeMetadata metadata{{"format", "pt"}, {"quote\"d", "a\nb"}};
  const std::string bytes = encode_header(tensors, metadata);
  EXPECT_EQ(bytes.size() % 8, 0u);
  const auto header = parse_header(bytes, static_cast<int64_t>(bytes.size()) + at, "f");
  EXPECT_EQ(header.data, static_cast<int64_t>(bytes.size()));
  EXPECT_EQ(header.metadata, metadata);
  ASSERT_EQ(header.tensors.size(), tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(header.tensors[i].name, tensors[i].name);
    EXPECT_EQ(header.tensors[i].dtype, tensors[i].dtype);
    EXPECT_EQ(header.tensors[i].sizes, tensors[i].sizes);
    EXPECT_EQ(header.tensors[i].begin, tensors[i].begin);
    EXPECT_EQ(header.tensors[i].end, tensors[i].end);
  }
  EXPECT_THROW(encode_header({{"a", at::kFloat, {2}, 0, 9}}, {}), Error);   // wrong size
  EXPECT_THROW(encode_header({{"a", at::kFloat, {2}, 8, 16}}, {}), Error);  // a gap
  EXPECT_THROW(encode_header({{"a\xff", at::kFloat, {1}, 0, 4}}, {}), Error);
  EXPECT_THROW(safetensors_name(at::kComplexFloat), Error);
}

TEST(Safetensors, InvalidLengthsAreRefused) {
  EXPECT_NE(refusal_of("", 0), "");
  EXPECT_NE(refusal_of("abc", 3), "");
  EXPECT_NE(refusal_of(with_length("{}", 3), 10), "");                          // beyond the file
  EXPECT_NE(refusal_of(with_length("{}", 100'000'001), int64_t{1} << 40), "");  // above the limit
  EXPECT_NE(refusal_of(with_length("{}", ~uint64_t{0}), 10), "");
  EXPECT_NE(refusal_of(with_length("{}", uint64_t{1} << 63), 10), "");
  EXPECT_NE(refusal_of(with_length("{}", 50), 1000), "");  // incomplete
  EXPECT_NE(refusal_of(with_length("", 0), 8), "");
}

TEST(Safetensors, InvalidHeadersAreRefused) {
  for (const char* json :
       {"[]", "{", "{}x", "{} {}", "nul", " {}", R"({"a":1})", R"({"a":[]})", R"({"a":null})",
        R"({"a":{}})", R"({"a":{"dtype":"F32"}})", R"({"a":"F32"})", R"({"__metadata__":{"a":1}})",
        R"({"__metadata__":{"a":{"b":"c"}}})", R"({"__metadata__":{"a":"b","a":"c"}})",
        R"({"__metadata__":[]})"})
    EXPECT_NE(refusal(json, 0), "") << json;
  EXPECT_NE(refusal(std::string("{}\0\0", 4), 0), "");  // the parser would stop at the zero byte
  EXPECT_NE(refusal(std::string("{\"a\xff\":1}"), 0), "");
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += R"({"a":)";
  EXPECT_NE(refusal(deep, 0), "");
  EXPECT_NE(refusal("{\"a\":" + std::string(100'000, '['), 0), "");
}

TEST(Safetensors, InvalidTensorsAreRefusedByName) {
  const auto one = [](const std::string& dtype, const std::string& shape,
                      const std::string& offsets) {
    return "{" + entry("weight", dtype, shape, offsets) + "}";
  };
  ASSERT_EQ(refusal(one("F32", "2", "0,8"), 8), "");
  for (const auto& [json, data] : std::vector<std::pair<std::string, int64_t>>{
           {one("F33", "2", "0,8"), 8},
           {one("f32", "2", "0,8"), 8},
           {one("F32", "3", "0,8"), 8},  // more elements than bytes
           {one("F32", "2", "8,0"), 8},  // backwards
           {one("F32", "2", "0"), 8},
           {one("F32", "2", "0,8,16"), 8},
           {one("F32", "-2", "0,8"), 8},
           {one("F32", "2.0", "0,8"), 8},
           {one("F32", "[2]", "0,8"), 8},
           {one("F32", "2", "-8,0"), 8},
           {one("F32", "4294967296,4294967296", "0,0"), 0},  // the product overflows to 0
           {one("F32", "0,4611686018427387904,4611686018427387904", "0,0"), 0},
           {one("F32", "18446744073709551615", "0,8"), 8},
           {one("U8", "9223372036854775807", "0,9223372036854775807"), 8},
           {one("F32", "99999999999999999999999", "0,8"), 8},
           {R"({"weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}})", 8},
           {R"({"weight":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8},
           {R"({"weight":{"dtype":"F32","shape":[],"shape":[2],"data_offsets":[0,8]}})", 8},
           {R"({"weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"data_offsets":[0,8]}})",
            8}}) {
    const std::string said = refusal(json, data);
    EXPECT_NE(said.find("weight"), std::string::npos) << json << ": " << said;
  }
  std::string ones = "1";
  for (int i = 0; i < 64; ++i) ones += ",1";
  EXPECT_NE(refusal(one("U8", ones, "0,1"), 1), "");
}

TEST(Safetensors, GapsOverlapsAndExtraBytesAreRefused) {
  const auto two = [](const std::string& first, const std::string& second) {
    return "{" + entry("a", "U8", "4", first) + "," + entry("b", "U8", "4", second) + "}";
  };
  ASSERT_EQ(refusal(two("0,4", "4,8"), 8), "");
  EXPECT_NE(refusal(two("0,4", "2,6"), 6), "");
  EXPECT_NE(refusal(two("0,4", "0,4"), 4), "");
  EXPECT_NE(refusal(two("0,4", "5,9"), 9), "");
  EXPECT_NE(refusal(two("1,5", "5,9"), 9), "");
  EXPECT_NE(refusal(two("0,4", "4,8"), 7), "");  // truncated
  EXPECT_NE(refusal(two("0,4", "4,8"), 9), "");
  EXPECT_NE(refusal("{}", 1), "");
}

TEST(Safetensors, RepeatedNamesAndControlCharactersAreRefused) {
  const auto named = [](const std::string& name) {
    return "{" + entry(name, "U8", "0", "0,0") + "}";
  };
  ASSERT_EQ(refusal(named("w"), 0), "");
  EXPECT_NE(
      refusal("{" + entry("w", "U8", "0", "0,0") + "," + entry("w", "U8", "0", "0,0") + "}", 0)
          .find("\"w\""),
      std::string::npos);
  EXPECT_NE(refusal(named(""), 0), "");
  EXPECT_NE(refusal(named("\\u001b[2J"), 0), "");
  EXPECT_NE(refusal(named("a\\u0000b"), 0), "");
  EXPECT_NE(refusal(named(std::string(5000, 'a')), 0), "");
}

TEST(HuggingFaceNames, OfAllVersionsMapToTheModels) {
  EXPECT_EQ(name_in_model("model.layers.0.mlp.up_proj.weight"),
            "model.layers.0.mlp.up_proj.weight");
  EXPECT_EQ(name_in_model("lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(name_in_model("layers.0.mlp.up_proj.weight"), "model.layers.0.mlp.up_proj.weight");
  EXPECT_EQ(name_in_model("norm.weight"), "model.norm.weight");
  EXPECT_EQ(name_in_model("wte.weight"), "transformer.wte.weight");
  EXPECT_EQ(name_in_model("h.11.attn.c_attn.bias"), "transformer.h.11.attn.c_attn.bias");
  EXPECT_EQ(name_in_model("transformer.ln_f.bias"), "transformer.ln_f.bias");
  EXPECT_EQ(name_in_model("h.11.attn.bias"), "");
  EXPECT_EQ(name_in_model("transformer.h.0.attn.masked_bias"), "");
  EXPECT_EQ(name_in_model("model.layers.3.self_attn.rotary_emb.inv_freq"), "");
  EXPECT_EQ(name_in_model("model.layers.3.block_sparse_moe.gate.weight"),
            "model.layers.3.mlp.gate.weight");
  EXPECT_EQ(name_in_model("model.layers.3.block_sparse_moe.experts.7.w3.weight"),
            "model.layers.3.mlp.experts.7.up_proj.weight");
}

TEST(HuggingFaceNames, OfExpertsArePartsOfOneParameter) {
  const auto up = expert_matrix("model.layers.3.mlp.experts.17.up_proj.weight").value();
  EXPECT_EQ(up.parameter, "model.layers.3.mlp.experts.gate_up_proj");
  EXPECT_EQ(up.expert, 17);
  EXPECT_TRUE(up.second);
  EXPECT_FALSE(expert_matrix("model.layers.3.mlp.experts.0.gate_proj.weight")->second);
  EXPECT_EQ(expert_matrix("model.layers.3.mlp.experts.0.down_proj.weight")->parameter,
            "model.layers.3.mlp.experts.down_proj");
  for (const char* name :
       {"model.layers.3.mlp.gate_proj.weight", "model.layers.3.mlp.experts.gate_up_proj",
        "model.layers.3.mlp.experts.x.up_proj.weight", "model.layers.3.mlp.experts.1.bias",
        "model.layers.3.mlp.experts.12345678.up_proj.weight"})
    EXPECT_FALSE(expert_matrix(name)) << name;
}

}  // namespace
}  // namespace fsdp::checkpoint
