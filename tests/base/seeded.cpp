// Seeds the generator before every test, and before its fixture is constructed. LibTorch seeds it
// from the clock, so a tolerance that holds for most numbers would fail one day. Each rank has its
// own seed.
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
