// Readable reports about a sharded model: the module tree with its units, and the memory by kind.
#include <algorithm>
#include <set>
#include <sstream>

#include "base/format.h"
#include "base/table.h"
#include "fsdp/fully_shard.h"
#include "shard/engine.h"
#include "shard/model.h"
#include "shard/offload.h"
#include "shard/on_disk.h"
#include "shard/saved_activations.h"
#include "shard/tree.h"

namespace fsdp {
namespace {

using shard::Flat;
using shard::live;
using shard::ModuleTree;

std::string dtype_text(at::ScalarType type) {
  std::string text = c10::toString(type);
  if (text == "Float") return "fp32";
  if (text == "BFloat16") return "bf16";
  if (text == "Half") return "fp16";
  if (text == "Double") return "fp64";
  std::transform(text.begin(), text.end(), text.begin(), ::tolower);
  return text;
}

std::string dtype_names(const shard::Unit& unit) {
  std::string text;
  std::set<std::string> seen;
  for (const auto& flat : unit.flats) {
    std::string one = dtype_text(flat->param_dtype());
    if (flat->param_dtype() != flat->master_dtype())
      one += formatted(" (master {})", dtype_text(flat->master_dtype()));
    if (!flat->trainable()) one += " frozen";
    if (seen.insert(one).second) text += (text.empty() ? "" : ", ") + one;
  }
  return text;
}

struct Line {
  std::string tree, unit, parameters, dtype, share;
};

// Consecutive modules that are alike (layers.1 … layers.30) are shown once.
bool alike(const ModuleTree& a, const ModuleTree& b) {
  if (a.view.type != b.view.type || a.view.numel != b.view.numel ||
      (a.unit == nullptr) != (b.unit == nullptr) || a.children.size() != b.children.size())
    return false;
  for (size_t i = 0; i < a.children.size(); ++i)
    if (!alike(a.children[i], b.children[i])) return false;
  return true;
}

double percent(int64_t part, int64_t all) {
  return all ? 100.0 * static_cast<double>(part) / static_cast<double>(all) : 0.0;
}

void draw(const ModuleTree& node, const std::string& label, const std::string& indent, int64_t all,
          std::vector<Line>& lines) {
  Line line{.tree = formatted("{}{} {}", indent, label, node.view.type)};
  if (node.unit) {
    line.unit = "unit";
    line.parameters = with_separators(node.unit->numel());
    line.dtype = dtype_names(*node.unit);
    line.share = formatted("{:.1f} %", percent(node.unit->numel(), all));
  }
  lines.push_back(line);
  for (size_t i = 0; i < node.children.size(); ++i) {
    const ModuleTree& child = node.children[i];
    if (child.view.numel == 0 && child.children.empty()) continue;
    size_t last = i;
    while (last + 1 < node.children.size() && alike(child, node.children[last + 1])) ++last;
    auto step = [](const ModuleTree& module) {
      return module.view.path.substr(module.view.path.rfind('.') + 1);
    };
    std::string text = step(child);
    if (last > i) text += " … " + step(node.children[last]);
    draw(child, text, indent + "  ", all, lines);
    i = last;
  }
}

std::string columns(const std::vector<Line>& lines) {
  auto width = [](const std::string& text) {  // characters, not bytes
    return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
  };
  size_t tree = 0, parameters = 0, share = 0;
  for (const Line& line : lines) {
    tree = std::max<size_t>(tree, width(line.tree));
    parameters = std::max<size_t>(parameters, line.parameters.size());
    share = std::max<size_t>(share, line.share.size());
  }
  std::stringstream out;
  for (const Line& line : lines) {
    std::string row = line.tree;
    if (!line.unit.empty()) {
      row += std::string(tree - width(line.tree) + 2, ' ') + line.unit + "  " +
             std::string(parameters - line.parameters.size(), ' ') + line.parameters + "  " +
             std::string(share - line.share.size(), ' ') + line.share + "  " + line.dtype;
    }
    out << row << "\n";
  }
  return out.str();
}

}  // namespace

std::string Sharded::describe() const {
  const shard::Locked model = shard::lock(*this);
  int64_t all = 0, padding = 0, root = 0;
  for (const auto& unit : model->units) {
    all += unit->numel();
    if (unit->root) root += unit->numel();
  }
  std::vector<Line> lines;
  for (const ModuleTree& tree : model->tree->children) draw(tree, "model", "", all, lines);
  std::stringstream out;
  out << columns(lines);

  // The layout is the same on every rank, so each can compute what the others hold.
  int64_t most = 0, least = INT64_MAX, shard_bytes = 0;
  std::set<std::string> meshes;
  for (const auto& unit : model->units) meshes.insert(unit->group->text);
  int ranks = 1;
  for (const auto& unit : model->units) ranks = std::max(ranks, unit->group->shard_size);
  for (int rank = 0; rank < ranks; ++rank) {
    int64_t held = 0;
    for (Flat* flat : model->flats())
      for (size_t i = 0; i < flat->parameters().size(); ++i)
        held += flat->layout().slice(i, rank % flat->layout().world()).numel *
                static_cast<int64_t>(c10::elementSize(flat->master_dtype()));
    most = std::max(most, held);
    least = std::min(least, held);
  }
  for (Flat* flat : model->flats()) {
    auto bytes = static_cast<int64_t>(c10::elementSize(flat->master_dtype()));
    shard_bytes += flat->layout().shard_numel() * bytes;
    padding += flat->layout().padding();
  }
  out << formatted("\n{} over", name(model->options.strategy));
  for (const std::string& mesh : meshes) out << " " << mesh;
  out << formatted(": {} parameters in {} unit{}\n", with_separators(all), model->units.size(),
                   model->units.size() == 1 ? "" : "s")
      << formatted(
             "each rank: {} of masters; parameters fill {} of it on the fullest rank, {} on the "
             "emptiest; padding {:.2f} %\n",
             human_bytes(static_cast<double>(shard_bytes)), human_bytes(static_cast<double>(most)),
             human_bytes(static_cast<double>(least)), all ? percent(padding, all + padding) : 0.0);
  if (model->units.size() > 1 && root * 2 > all)
    out << "WARNING: the root unit holds most of the model and stays gathered from forward to "
           "backward; wrap more modules.\n";
  if (model->units.size() == 1 && model->world().size() > 1)
    out << "NOTE: there is one unit, so the whole model is gathered at once. Set a wrap policy to "
           "divide it.\n";
  return out.str();
}

// --- memory ---

MemoryReport Sharded::memory() const {
  const shard::Locked model = shard::lock(*this);
  return model->memory();
}

std::string MemoryReport::table() const {
  Table table({{"kind", "kind", Table::kLeft}, {"bytes", "bytes", Table::kRight}});
  auto add = [&](const char* kind, int64_t bytes) {
    table.add({text(kind), text(with_separators(bytes))});
  };
  add("master shards", parameters);
  add("shards in param_dtype", gathered_from);
  add("gradient shards", gradients);
  add("optimizer states", optimizer);
  add("gathered units", unsharded);
  add("  of these the ring", ring);
  add("kept for backward (1/n)", secondary);
  add("gradients being reduced", reduce_buffers);
  add("accumulated full gradients", accumulated);
  add("total", total());
  if (host > 0) add("  of this in host memory", host);
  if (host_activations > 0) add("host memory for activations", host_activations);
  std::stringstream out;
  table.print(out, /*json=*/false);
  return out.str();
}

}  // namespace fsdp
