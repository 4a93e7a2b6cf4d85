// Shared by the tests of uses: each runs with memory shared by the ranks and with gathers.
#pragma once

#include "shard/oracle.h"

namespace fsdp::testing {

class Uses : public ::testing::TestWithParam<bool> {
 protected:
  ShardOptions options() const {
    return {.device = test_device(), .share_host_memory = GetParam()};
  }
  static Batch batch(int step, int rank, const char* model = "mlp") {
    return moved(model_case(model).batch(step, rank), test_device());
  }
};

inline std::string memory_name(const ::testing::TestParamInfo<bool>& info) {
  return info.param ? "shared" : "gathered";
}

}  // namespace fsdp::testing
