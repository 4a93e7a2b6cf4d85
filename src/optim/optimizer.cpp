// What all optimizers share: which range of which flat belongs to which group, states that are
// allocated at their first use, and the beginning and end of an update. Calls take the model's
// lock (shard/model.h), which guards the states, too: memory() reads them.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>

#include "base/format.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "optim/require.h"
#include "shard/model.h"
#include "shard/on_disk.h"
#include "shard/update.h"

namespace fsdp {

using optim::require;

ParamGroup no_decay() {
  return {
      .where = [](const std::string&, const at::Tensor& parameter) { return parameter.dim() <= 1; },
      .norms = true,
      .weight_decay = 0.0};
}

// The optimizer's data of one flat. The pieces are made once. Gradients are looked up at every
// step: a reference kept here would keep their memory after zero_grad.
//
// Parameters with the same updates so far share a line: one count of updates, and pieces that span
// them. A parameter that is frozen or unfrozen while others aren't begins a line of its own.
struct Optimizer::Entry {
  Entry(const shard::Flat& of, int64_t at) : flat(of), first(at), line(of.parameters().size()) {}

  const shard::Flat& flat;
  const int64_t first;       // its place in counts_, which has room for a line per parameter
  std::vector<size_t> line;  // per parameter
  std::vector<int64_t> steps = {0};  // per line; unused while capturable: see counts_
  std::vector<at::Tensor> states;    // empty before the first update
  std::vector<Piece> pieces;
  // The tensors and parameters the pieces were made from.
  at::Tensor master, shard, rest;
  std::vector<bool> trained;

  void forget_pieces() {
    pieces.clear();
    master.reset();
    shard.reset();
    rest.reset();
  }

