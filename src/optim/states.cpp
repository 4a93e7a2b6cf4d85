#include "optim/states.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "base/format.h"
#include "fsdp/error.h"
#include "optim/require.h"
#include "shard/model.h"
#include "shard/offload.h"
#include "shard/on_disk.h"
#include "shard/update.h"

namespace fsdp::optim {

// The optimizer's data of one flat. The pieces are made once. Gradients are looked up at every
// step: a reference kept here would keep their memory after zero_grad.
//
// Parameters with the same updates so far share a line: one count of updates, and pieces that span
// them. A parameter that is frozen or unfrozen while others aren't begins a line of its own.
struct States::Entry {
  Entry(const shard::Flat& of, int64_t at) : flat(of), first(at), line(of.parameters().size()) {}

  const shard::Flat& flat;
  const int64_t first;       // its place in counts_, which has room for a line per parameter
  std::vector<size_t> line;  // per parameter
  std::vector<int64_t> steps = {0};  // per line; unused while capturable: see counts_
  std::vector<at::Tensor> slots;     // empty before the first update
  std::vector<std::vector<Run>> runs;  // of each slot
  std::vector<Optimizer::Piece> pieces;
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

// With a file, every slot has memory for the whole shard, because files are laid out beforehand.
bool on_disk(const shard::Flat& flat) {
  return flat.host && !flat.host->directory.empty();
}

// Where a place in the shard is in a slot.
template <typename Runs>
int64_t place_in(const Runs& runs, int64_t place) {
  for (const auto& run : runs)
    if (run.begin <= place && place < run.end) return run.at + place - run.begin;
  return 0;  // of an empty stretch
}

// Bytes of the slots, without those on disk.
int64_t in_memory(const shard::Flat& flat, const std::vector<at::Tensor>& slots) {
  int64_t bytes = 0;
  for (const auto& slot : slots) bytes += static_cast<int64_t>(slot.nbytes());
  return slots.empty() ? 0 : bytes - shard::state_bytes_away(flat);
}

}  // namespace

States::States(std::shared_ptr<shard::Model> model, std::vector<ParamGroup> wanted, double lr,
               double weight_decay, Names names)
    : model_(std::move(model)), wanted_(std::move(wanted)), names_(std::move(names)) {
  const auto engine = model_->lock();
  groups.push_back({lr, weight_decay, {}});
  for (const auto& group : wanted_)
    groups.push_back({group.lr.value_or(lr), group.weight_decay.value_or(weight_decay), {}});
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto field = i == 0 ? std::string() : formatted("groups[{}].", i - 1);
    require(groups[i].lr >= 0, "optimizer", field + "lr", groups[i].lr, "0 or more",
            "3e-4 is usual; set maximize = true to maximize.");
    require(groups[i].weight_decay >= 0, "optimizer", field + "weight_decay",
            groups[i].weight_decay, "0 or more", "0 turns it off; 0.1 is usual.");
    if (i > 0 && !wanted_[i - 1].where && !wanted_[i - 1].norms)
      throw Error(formatted("optimizer: groups[{}] selects no parameters.", i - 1),
                  "set its `where` or `norms`.");
  }
  const auto flats = shard::trainable_flats(*engine);
  if (flats.empty())
    throw Error("the optimizer's model has no trainable parameters.",
                "set requires_grad on its parameters before creating the optimizer.");
  for (const auto* flat : flats) {
    const auto trained = trained_parameters(*flat);
    for (size_t p = 0; p < trained.size(); ++p)
      if (trained[p]) groups[group_of(*flat, p)].parameters.push_back(flat->parameters()[p].name());
  }
}

States::~States() = default;

bool States::own_lr(size_t group) const {
  return group > 0 && wanted_[group - 1].lr.has_value();
}

