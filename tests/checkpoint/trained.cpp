#include "checkpoint/trained.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iterator>

#include "fsdp/muon.h"
#include "optim/states.h"
#include "shard/engine.h"
#include "shard/model.h"
#include "shard/oracle.h"
#include "shard/world.h"

namespace fsdp::testing {

Trained make_trained(const std::string& name, ShardOptions options, Rule rule, uint64_t seed) {
  const ModelCase& model = model_case(name);
  Trained trained{&model, build_seeded(model, seed), {}, nullptr};
  if (!options.wrap) options.wrap = model.wrap;
  options.device = test_device();
  trained.sharded = fully_shard({ModuleRef(trained.built.module)}, options);
  if (rule == Rule::kMuon)
    trained.optimizer = std::make_unique<Muon>(
        trained.sharded, MuonOptions{.lr = 1e-2, .adamw = {.groups = {no_decay()}}});
  else if (rule == Rule::kAdamW)
    trained.optimizer = std::make_unique<AdamW>(
        trained.sharded, AdamWOptions{.lr = 1e-2, .weight_decay = 0.1, .groups = {no_decay()}});
  else
    trained.optimizer = std::make_unique<SGD>(
        trained.sharded,
        SGDOptions{.lr = 1e-2, .momentum = rule == Rule::kSgd ? 0 : 0.9, .dampening = 0.1});
  return trained;
}

void Trained::train(int count) {
  for (int i = 0; i < count; ++i, ++steps) {
    const Batch batch = moved(model->batch(steps, rank()), test_device());
    built.loss(batch).backward();
    sharded.clip_grad_norm_(1.0);
    optimizer->step();
    optimizer->zero_grad();
  }
}

Snapshot snapshot(const Trained& trained) {
  Snapshot whole;
  for (const auto& [name, tensor] : trained.sharded.full_state_dict())
    whole["model." + name] = tensor;
  const auto model = shard::lock(trained.sharded);
  shard::Unseen unseen;
  const optim::States& states = optim::states_of(*trained.optimizer);
  for (auto* flat : model->flats())
    for (size_t slot = 0; slot < states.slots(*flat).size(); ++slot) {
      const at::Tensor full =
          model->gatherer.gather_shard(*flat, states.spread(*flat, slot), "a snapshot");
      for (size_t i = 0; i < flat->parameters().size(); ++i) {
        const auto& p = flat->parameters()[i];
        const auto& names = states.names(*flat, i);
        if (!p.handle.requires_grad() || slot >= names.size()) continue;
        whole["state." + p.name() + "." + names[slot]] = flat->view_of(i, full).cpu().clone();
        whole["steps." + p.name()] = at::full({}, states.steps(*flat), at::kLong);
      }
    }
  return whole;
}

void expect_equal(const Snapshot& actual, const Snapshot& expected) {
  for (const auto& [name, tensor] : expected) {
    const auto found = actual.find(name);
    if (found == actual.end()) {
      ADD_FAILURE() << name << " is missing";
      continue;
    }
    EXPECT_EQ(found->second.sizes(), tensor.sizes()) << name;
    EXPECT_EQ(found->second.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(at::equal(found->second, tensor)) << name << ":\n"
                                                  << found->second << "\ninstead of\n"
                                                  << tensor;
  }
  for (const auto& [name, tensor] : actual)
    EXPECT_TRUE(expected.contains(name)) << name << " is unexpected";
}

void write_snapshot(const std::filesystem::path& file, const Snapshot& snapshot) {
  c10::Dict<std::string, at::Tensor> dict;
  for (const auto& [name, tensor] : snapshot) dict.insert(name, tensor.contiguous());
  const auto bytes = torch::jit::pickle_save(dict);
  std::ofstream(file, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

Snapshot read_snapshot(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
  Snapshot snapshot;
  for (const auto& item : torch::jit::pickle_load(bytes).toGenericDict())
    snapshot[item.key().toStringRef()] = item.value().toTensor();
  return snapshot;
}

SharedFolder::SharedFolder() {
  std::string made = std::filesystem::temp_directory_path() / "fsdp-checkpoint-XXXXXX";
  if (rank() == 0 && !mkdtemp(made.data())) throw std::runtime_error("mkdtemp failed");
  made_ = text_of_rank_0(made);
  // One level deeper, so that a test that uses ".." stays inside of the temporary directory.
  path_ = made_ / "checkpoints";
  if (rank() == 0) std::filesystem::create_directory(path_);
  test_world().comm().barrier();
}

SharedFolder::~SharedFolder() {
  test_world().comm().barrier();
  std::error_code problem;
  if (rank() == 0) std::filesystem::remove_all(made_, problem);
}

}  // namespace fsdp::testing
