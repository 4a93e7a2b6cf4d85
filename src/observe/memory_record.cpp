#include "observe/memory_record.h"

#include <algorithm>
#include <utility>

namespace fsdp::observe {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::pair<const char*, int64_t MemoryReport::*> kHeldKinds[] = {
    {"parameters", &MemoryReport::parameters},
    {"gathered_from", &MemoryReport::gathered_from},
    {"gradients", &MemoryReport::gradients},
    {"optimizer", &MemoryReport::optimizer},
    {"unsharded", &MemoryReport::unsharded},
    {"ring", &MemoryReport::ring},
    {"secondary", &MemoryReport::secondary},
    {"reduce_buffers", &MemoryReport::reduce_buffers},
    {"accumulated", &MemoryReport::accumulated},
    {"host", &MemoryReport::host},
    {"activations", &MemoryReport::activations},
    {"host_activations", &MemoryReport::host_activations},
};

constexpr std::pair<const char*, int64_t PlannedMemory::*> kPlannedKinds[] = {
    {"parameters", &PlannedMemory::parameters},
    {"master", &PlannedMemory::master},
    {"gradients", &PlannedMemory::gradients},
    {"states", &PlannedMemory::states},
    {"gather_buffers", &PlannedMemory::gather_buffers},
    {"communication", &PlannedMemory::communication},
    {"activations", &PlannedMemory::activations},
    {"logits", &PlannedMemory::logits},
    {"temporaries", &PlannedMemory::temporaries},
    {"workspaces", &PlannedMemory::workspaces},
    {"fragmentation", &PlannedMemory::fragmentation},
    {"outside", &PlannedMemory::outside},
    {"host", &PlannedMemory::host},
    {"disk", &PlannedMemory::disk},
};

int64_t integer_in(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number() ? found->get<int64_t>() : 0;
}

template <typename Kinds, typename Memory>
Json kinds_to_json(const Kinds& kinds, const Memory& memory) {
  Json all = Json::object();
  for (const auto& [key, member] : kinds) all[key] = memory.*member;
  return all;
}

template <typename Kinds, typename Memory>
void kinds_from_json(const Kinds& kinds, const Json& all, Memory& memory) {
  for (const auto& [key, member] : kinds) memory.*member = integer_in(all, key);
}

}  // namespace

Json to_json(const MemoryRecord& record) {
  Json json = {{"world", record.world}, {"held", kinds_to_json(kHeldKinds, record.held)}};
  if (record.planned) json["planned"] = kinds_to_json(kPlannedKinds, *record.planned);
  if (record.peak) json["peak"] = *record.peak;
  if (record.capacity > 0) json["capacity"] = record.capacity;
  return json;
}

MemoryRecord memory_from_json(const Json& json) {
  MemoryRecord record;
  if (json.contains("held")) kinds_from_json(kHeldKinds, json["held"], record.held);
  if (json.contains("planned"))
    kinds_from_json(kPlannedKinds, json["planned"], record.planned.emplace());
  if (json.contains("peak")) record.peak = integer_in(json, "peak");
  record.capacity = integer_in(json, "capacity");
  record.world = static_cast<int>(std::max<int64_t>(1, integer_in(json, "world")));
  return record;
}

std::vector<ComparedKind> compared_kinds(const MemoryRecord& record) {
  const PlannedMemory planned = record.planned.value_or(PlannedMemory());
  const MemoryReport& held = record.held;
  std::vector<ComparedKind> kinds;
  auto add = [&](const char* kind, int64_t expected, int64_t found, bool sum = false) {
    if (expected > 0 || found > 0) kinds.push_back({kind, expected, found, sum});
  };
  // Offloaded bytes aren't known by kind, so with offload these kinds are compared together.
  const int64_t parameters = held.parameters + held.gathered_from;
  if (held.host > 0 || planned.host > 0) {
    add("parameters, masters, gradients, states",
        planned.parameters + planned.master + planned.gradients + planned.states,
        parameters + held.gradients + held.optimizer - held.host);
  } else {
    add("parameters and masters", planned.parameters + planned.master, parameters);
    add("gradients", planned.gradients, held.gradients);
    add("optimizer states", planned.states, held.optimizer);
  }
  add("gather buffers", planned.gather_buffers, held.unsharded + held.secondary);
  add("communication", planned.communication, held.reduce_buffers + held.accumulated);
  add("activations", planned.activations, held.activations);
  // These are only known as the rest of the peak.
  const int64_t known = held.total() - held.host + held.activations;
  add("logits, temporaries, workspaces", planned.logits + planned.temporaries + planned.workspaces,
      std::max<int64_t>(0, record.peak.value_or(0) - known));
  add("peak", planned.peak(), record.peak.value_or(0), /*sum=*/true);
  add("in host memory", planned.host, held.host + held.host_activations, /*sum=*/true);
  return kinds;
}

}  // namespace fsdp::observe
