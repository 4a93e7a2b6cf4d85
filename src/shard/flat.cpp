#include "shard/flat.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>

#include "base/format.h"
#include "kernels/split.h"
#include "kernels/wire.h"
#include "shard/offload.h"
#include "shard/on_disk.h"
#include "shard/tape_hook.h"
#include "shard/unit.h"

namespace fsdp::shard {
namespace {

Extent extent_of(const Parameter& p) {
  int64_t numel = 1;
  for (int64_t size : p.sizes) numel *= size;
  int64_t outer = p.order.empty() ? 1 : p.sizes[p.order[0]];
  return {numel, numel == 0 ? 1 : numel / outer};
}

std::vector<Extent> extents_of(const std::vector<Parameter>& parameters) {
  std::vector<Extent> extents;
  for (const Parameter& p : parameters) extents.push_back(extent_of(p));
  return extents;
}

}  // namespace

void describe_memory(Parameter& p) {
  const at::Tensor& t = p.handle;
  p.sizes = t.sizes().vec();
  bool dense = t.is_meta() || t.is_non_overlapping_and_dense();
  p.order.resize(t.dim());
  std::iota(p.order.begin(), p.order.end(), 0);
  if (dense && !t.is_contiguous())
    std::stable_sort(p.order.begin(), p.order.end(), [&](int64_t a, int64_t b) {
      return t.stride(a) == t.stride(b) ? t.size(a) > t.size(b) : t.stride(a) > t.stride(b);
    });
  p.strides.resize(t.dim());
  int64_t stride = 1;
  for (size_t i = p.order.size(); i-- > 0;) {
    p.strides[p.order[i]] = stride;
    stride *= std::max<int64_t>(1, p.sizes[p.order[i]]);
  }
}

Flat::Flat(Unit& unit, std::vector<Parameter> parameters, int world, int rank, Cut cut,
           const Dtypes& dtypes, at::Device device)
    : unit_(unit),
      parameters_(std::move(parameters)),
      layout_(extents_of(parameters_), world, cut,
              dtypes.gather_wire == Wire::PLAIN ? 0 : kernels::kWireBlock),
      rank_(rank),
      dtypes_(dtypes),
      device_(device),
      tag_{StorageTag::kParameters, this},
      gradient_tag_{StorageTag::kGradients, this},
      master_tag_{StorageTag::kMasters, this},
      versions_(parameters_.size()) {
  storage_ = make_storage(
      full_bytes(), device, &tag_,
      formatted("fsdp: unit \"{}\": this parameter is sharded, and its memory was read directly "
                "(data_ptr, torch::save, an accessor, or a view of it that was taken before an "
                "update).\n  HINT: use sharded.full_tensor(name), full_state_dict() or "
                "summon_full_params().",
                unit.name));
  gradient_storage_ =
      make_storage(full_bytes(), device, &gradient_tag_,
                   formatted("fsdp: unit \"{}\": this gradient is sharded.\n  HINT: use "
                             "sharded.full_grad(name), or shard_of(name).local_grad.",
                             unit.name));
  coming.resize(parameters_.size());
  arrived.resize(parameters_.size());
  filled.resize(parameters_.size());
  expected.resize(parameters_.size());
  hooked.resize(parameters_.size());
  if (const TapeHooks* hooks = tape_hooks())
    for (const Parameter& p : parameters_) unit.watched |= hooks->watches(p.handle);
}

Flat::~Flat() {
  const std::string message = formatted(
      "fsdp: unit \"{}\": its sharded model is gone.\n  HINT: keep the module alive as long as its "
      "tensors are used.",
      unit_.name);
  orphan(*storage_, message);
  orphan(*gradient_storage_, message);
  if (master_storage_) orphan(*master_storage_, message);
  for (Parameter& p : parameters_) {
    if (!p.handle.has_storage() || p.handle.storage().unsafeGetStorageImpl() != storage_.get())
      continue;
    set_key(p.handle, false);
    p.handle.mutable_grad() = at::Tensor();
  }
}

void Flat::expect_none() {
  std::fill(expected.begin(), expected.end(), 0);
  ++expectations;
}

int64_t Flat::full_bytes() const {
  return layout_.full_numel() * element_bytes(dtypes_.param);
}

int64_t Flat::gather_message_bytes() const {
  if (gather_wire() != Wire::PLAIN)
    return kernels::wire_bytes(layout_.shard_numel(), gather_wire());
  return layout_.shard_numel() * element_bytes(param_dtype());
}

int64_t Flat::reduce_message_bytes() const {
  if (reduce_wire() != Wire::PLAIN)
    return kernels::wire_bytes(layout_.shard_numel(), reduce_wire());
  return layout_.shard_numel() * element_bytes(reduce_dtype());
}

bool Flat::trainable() const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [](const Parameter& p) { return p.handle.requires_grad(); });
}

