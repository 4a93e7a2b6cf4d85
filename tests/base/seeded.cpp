// Every test starts from the same random numbers, also those that a fixture's members are made of:
// LibTorch seeds its generator from the clock, and a tolerance that holds for most numbers is a
// test that fails one day. Ranks start from different ones, as they did.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <cstdlib>

namespace fsdp::testing {
namespace {

class Seeded : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo&) override {
    const char* rank = std::getenv("RANK");
    if (!rank) rank = std::getenv("OMPI_COMM_WORLD_RANK");
    at::manual_seed(5 + (rank ? std::strtoull(rank, nullptr, 10) : 0));
  }
};

[[maybe_unused]] const bool registered = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new Seeded);
  return true;
}();

}  // namespace
}  // namespace fsdp::testing
