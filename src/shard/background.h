// Work in the background of a model's training, such as a save.
#pragma once

#include <memory>

namespace fsdp::shard {

struct Engine;

// Ends with the model at the latest.
struct Background {
  virtual ~Background() = default;
  virtual void check() = 0;  // throws its failure, once
};

const std::shared_ptr<Background>& background_of(const Engine& engine);  // null: none
void set_background(Engine& engine, std::shared_ptr<Background> work);

}  // namespace fsdp::shard
