// fsdp ckpt diff: compares two checkpoints, tensor by tensor.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/log.h"
#include "base/table.h"
#include "checkpoint/compare.h"
#include "checkpoint/dtype.h"
#include "checkpoint/hugging_face.h"
#include "cli/ckpt.h"
#include "cli/ckpt_show.h"

namespace fsdp::cli {
namespace {

using checkpoint::Difference;
using checkpoint::DifferenceKind;

struct DiffFlags {
  std::string a, b;
  double tolerance = 0;
  bool model_only = false, json = false, tensors = false;
};

constexpr const char* kDiffNotes =
    "Examples:\n"
    "  fsdp ckpt diff runs/a runs/b\n"
    "  fsdp ckpt diff runs/a/checkpoints/step-100 runs/a --model-only --tolerance 1e-3\n"
    "\n"
    "Tensors are streamed: memory use doesn't grow with the model. If one side is a Hugging Face\n"
    "directory, only the model is compared. With a tolerance, a different dtype alone is no\n"
    "difference. Columns:\n"
    "  differing   elements with |a - b| above the tolerance, of how many\n"
    "  largest     the largest |a - b|, and its index\n"
    "  relative    the norm of a - b, divided by the norm of a\n"
    "Exit code: 0 equal, 1 different, 2 error.";

const char* word(DifferenceKind kind) {
  switch (kind) {
    case DifferenceKind::kOnlyInA:
      return "only in A";
    case DifferenceKind::kOnlyInB:
      return "only in B";
    case DifferenceKind::kShape:
      return "shape";
    case DifferenceKind::kDtype:
      return "dtype";
    case DifferenceKind::kElements:
      return "values";
    case DifferenceKind::kPlain:
      return "value";
  }
  return "";
}

bool has_elements(const Difference& found) {
  return found.kind == DifferenceKind::kDtype || found.kind == DifferenceKind::kElements;
}

// The first line of `text` that differs from `other`.
std::string differing_line(const std::string& text, const std::string& other) {
  size_t same = 0;
  while (same < text.size() && same < other.size() && text[same] == other[same]) ++same;
  const size_t before = same == 0 ? std::string::npos : text.rfind('\n', same - 1);
  const size_t begin = before == std::string::npos ? 0 : before + 1;
  return text.substr(begin, text.find('\n', begin) - begin);
}

// What each side has: the column "A → B".
std::string sides(const Difference& found) {
  const auto shown = [](const checkpoint::Side& side) {
    return side.value ? shortened(*side.value, 24) : checkpoint::shape_text(side.sizes);
  };
  switch (found.kind) {
    case DifferenceKind::kOnlyInA:
      return shown(found.a);
    case DifferenceKind::kOnlyInB:
      return shown(found.b);
    case DifferenceKind::kDtype:
      return formatted("{} → {}", checkpoint::dtype_name(found.a.dtype),
                       checkpoint::dtype_name(found.b.dtype));
    case DifferenceKind::kElements:
      return "";
    case DifferenceKind::kPlain:
      return formatted("{} → {}", shortened(differing_line(*found.a.value, *found.b.value), 24),
                       shortened(differing_line(*found.b.value, *found.a.value), 24));
    default:
      return formatted("{} → {}", shown(found.a), shown(found.b));
  }
}

std::string short_number(double value) {
  return formatted("{:.3g}", value);
}

// Several tensors as one row: counts are added up, the largest difference keeps its index.
struct Row {
  int64_t elements = 0, differing = 0;
  double relative = 0;
  const Difference* largest = nullptr;
};

Row join(const std::vector<Difference>& all, const std::vector<size_t>& members) {
  Row row;
  for (const size_t i : members) {
    row.elements += all[i].elements;
    row.differing += all[i].differing;
    row.relative = std::max(row.relative, all[i].relative);
    if (!row.largest || all[i].largest > row.largest->largest) row.largest = &all[i];
  }
  return row;
}

// JSON has no infinity.
nlohmann::ordered_json finite(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json("infinite");
}

void print_diff_json(const std::vector<Difference>& differences) {
  using Json = nlohmann::ordered_json;
  for (const auto& found : differences) {
    const auto side = [&](const checkpoint::Side& side, bool there) -> Json {
      if (!there) return nullptr;
      if (side.value) return *side.value;
      return {{"shape", side.sizes}, {"dtype", checkpoint::dtype_name(side.dtype)}};
    };
    Json line = {{"name", found.name}, {"difference", word(found.kind)}};
    line["a"] = side(found.a, found.kind != DifferenceKind::kOnlyInB);
    line["b"] = side(found.b, found.kind != DifferenceKind::kOnlyInA);
    if (has_elements(found)) {
      line["elements"] = found.elements;
      line["differing"] = found.differing;
      line["largest"] = finite(found.largest);
      line["at"] = found.at;
      line["relative"] = finite(found.relative);
    }
    std::cout << line.dump(-1, ' ', true, Json::error_handler_t::replace) << "\n";
  }
}

void print_table(const std::vector<Difference>& differences, bool every) {
  Table table({{"name", "name", Table::kLeft},
               {"difference", "difference", Table::kLeft},
               {"sides", "A → B", Table::kLeft},
               {"differing", "differing"},
               {"of", "of"},
               {"largest", "largest"},
               {"at", "at", Table::kLeft},
               {"relative", "relative"}});
  std::vector<Foldable> names;
  for (size_t i = 0; i < differences.size(); ++i)
    names.push_back({differences[i].name, every
                                              ? std::to_string(i)
                                              : word(differences[i].kind) + sides(differences[i])});
  for (const auto& folded : fold(names)) {
    const Difference& first = differences[folded.members[0]];
    std::vector<Cell> row = {text(visible(folded.name)), text(word(first.kind)),
                             text(sides(first))};
    if (has_elements(first)) {
      const Row joined = join(differences, folded.members);
      std::string at = joined.differing > 0 ? checkpoint::shape_text(joined.largest->at) : "";
      if (joined.differing > 0 && folded.members.size() > 1)
        at = formatted("{} {}", numbers_in(joined.largest->name), at);
      row.insert(row.end(),
                 {text(with_separators(joined.differing)), text(with_separators(joined.elements)),
                  text(short_number(joined.largest->largest)), text(at),
                  text(short_number(joined.relative))});
    } else {
      row.resize(8, text(""));
    }
    table.add(std::move(row));
  }
  table.print(std::cout, false);
}

int run_diff(const DiffFlags& flags) {
  const auto a = checkpoint_at(flags.a), b = checkpoint_at(flags.b);
  checkpoint::Source one(a), other(b);
  const bool model_only =
      flags.model_only || checkpoint::is_hugging_face(a) || checkpoint::is_hugging_face(b);
  checkpoint::Comparison found;
  {
    ByteProgress progress("comparing");
    found = checkpoint::compare(
        one, other,
        {.tolerance = flags.tolerance,
         .model_only = model_only,
         .progress = [&](int64_t done, int64_t total) { progress.at(done, total); }});
  }
  const bool equal = found.differences.empty();
  if (flags.json) {
    print_diff_json(found.differences);
    return equal ? kExitDone : kExitFailed;
  }
  std::cout << "A  " << visible(a.string()) << "\nB  " << visible(b.string()) << "\n";
  if (!equal) print_table(found.differences, flags.tensors);
  std::cout << with_separators(found.compared) << " names in both"
            << (model_only ? " (model only)" : "") << ", " << with_separators(found.equal)
            << " equal; " << with_separators(static_cast<int64_t>(found.differences.size()))
            << (found.differences.size() == 1 ? " difference\n" : " differences\n");
  if (found.unread > 0)
    std::cout << "not compared: " << found.unread << " plain values of unsupported Python types\n";
  return equal ? 0 : 1;
}

}  // namespace

void add_ckpt_diff(CLI::App& ckpt, Action& action) {
  auto flags = std::make_shared<DiffFlags>();
  CLI::App* command =
      ckpt.add_subcommand("diff", "Compare two checkpoints: names, shapes, dtypes, values");
  command->footer(kDiffNotes);
  const char* where = "A run's directory, one of its checkpoints, or a Hugging Face directory";
  command->add_option("a", flags->a, where)->type_name("A")->required();
  command->add_option("b", flags->b, where)->type_name("B")->required();
  command->add_option("--tolerance", flags->tolerance, "Largest |a - b| that counts as equal")
      ->check(CLI::NonNegativeNumber)
      ->type_name("X")
      ->capture_default_str();
  command->add_flag("--model-only", flags->model_only, "Compare only the model");
  command->add_flag("--tensors", flags->tensors, "One line per tensor; don't fold similar layers");
  command->add_flag("--json", flags->json, "One JSON object per difference");
  command->callback([flags, &action] {
    action = [flags]() -> int {
      try {
        return run_diff(*flags);
      } catch (const std::exception& failure) {  // 1 means: different
        log::error(failure);
        return kExitUsage;
      }
    };
  });
}

}  // namespace fsdp::cli
