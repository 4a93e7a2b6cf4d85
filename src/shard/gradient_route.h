// GradientRoute: the way of a layer's own gradient into the buffer that its unit is reduced from.
//
// Autograd hands a gradient over as a tensor of its own, which must then be copied. A layer that
// computes the gradient itself (src/nn) writes it where it belongs instead:
//
//   forward   route = shard::route_of(weight);            // null: not sharded; use autograd
//             if (route) route->expect();                 // once for each backward call to come
//   backward  shard::Place place = route->open();         // gathers nothing; waits on the stream
//             … write place.gradient, adding to it if place.accumulate …
//             route->close();                             // the last one of a unit starts its
//             reduction and return an undefined gradient to autograd
//
// The weight must stay an input of the autograd node, so that the engine knows of the use. What a
// forward expected is over when its route goes, or with the next backward: a forward whose backward
// never comes delays the unit's reduction to the end of that one, and only while its graph is
// alive.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>

namespace fsdp::shard {

class Unit;

struct Place {
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
  Place open();
  void close();

 private:
  std::weak_ptr<Unit> unit_;
  size_t flat_, parameter_;
  int expects_ = 0;    // that are in the flat's count …
  int64_t since_ = 0;  // … if that is still of this time
};

// Null where the tensor is no sharded parameter of which a gradient is wanted (and where it is
// sharded, but its gradient is watched by hooks of the user's own, who must see it).
c10::intrusive_ptr<GradientRoute> route_of(const at::Tensor& parameter);

}  // namespace fsdp::shard
