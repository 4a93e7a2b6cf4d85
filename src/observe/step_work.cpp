#include "observe/step_work.h"

#include <algorithm>
#include <map>
#include <unordered_map>

namespace fsdp::observe {
namespace {

// A scope of shard/profile.h: "gather layers.3".
struct UnitScope {
  std::string unit;
  bool communicates = false, gather = false;
  bool call = false;  // of a communicator: "comm all_reduce"; the unit is that of a scope around it
};

bool reads_scope(const std::string& name, UnitScope& scope) {
  struct Verb {
    const char* text;
    bool communicates, gather, call = false;
  };
  constexpr Verb kVerbs[] = {{"gather ", true, true},
                             {"wait for ", true, true},
                             {"reduce ", true, false},
                             {"comm ", true, false, true},
                             {"reshard ", false, false}};
  for (const Verb& verb : kVerbs) {
    if (!name.starts_with(verb.text)) continue;
    scope = {name.substr(std::string_view(verb.text).size()), verb.communicates, verb.gather,
             verb.call};
    return true;
  }
  return false;
}

StepPass pass_of(const std::string& scope) {
  if (scope == kForwardScope) return StepPass::kForward;
  if (scope == kBackwardScope) return StepPass::kBackward;
  return scope == kUpdateScope ? StepPass::kUpdate : StepPass::kNone;
}

// What is known about an operator from what surrounds it.
struct Surroundings {
  Family family = Family::kOther;
  StepPass pass = StepPass::kNone;
  std::string unit;
  std::string name;  // of the operator that its time counts for
  bool own = false;  // which is itself
  bool communicates = false, gather = false;
};

class HostSweep {
 public:
  explicit HostSweep(const StepTrace& trace, StepWork& work) : trace_(trace), work_(work) {
    for (const UnitMark& mark : trace.marks) marks_[mark.lane].push_back(&mark);
    std::map<int64_t, std::vector<const TraceSpan*>> lanes;
    for (const TraceSpan& span : trace.spans)
      if (span.kind == TraceSpan::kOperator || span.kind == TraceSpan::kScope)
        if (span.begin < work.end && span.end > work.begin) lanes[span.lane].push_back(&span);
    for (auto& [lane, spans] : lanes) sweep(spans);
  }

  // Of an operator, by its id; null: unknown.
  const Surroundings* of(int64_t id) const {
    const auto found = by_id_.find(id);
    return found == by_id_.end() ? nullptr : &found->second;
  }

  StepPass pass_at(int64_t time) const {
    for (const StepWork::Phase& phase : work_.phases)
      if (time >= phase.begin && time < phase.end) return phase.pass;
    return StepPass::kNone;
  }

  // The unit of the latest mark up to `time`, of this thread or else of any.
  std::string unit_at(int64_t time, int64_t lane) const {
    const auto own = marks_.find(lane);
    if (own != marks_.end())
      for (auto mark = own->second.rbegin(); mark != own->second.rend(); ++mark)
        if ((*mark)->at <= time) return (*mark)->unit;
    for (auto mark = trace_.marks.rbegin(); mark != trace_.marks.rend(); ++mark)
      if (mark->at <= time) return mark->unit;
    return "";
  }

 private:
  struct Open {
    const TraceSpan* span;
    Surroundings around;
    bool counted = false;
  };

  void sweep(std::vector<const TraceSpan*>& spans) {
    std::sort(spans.begin(), spans.end(), [](const TraceSpan* a, const TraceSpan* b) {
      return a->begin != b->begin ? a->begin < b->begin : a->end > b->end;
    });
    std::vector<Open> stack;
    int64_t at = work_.begin;
    for (const TraceSpan* span : spans) {
      close(stack, at, span->begin);
      emit(stack, at, span->begin);
      at = std::max(at, span->begin);
      stack.push_back({span, surroundings(*span, stack)});
      if (span->kind == TraceSpan::kOperator) by_id_[span->id] = stack.back().around;
    }
    close(stack, at, work_.end);
    emit(stack, at, work_.end);
  }

  // Ends what has ended by `time`, with its last stretch.
  void close(std::vector<Open>& stack, int64_t& at, int64_t time) {
    while (!stack.empty() && stack.back().span->end <= time) {
      emit(stack, at, stack.back().span->end);
      at = std::max(at, stack.back().span->end);
      stack.pop_back();
    }
  }

  // The stretch [at, until) of the innermost open span.
  void emit(std::vector<Open>& stack, int64_t at, int64_t until) {
    if (stack.empty() || until <= at) return;
    Open& top = stack.back();
    if (work_.gpu && top.around.family != Family::kData) return;  // kernels are the work
    if (top.around.name.empty()) return;  // scopes that only say where we are
    work_.pieces.push_back({.begin = at,
                            .end = until,
                            .family = top.around.family,
                            .pass = top.around.pass,
                            .gather = top.around.gather,
                            .first = !top.counted && top.around.own,
                            .unit = top.around.unit,
                            .name = top.around.name});
    top.counted = true;
  }

