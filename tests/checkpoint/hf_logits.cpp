// hf_logits DIR IDS OUT [DIR IDS OUT ...]: computes the logits of Hugging Face models with our
// code. IDS is a file of int64, one sequence; OUT gets float32 [tokens, vocab].
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fsdp/checkpoint.h"
#include "fsdp/models.h"

namespace {

using namespace fsdp;

std::shared_ptr<models::CausalLMImpl> model_of(const models::AnyConfig& config) {
  if (const auto* decoder = std::get_if<models::DecoderConfig>(&config))
    return models::Decoder(*decoder).ptr();
  return models::GPT2(std::get<models::GPT2Config>(config)).ptr();
}

int run(const std::string& dir, const std::string& ids_file, const std::string& out_file) {
  std::ifstream in(ids_file, std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
  const auto tokens = static_cast<int64_t>(bytes.size() / sizeof(int64_t));
  const at::Tensor ids = at::from_blob(bytes.data(), {1, tokens}, at::kLong);

  auto model = model_of(models::read_hugging_face_config(dir + "/config.json"));
  checkpoint::load(dir, *model);
  model->eval();
  at::NoGradGuard no_grad;
  const at::Tensor logits = model->logits({.ids = ids}).to(at::kFloat).contiguous();
  std::ofstream out(out_file, std::ios::binary);
  out.write(static_cast<const char*>(logits.const_data_ptr()),
            static_cast<std::streamsize>(logits.nbytes()));
  out.flush();
  return out ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4 || argc % 3 != 1) {
    std::fprintf(stderr, "usage: hf_logits DIR IDS OUT [DIR IDS OUT ...]\n");
    return 2;
  }
  try {
    for (int i = 1; i < argc; i += 3)
      if (int code = run(argv[i], argv[i + 1], argv[i + 2])) return code;
    return 0;
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "%s\n", problem.what());
    return 1;
  }
}
