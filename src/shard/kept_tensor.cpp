#include "shard/kept_tensor.h"

#include <utility>

#include "base/format.h"
#include "fsdp/error.h"
#include "shard/saved_activations.h"
#include "shard/unit.h"

namespace fsdp::shard {

KeptTensor::KeptTensor(const at::Tensor& tensor)
    : data_(tensor.tensor_data()), version_(tensor.is_inference() ? 0 : tensor._version()) {
  StorageTag* tag = tag_of(tensor);
  if (!tag || tag->kind != StorageTag::kParameters) {
    if (saved_activations::counting() && data_.has_storage()) {
      counted_ = data_.storage().unsafeGetStorageImpl();
      saved_activations::add(data_);
    }
    return;
  }
  flat_ = static_cast<Flat*>(tag->owner);
  unit_ = flat_->unit().shared_from_this();
  ++flat_->saved;
  set_key(data_, false);
}

KeptTensor::KeptTensor(KeptTensor&& other) noexcept
    : data_(std::move(other.data_)),
      version_(other.version_),
      unit_(std::move(other.unit_)),
      flat_(std::exchange(other.flat_, nullptr)),
      counted_(std::exchange(other.counted_, nullptr)) {}

KeptTensor& KeptTensor::operator=(KeptTensor&& other) noexcept {
  if (this == &other) return *this;
  release();
  data_ = std::move(other.data_);
  version_ = other.version_;
  unit_ = std::move(other.unit_);
  flat_ = std::exchange(other.flat_, nullptr);
  counted_ = std::exchange(other.counted_, nullptr);
  return *this;
}

bool KeptTensor::unchanged() const {
  return !data_.defined() || data_.is_inference() || data_._version() == version_;
}

void KeptTensor::check(const char* who) const {
  if (unchanged()) return;
  throw Error(
      formatted(
          "{} that {} needs was changed in place after forward saved it: version {}, expected "
          "{}.",
          unit_ ? unit_->label() + ": a parameter" : "a tensor", who, data_._version(), version_),
      unit_ ? "call optimizer.step() after backward, not between forward and backward."
            : "replace the in-place operation (add_, relu_, …) with one that returns a result.");
}

void KeptTensor::release() {
  if (counted_) saved_activations::remove(std::exchange(counted_, nullptr));
  data_.reset();  // before the count changes, or the unit would seem viewed
  if (flat_) --std::exchange(flat_, nullptr)->saved;
  unit_.reset();
}

}  // namespace fsdp::shard
