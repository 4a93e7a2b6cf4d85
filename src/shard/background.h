// Work in the background of a model's training, such as a save.
#pragma once

#include <memory>

namespace fsdp::shard {

struct Engine;

// Ends with the model at the latest.
struct Background {
  virtual ~Background() = default;
  virtual void check() = 0;  // throws its failure, once
  // Masters or states are about to change: waits for, or makes the current stream wait for,
  // whatever still reads them.
  virtual void before_change() = 0;
};

const std::shared_ptr<Background>& background_of(const Engine& engine);  // null: none
void set_background(Engine& engine, std::shared_ptr<Background> work);
void before_change(const Engine& engine);  // of its background work, if there is any

}  // namespace fsdp::shard
