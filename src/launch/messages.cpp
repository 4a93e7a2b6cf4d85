#include "launch/messages.h"

#include <iterator>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::launch {

using nlohmann::json;

[[noreturn]] static void refuse(const std::string& why) {
  throw Error(formatted("a message between launchers can't be read: {}.", why),
              "install the same fsdp on all nodes.");
}

// --- the fields of each message; at() throws if one is missing ---

static void to_json(json& out, FailureKind kind) {
  out = static_cast<int>(kind);
}

static void from_json(const json& in, FailureKind& kind) {
  const int number = in.get<int>();
  kind = static_cast<FailureKind>(number);
  if (number < 0 || kind > FailureKind::kOutput)
    refuse(formatted("there is no kind of failure {}", number));
}

static void to_json(json& out, Stage stage) {
  out = static_cast<int>(stage);
}

static void from_json(const json& in, Stage& stage) {
  const int number = in.get<int>();
  stage = static_cast<Stage>(number);
  if (stage != Stage::kLettingGo && stage != Stage::kJoining)
    refuse(formatted("no node can reach stage {}", number));
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Failure, kind, node, rank, pid, code, signal, message, hint,
                                   last_lines)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Plan, run_id, nprocs, node, master_port, max_restarts, restart,
                                   grace_s)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Refusal, message, hint)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FailureNotice, failure)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ReplaceRequest, restart, failure)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(LetGo, restart, master_port, failure)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Reached, restart, stage)

static void to_json(json& out, const Hello& hello) {
  out = {{"version", hello.version},
         {"nnodes", hello.nnodes},
         {"node", hello.node},
         {"nproc", hello.nproc},
         {"restart", hello.restart}};
}
static void from_json(const json& in, Hello& hello) {
  in.at("version").get_to(hello.version);
  in.at("nnodes").get_to(hello.nnodes);
  in.at("node").get_to(hello.node);
  in.at("nproc").get_to(hello.nproc);
  hello.restart = in.value("restart", 0);  // earlier versions have none
}

static void to_json(json& out, const KillOrder&) {
  out = json::object();
}
static void from_json(const json&, KillOrder&) {}

static void to_json(json& out, const Beat&) {
  out = json::object();
}
static void from_json(const json&, Beat&) {}

template <typename T>
static void read_optional(const json& in, const char* key, std::optional<T>& into) {
  if (in.contains(key)) into = in.at(key).get<T>();
}

static void to_json(json& out, const EndNotice& notice) {
  out = json::object();
  if (notice.last_lines) out["last_lines"] = *notice.last_lines;
}
static void from_json(const json& in, EndNotice& notice) {
  read_optional(in, "last_lines", notice.last_lines);
}

static void to_json(json& out, const Verdict& verdict) {
  out = {{"restart", verdict.restart}};
  if (verdict.failure) out["failure"] = *verdict.failure;
}
static void from_json(const json& in, Verdict& verdict) {
  in.at("restart").get_to(verdict.restart);
  read_optional(in, "failure", verdict.failure);
}

// --- messages ---

namespace {

template <typename T>
Message message_from(const json& in) {
  return in.get<T>();
}

constexpr struct {
  const char* type;
  Message (*read)(const json& in);
} kMessageTypes[] = {
    // in the order of Message
    {"hello", message_from<Hello>},
    {"plan", message_from<Plan>},
    {"refused", message_from<Refusal>},
    {"failed", message_from<FailureNotice>},
    {"kill", message_from<KillOrder>},
    {"ended", message_from<EndNotice>},
    {"verdict", message_from<Verdict>},
    {"beat", message_from<Beat>},
    {"replace", message_from<ReplaceRequest>},
    {"let_go", message_from<LetGo>},
    {"reached", message_from<Reached>},
};
static_assert(std::size(kMessageTypes) == std::variant_size_v<Message>);

json to_object(const Message& message) {
  json object = std::visit([](const auto& held) { return json(held); }, message);
  object["type"] = kMessageTypes[message.index()].type;
  return object;
}

}  // namespace

std::string encode(const Message& message) {
  // Rank output may not be valid UTF-8.
  return to_object(message).dump(-1, ' ', false, json::error_handler_t::replace);
}

Message decode(std::string_view line) {
  const json object = json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) refuse("it isn't an object");
  try {
    const auto type = object.at("type").get<std::string>();
    for (const auto& known : kMessageTypes) {
      if (type != known.type) continue;
      Message message = known.read(object);
      const auto* hello = std::get_if<Hello>(&message);
      const bool foreign = hello && hello->version != kMessageVersion;  // its receiver says so
      if (!foreign && to_object(message) != object)
        refuse(formatted("\"{}\" has other fields", type));
      return message;
    }
    refuse(formatted("there is no type \"{}\"", type));
  } catch (const json::exception& problem) {
    refuse(problem.what());
  }
}

}  // namespace fsdp::launch
