#include "shard/dry_run.h"

#include <utility>

namespace fsdp::shard::dry_run {

Scope::Scope(As as) : before_(std::exchange(this_thread().dry_run.as, as)) {
  this_thread().dry_run.products.clear();
  check_in_debug();
}

Scope::~Scope() {
  this_thread().dry_run.as = before_;
}

void count_product(const Product& product) {
  if (on()) this_thread().dry_run.products.push_back(product);
}

std::vector<Product> take_products() {
  return std::exchange(this_thread().dry_run.products, {});
}

}  // namespace fsdp::shard::dry_run