// --- the master ---

at::TensorOptions Flat::master_options() const {
  at::Device where = updated_on_host(*this) ? shard.device() : device_;
  return at::TensorOptions().dtype(dtypes_.master).device(where);
}

void Flat::allocate_master() {
  int64_t numel = layout_.shard_numel();
  if (dtypes_.split)
    rest = at::zeros({numel}, master_options().dtype(at::kShort));
  else
    master = dtypes_.master == dtypes_.param ? shard : at::zeros({numel}, master_options());
}

at::Tensor Flat::read_master() const {
  settle();
  bring_master(*this);
  return rest.defined() ? kernels::join_float(shard.to(rest.device()), rest) : master;
}

at::Tensor Flat::edit_master() {
  settle();
  bring_master(*this);
  if (!rest.defined()) return master;
  uint32_t version =
      parameters_[0].handle.unsafeGetTensorImpl()->version_counter().current_version();
  // An edit that was never settled is discarded once the parameters have changed.
  if (!edited_.defined() || edited_version_ != version) edited_ = read_master();
  edited_version_ = version;
  return edited_;
}

void Flat::settle_master() {
  settle();
  bring_master(*this);
  if (edited_.defined()) {
    at::Tensor high = shard.to(rest.device());  // the shard itself, unless only it is on the host
    kernels::split_float(std::exchange(edited_, at::Tensor()), high, rest);
    if (!high.is_same(shard)) shard.copy_(high);
  } else if (master.defined() && !shard.is_same(master)) {
    shard.copy_(master);
  }
}

void Flat::join_master() {
  if (host && !host->directory.empty())
    throw Error(
        unit_.label() + ": torch::optim can't update masters on disk.",
        "use fsdp::AdamW or fsdp::SGD with offload.directory, or leave offload.directory empty.");
  if (!rest.defined()) return;
  master = read_master();
  rest.reset();
  dtypes_.split = false;
}

// --- masters that others write ---

void Flat::hand_out() {
  join_master();
  if (!master_storage_) {
    master_storage_ = make_storage(master.nbytes(), master.device(), &master_tag_, "");
    shard::point_at(*master_storage_, master.data_ptr());
  }
  leaves.resize(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (leaves[i].defined() || !parameters_[i].handle.requires_grad()) continue;
    Slice slice = layout_.slice(i, rank_);
    leaves[i] = tensor_over(master_storage_, dtypes_.master, {slice.numel}, {1}, slice.offset);
    leaves[i].set_requires_grad(true);
    set_key(leaves[i], true);
  }
}

void Flat::own_the_master() {
  if (!window.defined() || !master.is_same(shard)) return;
  master = shard.clone();
  if (master_storage_) shard::point_at(*master_storage_, master.data_ptr());
}

void Flat::show_gradients() {
  for (size_t i = 0; i < leaves.size(); ++i)
    if (leaves[i].defined())
      leaves[i].mutable_grad() = grad.defined() && parameters_[i].handle.requires_grad()
                                     ? part_of(i, grad).variable_data()  // not a view to autograd
                                     : at::Tensor();
}

// --- the module's handles ---

void Flat::bind(size_t parameter) {
  const Parameter& p = parameters_[parameter];
  become(p.handle,
         tensor_over(storage_, dtypes_.param, p.sizes, p.strides, layout_.offset(parameter)));
  set_key(p.handle, true);
}

void Flat::rename(const at::Tensor& handle, std::vector<std::string> names) {
  for (Parameter& p : parameters_)
    if (p.handle.is_same(handle)) p.names = std::move(names);
}

void Flat::point_at(const at::Tensor& full) {
  shard::point_at(*storage_, full.data_ptr());
}

void Flat::take_away() {
  shard::take_away(*storage_);
}

void Flat::set_keys(bool on) {
  for (const Parameter& p : parameters_) set_key(p.handle, on || p.linear);
}

bool Flat::viewed() const {
  auto uses = static_cast<int64_t>(storage_.use_count());
  return uses > 1 + static_cast<int64_t>(parameters_.size()) + saved.load();
}

std::string Flat::moved() const {
  for (const Parameter& p : parameters_)
    if (!p.handle.has_storage() || p.handle.storage().unsafeGetStorageImpl() != storage_.get())
      return p.name();
  return "";
}

void Flat::remember_versions() {
  for (size_t i = 0; i < parameters_.size(); ++i)
    versions_[i] = parameters_[i].handle.unsafeGetTensorImpl()->version_counter().current_version();
}

bool Flat::was_written(size_t parameter) const {
  return parameters_[parameter].handle.unsafeGetTensorImpl()->version_counter().current_version() !=
         versions_[parameter];
}

std::string Flat::written() const {
  for (size_t i = 0; i < parameters_.size(); ++i)
    if (was_written(i)) return parameters_[i].name();
  return "";
}

