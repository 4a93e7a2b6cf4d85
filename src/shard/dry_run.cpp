#include "shard/dry_run.h"

#include <utility>

namespace fsdp::shard::dry_run {
namespace {

constexpr int kOff = 0, kCpu = 1, kGpu = 2;
thread_local int mode = kOff;
thread_local std::vector<Product> products;

}  // namespace

Scope::Scope(As as) : before_(mode) {
  mode = as == As::kGpu ? kGpu : kCpu;
  products.clear();
}

Scope::~Scope() {
  mode = before_;
}

bool on() {
  return mode != kOff;
}

bool as_gpu() {
  return mode == kGpu;
}

void count_product(const Product& product) {
  if (on()) products.push_back(product);
}

std::vector<Product> take_products() {
  return std::exchange(products, {});
}

}  // namespace fsdp::shard::dry_run