  Surroundings surroundings(const TraceSpan& span, const std::vector<Open>& stack) const {
    Surroundings around = stack.empty() ? Surroundings() : stack.back().around;
    around.pass = pass_at(span.begin);
    around.own = false;
    const bool outermost = around.name.empty() && !around.communicates;
    if (span.kind == TraceSpan::kScope) {
      UnitScope scope;
      if (reads_scope(span.name, scope)) {
        if (scope.call) {
          scope.unit = around.unit;
          scope.gather = around.gather;
        }
        around.unit = scope.unit;
        around.communicates = scope.communicates && trace_.world > 1;
        around.gather = scope.gather;
        around.name =
            scope.call ? span.name : span.name.substr(0, span.name.find(' ')) + " (engine)";
        around.own = true;
        around.family = around.communicates ? Family::kCommunication : Family::kOther;
      } else if (span.name == kLoadingScope) {
        around.family = Family::kData;
        around.name = span.name;
        around.own = true;
      } else if (family_of(span.name) == Family::kOptimizer) {
        around.family = Family::kOptimizer;
        around.name = span.name;
        around.own = true;
      }
      return around;
    }
    // A parameter that it reads was marked between its begin and its end.
    if (outermost)
      around.unit = around.pass == StepPass::kUpdate ? "" : unit_at(span.end, span.lane);
    const Family own = family_of(span.name);
    const bool inherits = own == Family::kOther && !around.name.empty();
    if (inherits) return around;
    around.family = own;
    around.name = span.name;
    around.own = true;
    const bool small = own != Family::kCommunication && own != Family::kProducts;
    if (around.pass == StepPass::kUpdate && small) around.family = Family::kOptimizer;
    return around;
  }

  const StepTrace& trace_;
  StepWork& work_;
  std::map<int64_t, std::vector<const UnitMark*>> marks_;
  std::unordered_map<int64_t, Surroundings> by_id_;
};

void find_bounds(const StepTrace& trace, StepWork& work) {
  const TraceSpan* step = nullptr;
  for (const TraceSpan& span : trace.spans) {
    work.gpu |= span.on_device();
    if (span.kind == TraceSpan::kScope && span.name.starts_with(kStepScope)) step = &span;
  }
  if (!trace.spans.empty()) work.begin = work.end = trace.spans.front().begin;
  if (step) work.begin = step->begin, work.end = step->end;
  for (const TraceSpan& span : trace.spans)
    if (!step || span.on_device()) work.end = std::max(work.end, span.end);
  for (const TraceSpan& span : trace.spans)
    if (span.kind == TraceSpan::kScope && pass_of(span.name) != StepPass::kNone)
      work.phases.push_back({pass_of(span.name), span.begin, span.end});
}

void add_kernels(const StepTrace& trace, const HostSweep& host, StepWork& work) {
  std::unordered_map<int64_t, const TraceSpan*> launches, operators;
  for (const TraceSpan& span : trace.spans) {
    if (span.kind == TraceSpan::kRuntime) launches.emplace(span.id, &span);
    if (span.kind == TraceSpan::kOperator) operators.emplace(span.id, &span);
  }
  for (const TraceSpan& span : trace.spans) {
    if (!span.on_device() || span.end <= work.begin) continue;
    WorkPiece piece{.begin = span.begin, .end = span.end, .name = span.name};
    piece.family = span.kind == TraceSpan::kCopy ? Family::kCopies : family_of(span.name);
    const auto launch = launches.find(span.launch);
    const auto by = operators.find(span.from);
    const int64_t time = launch != launches.end() ? launch->second->begin
                         : by != operators.end()  ? by->second->begin
                                                  : span.begin;
    piece.pass = host.pass_at(time);
    if (const Surroundings* around = host.of(span.from)) {
      piece.unit = around->unit;
      piece.gather = around->gather;
      if (piece.family == Family::kOther) piece.family = around->family;
    } else if (piece.pass != StepPass::kUpdate) {
      piece.unit = host.unit_at(time, -1);
    }
    const bool small = piece.family != Family::kCommunication && piece.family != Family::kProducts;
    if (piece.pass == StepPass::kUpdate && small) piece.family = Family::kOptimizer;
    work.pieces.push_back(std::move(piece));
  }
}

}  // namespace

StepWork work_of(const StepTrace& trace) {
  StepWork work;
  find_bounds(trace, work);
  const HostSweep host(trace, work);
  if (work.gpu) add_kernels(trace, host, work);
  std::sort(work.pieces.begin(), work.pieces.end(),
            [](const WorkPiece& a, const WorkPiece& b) { return a.begin < b.begin; });
  for (const ProductCall& call : trace.products)
    if (call.at >= work.begin && call.at < work.end) work.flops += call.flops;
  return work;
}

}  // namespace fsdp::observe