size_t Flat::index_of(const at::Tensor& handle) const {
  size_t i = 0;
  while (i < parameters_.size() && !parameters_[i].handle.is_same(handle)) ++i;
  return i;
}

void Flat::replace_linear(size_t parameter, LinearFunction function) {
  Parameter& changed = parameters_[parameter];
  changed.linear = std::move(function);
  if (changed.linear) set_key(changed.handle, true);
}

void Flat::bump_versions() {
  for (const Parameter& p : parameters_) p.handle.unsafeGetTensorImpl()->bump_version();
}

at::Tensor Flat::view_of(size_t parameter, const at::Tensor& full) const {
  const Parameter& p = parameters_[parameter];
  return full.as_strided(p.sizes, p.strides, full.storage_offset() + layout_.offset(parameter));
}

at::Tensor Flat::part_of(size_t parameter, const at::Tensor& shard) const {
  Slice slice = layout_.slice(parameter, rank_);
  return shard.narrow(0, slice.offset, slice.numel);
}

void Flat::keep_part(size_t parameter, const at::Tensor& whole, const at::Tensor& shard) const {
  Slice slice = layout_.slice(parameter, rank_);
  if (slice.numel == 0) return;
  at::Tensor flat = whole.permute(parameters_[parameter].order).reshape({-1});
  shard.narrow(0, slice.offset, slice.numel).copy_(flat.narrow(0, slice.begin, slice.numel));
}

std::vector<std::pair<int64_t, int64_t>> Flat::gaps() const {
  std::vector<std::pair<int64_t, int64_t>> gaps;
  int64_t at = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (layout_.offset(i) > at) gaps.emplace_back(at, layout_.offset(i) - at);
    at = layout_.offset(i) + layout_.numel(i);
  }
  if (layout_.full_numel() > at) gaps.emplace_back(at, layout_.full_numel() - at);
  return gaps;
}

void Flat::take(GradientSlot* taken) {
  slot = taken;
  auto [known, fresh] = slot_views_.try_emplace(taken);
  SlotViews& views = known->second;
  if (fresh) {
    int64_t bytes = layout_.full_numel() * element_bytes(slot_dtype());
    views.full = taken->bytes.narrow(0, 0, bytes).view(slot_dtype());
    for (size_t i = 0; i < parameters_.size(); ++i)
      views.parameters.push_back(view_of(i, views.full));
    for (auto [from, count] : gaps()) views.gaps.push_back(views.full.narrow(0, from, count));
  }
  views_ = &views;
  bool holds = taken == own_slot_.get() && grad.defined();  // new gradients are added to it
  if (!holds)
    for (const at::Tensor& gap : views.gaps) gap.zero_();
  std::fill(filled.begin(), filled.end(), holds);
}

void Flat::move(GradientSlot* to) {
  at::Tensor before = slot_view();
  auto kept = filled;
  take(to);
  slot_view().copy_(before);
  filled = std::move(kept);
}

bool Flat::alone() const {
  return unit_.group->shard_size == 1 && unit_.group->replicate_size == 1;
}

GradientSlot* Flat::own_slot() {
  if (!own_slot_) {
    if (!grad_memory.defined())
      grad_memory = at::empty({layout_.shard_numel()},
                              at::TensorOptions().device(device_).dtype(grad_dtype()));
    own_slot_ = std::make_unique<GradientSlot>();
    own_slot_->bytes = grad_memory.view(at::kByte);
    own_slot_->ring = false;
  }
  return own_slot_.get();
}

void Flat::release_gradient_memory() {
  views_ = nullptr;
  slot_views_.clear();
  own_slot_.reset();
  if (!gradient_on_host(*this)) grad_memory.reset();  // pinned memory is expensive to allocate
}

const at::Tensor& Flat::slot_view() const {
  return views_->full;
}

const at::Tensor& Flat::gradient_view(size_t parameter) const {
  return views_->parameters[parameter];
}

at::Tensor Flat::stand_in(size_t parameter) const {
  const Parameter& p = parameters_[parameter];
  at::Tensor tensor =
      tensor_over(gradient_storage_, dtypes_.param, p.sizes, p.strides, layout_.offset(parameter));
  set_key(tensor, true);
  return tensor;
}

bool Flat::is_stand_in(const at::Tensor& gradient) const {
  return gradient.defined() && gradient.has_storage() &&
         gradient.storage().unsafeGetStorageImpl() == gradient_storage_.get();
}

Flat* flat_of(const at::Tensor& tensor) {
  StorageTag* tag = tensor.defined() && tensor.has_storage() ? tag_of(tensor) : nullptr;
  const bool ours = tag && tag->kind == StorageTag::kParameters;
  return ours ? static_cast<Flat*>(tag->owner) : nullptr;
}

}  // namespace fsdp::shard
