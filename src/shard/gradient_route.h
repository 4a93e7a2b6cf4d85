// GradientRoute: lets a layer write a parameter's gradient directly into the buffer its unit is
// reduced from.
//
// Autograd passes each gradient as a tensor of its own, which must then be copied. A layer that
// computes the gradient itself (src/nn) writes it into the buffer instead:
//
//   forward   route = shard::route_of(weight);     // null: not sharded; use autograd
//             if (route) route->expect();          // once per backward call to come
//   backward  shard::GradientPlace place = route->open();  // gathers nothing; waits on the stream
//             … write place.gradient, adding to it if place.accumulate …
//             route->close();                      // the last one of a unit starts its reduction
//             … return an undefined gradient to autograd …
//
// The weight must stay an input of the autograd node, so that the engine knows of the use. An
// expectation ends when its route is destroyed, or with the next backward. A forward whose backward
// never runs therefore delays the unit's reduction to the end of the next backward, and only while
// its graph is alive.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>

namespace fsdp::shard {

class Unit;

struct GradientPlace {
  at::Tensor gradient;  // in the parameter's sizes, in the unit's reduce_dtype
  bool accumulate = false;
};

class GradientRoute : public torch::CustomClassHolder {
 public:
  GradientRoute(std::weak_ptr<Unit> unit, size_t flat, size_t parameter)
      : unit_(std::move(unit)), flat_(flat), parameter_(parameter) {}
  ~GradientRoute() override;
  GradientRoute(const GradientRoute&) = delete;
  GradientRoute& operator=(const GradientRoute&) = delete;

  void expect();
  GradientPlace open();
  void close();

 private:
  std::weak_ptr<Unit> unit_;
  size_t flat_, parameter_;
  int expects_ = 0;    // its share of the flat's `expected` …
  int64_t since_ = 0;  // … of this generation (Flat::expectations)
};

// Null if the tensor isn't a sharded parameter that requires a gradient, or if the user has a hook
// on it, which must see the gradient.
c10::intrusive_ptr<GradientRoute> route_of(const at::Tensor& parameter);

}  // namespace fsdp::shard