// Adds the flat's pieces to an update.
void States::add(const shard::Flat& flat, Optimizer::Update& to) {
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

void States::write_rate(size_t group, int64_t which, double value) {
  if (!capturable()) return;
  at::NoGradGuard no_grad;
  rates_.select(0, static_cast<int64_t>(group)).select(0, which).fill_(value);
}

void States::set_capturable(bool on) {
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
  auto rates = at::empty({static_cast<int64_t>(groups.size()), 2}, on_host);
  double* at = rates.mutable_data_ptr<double>();
  for (const auto& group : groups) {
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

const std::vector<std::string>& States::names(const shard::Flat& flat, size_t parameter) const {
  return names_.size() == 1 ? names_.front() : names_[group_of(flat, parameter)];
}

std::vector<at::Tensor> States::slots(const shard::Flat& flat) const {
  const auto model = model_->lock();
  if (!entries_.contains(&flat)) return {};
  flat.await_update();
  shard::bring_states(flat);
  return slots_unread(flat);
}

std::vector<at::Tensor> States::slots_unread(const shard::Flat& flat) const {
  const auto model = model_->lock();
  const auto found = entries_.find(&flat);
  return found == entries_.end() ? std::vector<at::Tensor>() : found->second->slots;
}

at::Tensor States::spread(const shard::Flat& flat, size_t slot) const {
  const auto model = model_->lock();
  const at::Tensor memory = slots(flat)[slot];
  const auto& runs = entries_.at(&flat)->runs[slot];
  const int64_t numel = flat.layout().shard_numel();
  if (memory.numel() == numel) return memory;
  at::Tensor all = at::zeros({numel}, memory.options());
  for (const auto& run : runs)
    all.narrow(0, run.begin, run.end - run.begin)
        .copy_(memory.narrow(0, run.at, run.end - run.begin));
  return all;
}

at::Tensor States::part(const shard::Flat& flat, size_t parameter, size_t slot,
                        const at::Tensor& memory) const {
  const auto slice = flat.layout().slice(parameter, flat.rank());
  if (slice.numel == 0) return memory.narrow(0, 0, 0);
  return memory.narrow(0, place_in(entries_.at(&flat)->runs[slot], slice.offset), slice.numel);
}

std::vector<int64_t> States::line_steps(const Entry& known) const {
  if (!capturable() || shard::on_host(known.flat)) return known.steps;
  const auto count = std::ssize(known.steps);
  const auto counts = counts_.narrow(0, known.first, count).to(at::kCPU);
  const double* begin = counts.const_data_ptr<double>();
  return {begin, begin + count};
}

std::vector<int64_t> States::steps_of_parameters(const shard::Flat& flat) const {
  const auto model = model_->lock();
  std::vector<int64_t> steps(flat.parameters().size());
  if (const auto found = entries_.find(&flat); found != entries_.end()) {
    const auto lines = line_steps(*found->second);
    for (size_t p = 0; p < steps.size(); ++p) steps[p] = lines[found->second->line[p]];
  }
  return steps;
}

int64_t States::steps(const shard::Flat& flat) const {
  const auto all = steps_of_parameters(flat);
  return all.empty() ? 0 : *std::max_element(all.begin(), all.end());
}

std::vector<at::Tensor> States::restore(const shard::Flat& flat, int64_t steps) {
  return restore(flat, std::vector<int64_t>(flat.parameters().size(), steps));
}

std::vector<at::Tensor> States::restore(const shard::Flat& flat,
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
  return known.slots;
}

int64_t States::bytes(bool on_host_only) const {
  const auto model = model_->lock();
  int64_t bytes = 0;
  for (const auto& [flat, known] : entries_)
    if (!on_host_only || shard::on_host(*flat)) bytes += in_memory(*flat, known->slots);
  return bytes;
}

States::Entry& States::entry(const shard::Flat& flat) {
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

void States::prepare(const shard::Flat& flat) {
  refresh(entry(flat));
}

void States::forget_pieces(const shard::Flat& flat) {
  entry(flat).forget_pieces();
}

size_t States::group_of(const shard::Flat& flat, size_t parameter) const {
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
void States::split_lines(Entry& entry) const {
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
void States::refresh(Entry& entry) const {
  const auto& flat = entry.flat;
  auto trained = trained_parameters(flat);
  if (!entry.pieces.empty() && entry.master.is_same(flat.master) &&
      entry.shard.is_same(flat.shard) && entry.rest.is_same(flat.rest) && entry.trained == trained)
    return;
  if (entry.slots.empty()) make_slots(entry);
  entry.trained = std::move(trained);
  split_lines(entry);

  entry.pieces.clear();
  for (const auto& stretch : stretches_of(entry)) {
    const auto view = [&](const at::Tensor& tensor) {
      return tensor.narrow(0, stretch.begin, stretch.end - stretch.begin);
    };
    Optimizer::Piece piece{.begin = stretch.begin,
                           .group = stretch.group,
                           .count = entry.first + static_cast<int64_t>(stretch.line)};
    if (flat.master.defined()) piece.master = view(flat.master);
    if (flat.rest.defined()) piece.rest = view(flat.rest);
    if (!flat.shard.is_same(flat.master)) piece.low = view(flat.shard);
    const auto& names = names_[names_.size() == 1 ? 0 : stretch.group];
    for (size_t i = 0; i < std::min(names.size(), entry.slots.size()); ++i)
      piece.states.push_back(entry.slots[i].narrow(0, place_in(entry.runs[i], stretch.begin),
                                                   stretch.end - stretch.begin));
    entry.pieces.push_back(std::move(piece));
  }
  entry.master = flat.master;
  entry.shard = flat.shard;
  entry.rest = flat.rest;
}

// The stretches of the shard whose parameters have a state in the slot, including the padding
// between them.
std::vector<States::Run> States::runs_of(const shard::Flat& flat, size_t slot) const {
  std::vector<Run> runs;
  bool joined = false, all = true;
  for (size_t p = 0; p < flat.parameters().size(); ++p) {
    const bool has = names(flat, p).size() > slot;
    all = all && has;
    const auto slice = flat.layout().slice(p, flat.rank());
    if (slice.numel == 0) continue;
    const int64_t end = slice.offset + slice.numel;
    if (has && joined)
      runs.back().end = end;
    else if (has)
      runs.push_back({slice.offset, end, 0});
    joined = has;
  }
  if (all || on_disk(flat)) return {{0, flat.layout().shard_numel(), 0}};
  int64_t at = 0;
  for (auto& run : runs) {
    run.at = at;
    at += run.end - run.begin;
  }
  return runs;
}

void States::make_slots(Entry& entry) const {
  size_t count = 0;
  for (size_t p = 0; p < entry.line.size(); ++p)
    count = std::max(count, names(entry.flat, p).size());
  if (on_disk(entry.flat))  // the same for all flats of a file
    for (const auto& names : names_) count = std::max(count, names.size());
  std::vector<int64_t> sizes;
  entry.runs.clear();
  for (size_t i = 0; i < count; ++i) {
    entry.runs.push_back(runs_of(entry.flat, i));
    int64_t numel = 0;
    for (const auto& run : entry.runs.back()) numel += run.end - run.begin;
    sizes.push_back(numel);
  }
  entry.slots = shard::make_states(*model_->lock(), entry.flat, sizes);
}

// Adjacent parameters of one group and line are one stretch, including the padding between them.
// Frozen parameters are left out.
std::vector<States::Stretch> States::stretches_of(const Entry& entry) const {
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

}  // namespace fsdp::optim