  // Per line: whether a parameter of it is trained.
  std::vector<bool> trained_lines() const {
    std::vector<bool> lines(steps.size());
    for (size_t p = 0; p < line.size(); ++p)
      if (trained[p]) lines[line[p]] = true;
    return lines;
  }
};

namespace {

std::vector<bool> trained_parameters(const shard::Flat& flat) {
  std::vector<bool> trained;
  for (const auto& parameter : flat.parameters())
    trained.push_back(parameter.handle.requires_grad());
  return trained;
}

// Bytes of the states, without those on disk.
int64_t in_memory(const shard::Flat& flat, const std::vector<at::Tensor>& states) {
  int64_t bytes = 0;
  for (const auto& state : states) bytes += static_cast<int64_t>(state.nbytes());
  return states.empty() ? 0 : bytes - shard::state_bytes_away(flat);
}

std::map<std::string, at::Tensor> by_name(const std::vector<std::string>& names,
                                          const std::vector<at::Tensor>& states) {
  std::map<std::string, at::Tensor> map;
  for (size_t i = 0; i < states.size(); ++i) map[names[i]] = states[i];
  return map;
}

}  // namespace

Optimizer::Optimizer(const Sharded& sharded, std::vector<ParamGroup> groups, double lr,
                     double weight_decay, std::vector<std::string> state_names)
    : model_(shard::model_of(sharded)),
      wanted_(std::move(groups)),
      state_names_(std::move(state_names)) {
  const auto model = model_->lock();
  groups_.push_back({lr, weight_decay, {}});
  for (const auto& group : wanted_)
    groups_.push_back({group.lr.value_or(lr), group.weight_decay.value_or(weight_decay), {}});
  for (size_t i = 0; i < groups_.size(); ++i) {
    const auto field = i == 0 ? std::string() : formatted("groups[{}].", i - 1);
    require(groups_[i].lr >= 0, "optimizer", field + "lr", groups_[i].lr, "0 or more",
            "3e-4 is usual; set maximize = true to maximize.");
    require(groups_[i].weight_decay >= 0, "optimizer", field + "weight_decay",
            groups_[i].weight_decay, "0 or more", "0 turns it off; 0.1 is usual.");
    if (i > 0 && !wanted_[i - 1].where && !wanted_[i - 1].norms)
      throw Error(formatted("optimizer: groups[{}] selects no parameters.", i - 1),
                  "set its `where` or `norms`.");
  }
  const auto flats = shard::trainable_flats(*model);
  if (flats.empty())
    throw Error("the optimizer's model has no trainable parameters.",
                "set requires_grad on its parameters before creating the optimizer.");
  for (const auto* flat : flats) {
    const auto trained = trained_parameters(*flat);
    for (size_t p = 0; p < trained.size(); ++p)
      if (trained[p])
        groups_[group_of(*flat, p)].parameters.push_back(flat->parameters()[p].name());
  }
  shard::attach_optimizer(
      *model, this, [this] { return state_bytes(); },
      [this] {
        int64_t bytes = 0;
        for (const auto& [flat, known] : entries_)
          if (shard::on_host(*flat)) bytes += in_memory(*flat, known->states);
        return bytes;
      });
}

Optimizer::~Optimizer() {
  shard::detach_optimizer(*model_->lock(), this);
}

void Optimizer::step() {
  const auto model = model_->lock();
  if (shard::live(model_) != model_)
    throw Error("the model was sharded as a part of a larger one after its optimizer was created.",
                "create the optimizer after the last call of fully_shard.");
  at::NoGradGuard no_grad;
  const at::Tensor factor = shard::begin_update(*model);
  const bool skipped =
      factor.defined() && factor.device().is_cpu() && !std::isfinite(factor.item<float>());
  if (!skipped) {
    const auto host_flats = shard::host_flats(*model);
    // This finds out that the disk is too small before anything is updated.
    for (const auto* flat : host_flats)
      if (flat->grad.defined()) refresh(entry(*flat));
    update_on_device(*model, factor);
    const auto host_factor =
        host_flats.empty() ? shard::HostFactor{} : shard::bring_factor(*model, factor);
    for (size_t i = 0; i < host_flats.size(); ++i)
      if (host_flats[i]->grad.defined() && !shard::updated_in_backward(*host_flats[i]))
        update_on_host(*model, *host_flats[i], i, host_factor);
  }
  shard::end_update(*model, /*shards_written=*/true);
}

void Optimizer::step_in_backward() {
  const auto model = model_->lock();
  const auto flats = shard::host_flats(*model);
  shard::update_in_backward(*model, [this, flats](shard::Engine& engine, shard::Flat& flat) {
    at::NoGradGuard no_grad;
    const auto place = std::find(flats.begin(), flats.end(), &flat) - flats.begin();
    update_on_host(engine, flat, static_cast<size_t>(place), {});
  });
}

// Adds the flat's pieces to an update.
void Optimizer::add(const shard::Flat& flat, Update& to) {
  Entry& known = entry(flat);
  refresh(known);
  if (!to.counts.defined()) {
    const auto lines = known.trained_lines();
    for (size_t i = 0; i < lines.size(); ++i)
      if (lines[i]) ++known.steps[i];
  }
  for (const auto& piece : known.pieces) {
    to.pieces.push_back(piece);
    to.pieces.back().grad = flat.grad;
    to.pieces.back().step = known.steps[static_cast<size_t>(piece.count - known.first)];
  }
}

// All flats at once, except those that are copied to the device one by one.
void Optimizer::update_on_device(shard::Engine& model, const at::Tensor& factor) {
  const auto run = [&](const Update& what) {
    RECORD_USER_SCOPE(shard::kUpdateLabel);
    prepare(what)();
  };
  Update what{.factor = factor, .rates = rates_, .counts = counts_};
  for (auto* flat : shard::trainable_flats(model))
    if (flat->grad.defined() && !flat->host) add(*flat, what);
  if (!what.pieces.empty()) run(what);
  const shard::Flat* before[2] = {nullptr, nullptr};
  for (auto* flat : shard::visiting_flats(model)) {
    if (!flat->grad.defined()) continue;
    if (before[0]) before[0]->settle();  // at most two at once, or all might be on the device
    before[0] = std::exchange(before[1], flat);
    shard::update_on_visit(model, *flat, [&] {
      Update one{.factor = factor, .rates = rates_, .counts = counts_};
      add(*flat, one);
      run(one);
    });
    entry(*flat).forget_pieces();  // they would keep the copies on the device
  }
}

// Flats in host memory are updated there, one by one, in a thread of their own.
void Optimizer::update_on_host(shard::Engine& model, shard::Flat& flat, size_t place,
                               const shard::HostFactor& factor) {
  flat.await_update();
  Update one{.factor = factor.value};
  add(flat, one);
  shard::update_on_host(model, flat, place, factor, prepare(one));
}

void Optimizer::zero_grad(bool set_to_none) {
  shard::zero_gradients(*model_->lock(), set_to_none);
}

double Optimizer::lr(size_t group) const {
  const auto model = model_->lock();
  return groups_.at(group).lr;
}

void Optimizer::set_lr(double lr) {
  const auto model = model_->lock();
  for (size_t i = 0; i < groups_.size(); ++i)
    if (i == 0 || !wanted_[i - 1].lr) set_lr(lr, i);
}

void Optimizer::set_lr(double lr, size_t group) {
  const auto model = model_->lock();
  require(lr >= 0, "set_lr", "lr", lr, "0 or more", "3e-4 is usual.");
  require(group < groups_.size(), "set_lr", "group", group, "one of groups()",
          "0 is the default group, 1 the first of the options' groups.");
  if (std::exchange(groups_[group].lr, lr) != lr) write_rate(group, 0, lr);
}

void Optimizer::set_weight_decay(double weight_decay, size_t group) {
  const auto model = model_->lock();
  require(weight_decay >= 0, "set_weight_decay", "weight_decay", weight_decay, "0 or more",
          "0 turns it off.");
  require(group < groups_.size(), "set_weight_decay", "group", group, "one of groups()",
          "0 is the default group, 1 the first of the options' groups.");
  if (std::exchange(groups_[group].weight_decay, weight_decay) != weight_decay)
    write_rate(group, 1, weight_decay);
}

void Optimizer::write_rate(size_t group, int64_t which, double value) {
  if (!capturable()) return;
  at::NoGradGuard no_grad;
  rates_.select(0, static_cast<int64_t>(group)).select(0, which).fill_(value);
}

void Optimizer::set_capturable(bool on) {
  const auto model = model_->lock();
  if (on == capturable()) return;
  shard::counts_moved(*model);
  at::NoGradGuard no_grad;
  const auto on_host = at::TensorOptions().dtype(at::kDouble);
  if (!on) {
    for (const auto& [flat, known] : entries_) known->steps = line_steps(*known);
    rates_.reset();
    counts_.reset();
    return;
  }
  auto rates = at::empty({static_cast<int64_t>(groups_.size()), 2}, on_host);
  double* at = rates.mutable_data_ptr<double>();
  for (const auto& group : groups_) {
    *at++ = group.lr;
    *at++ = group.weight_decay;
  }
  int64_t parameters = 0;
  for (const auto* flat : shard::all_flats(*model)) parameters += std::ssize(flat->parameters());
  auto counts = at::zeros({parameters}, on_host);
  for (const auto& [flat, known] : entries_)
    std::copy(known->steps.begin(), known->steps.end(),
              counts.mutable_data_ptr<double>() + known->first);
  rates_ = rates.to(model_->device());
  counts_ = counts.to(model_->device());
}

std::map<std::string, at::Tensor> Optimizer::state(const shard::Flat& flat) const {
  const auto model = model_->lock();
  const auto found = entries_.find(&flat);
  if (found == entries_.end()) return {};
  flat.await_update();
  shard::bring_states(flat);
  return by_name(state_names_, found->second->states);
}

std::vector<int64_t> Optimizer::line_steps(const Entry& known) const {
  if (!capturable() || shard::on_host(known.flat)) return known.steps;
  const auto count = std::ssize(known.steps);
  const auto counts = counts_.narrow(0, known.first, count).to(at::kCPU);
  const double* begin = counts.const_data_ptr<double>();
  return {begin, begin + count};
}

std::vector<int64_t> Optimizer::steps_of_parameters(const shard::Flat& flat) const {
  const auto model = model_->lock();
  std::vector<int64_t> steps(flat.parameters().size());
  if (const auto found = entries_.find(&flat); found != entries_.end()) {
    const auto lines = line_steps(*found->second);
    for (size_t p = 0; p < steps.size(); ++p) steps[p] = lines[found->second->line[p]];
  }
  return steps;
}

int64_t Optimizer::steps(const shard::Flat& flat) const {
  const auto all = steps_of_parameters(flat);
  return all.empty() ? 0 : *std::max_element(all.begin(), all.end());
}

std::map<std::string, at::Tensor> Optimizer::restore(const shard::Flat& flat, int64_t steps) {
  return restore(flat, std::vector<int64_t>(flat.parameters().size(), steps));
}

std::map<std::string, at::Tensor> Optimizer::restore(const shard::Flat& flat,
                                                     const std::vector<int64_t>& steps) {
  const auto model = model_->lock();
  for (const int64_t count : steps)
    require(count >= 0, "optimizer restore", "steps", count, "0 or more",
            "it is the number of updates the states have had.");
  if (!flat.shard.defined())
    throw Error("optimizer states were restored for a model without values.",
                "call sharded.materialize(device) before loading a checkpoint.");
  flat.await_update();
  Entry& known = entry(flat);
  refresh(known);
  shard::bring_states(flat);
  known.forget_pieces();
  known.steps.clear();
  for (size_t p = 0; p < steps.size(); ++p) {
    const auto same = std::find(known.steps.begin(), known.steps.end(), steps[p]);
    known.line[p] = static_cast<size_t>(same - known.steps.begin());
    if (same == known.steps.end()) known.steps.push_back(steps[p]);
  }
  if (capturable())
    for (size_t i = 0; i < known.steps.size(); ++i)
      counts_.select(0, known.first + static_cast<int64_t>(i))
          .fill_(static_cast<double>(known.steps[i]));
  refresh(known);
  return by_name(state_names_, known.states);
}

int64_t Optimizer::state_bytes() const {
  const auto model = model_->lock();
  int64_t bytes = 0;
  for (const auto& [flat, known] : entries_) bytes += in_memory(*flat, known->states);
  return bytes;
}

Optimizer::Entry& Optimizer::entry(const shard::Flat& flat) {
  auto& known = entries_[&flat];
  if (!known) {
    int64_t first = 0;
    for (const auto* other : shard::all_flats(*model_->lock())) {
      if (other == &flat) break;
      first += std::ssize(other->parameters());
    }
    known = std::make_unique<Entry>(flat, first);
  }
  return *known;
}

size_t Optimizer::group_of(const shard::Flat& flat, size_t parameter) const {
  const auto& asked = flat.parameters()[parameter];
  for (size_t i = 0; i < wanted_.size(); ++i) {
    if (wanted_[i].norms && asked.is_norm) return i + 1;
    if (!wanted_[i].where) continue;
    for (const auto& name : asked.names)
      if (wanted_[i].where(name, asked.handle)) return i + 1;
  }
  return 0;
}

// From now on the trained parameters of a line are counted apart from the others.
void Optimizer::split_lines(Entry& entry) const {
  const size_t before = entry.steps.size();
  for (size_t line = 0; line < before; ++line) {
    std::vector<size_t> rest;
    bool some_trained = false;
    for (size_t p = 0; p < entry.line.size(); ++p) {
      if (entry.line[p] != line) continue;
      if (entry.trained[p])
        some_trained = true;
      else
        rest.push_back(p);
    }
    if (!some_trained || rest.empty()) continue;
    for (const size_t p : rest) entry.line[p] = entry.steps.size();
    if (capturable()) {
      at::NoGradGuard no_grad;
      counts_.select(0, entry.first + std::ssize(entry.steps))
          .copy_(counts_.select(0, entry.first + static_cast<int64_t>(line)));
    }
    entry.steps.push_back(entry.steps[line]);
  }
}

// Allocates the states and makes the pieces, unless they exist and match the flat's tensors.
void Optimizer::refresh(Entry& entry) const {
  const auto& flat = entry.flat;
  auto trained = trained_parameters(flat);
  if (!entry.pieces.empty() && entry.master.is_same(flat.master) &&
      entry.shard.is_same(flat.shard) && entry.rest.is_same(flat.rest) && entry.trained == trained)
    return;
  if (entry.states.empty())
    entry.states = shard::make_states(*model_->lock(), flat, state_names_.size());
  entry.trained = std::move(trained);
  split_lines(entry);

  entry.pieces.clear();
  for (const auto& stretch : stretches_of(entry)) {
    const auto view = [&](const at::Tensor& tensor) {
      return tensor.narrow(0, stretch.begin, stretch.end - stretch.begin);
    };
    Piece piece{.begin = stretch.begin,
                .group = stretch.group,
                .count = entry.first + static_cast<int64_t>(stretch.line)};
    if (flat.master.defined()) piece.master = view(flat.master);
    if (flat.rest.defined()) piece.rest = view(flat.rest);
    if (!flat.shard.is_same(flat.master)) piece.low = view(flat.shard);
    for (const auto& state : entry.states) piece.states.push_back(view(state));
    entry.pieces.push_back(std::move(piece));
  }
  entry.master = flat.master;
  entry.shard = flat.shard;
  entry.rest = flat.rest;
}

// Adjacent parameters of one group and line are one stretch, including the padding between them.
// Frozen parameters are left out.
std::vector<Optimizer::Stretch> Optimizer::stretches_of(const Entry& entry) const {
  const auto& flat = entry.flat;
  const auto& trained = entry.trained;
  std::vector<Stretch> stretches;
  auto missing = entry.trained_lines();
  bool joined = false;  // nothing frozen is between the last stretch and this parameter
  for (size_t p = 0; p < trained.size(); ++p) {
    const auto slice = flat.layout().slice(p, flat.rank());
    if (slice.numel == 0) continue;
    const size_t group = group_of(flat, p);
    const int64_t end = slice.offset + slice.numel;
    const size_t line = entry.line[p];
    if (trained[p] && joined && stretches.back().group == group && stretches.back().line == line)
      stretches.back().end = end;
    else if (trained[p])
      stretches.push_back({slice.offset, end, group, line});
    joined = trained[p];
    if (joined) missing[line] = false;
  }
  // A rank without a part of a line counts its updates like the others.
  for (size_t line = 0; line < missing.size(); ++line)
    if (missing[line]) stretches.push_back({0, 0, 0, line});
  return stretches;
}

}  // namespace fsdp
