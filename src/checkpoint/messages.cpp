#include "checkpoint/messages.h"

#include <charconv>
#include <initializer_list>
#include <utility>
#include <vector>

#include "base/format.h"
#include "checkpoint/damaged.h"

namespace fsdp::checkpoint {
namespace {

[[noreturn]] void refuse(const std::string& sender, const std::string& why) {
  throw Error(formatted("{} sent a message that can't be read: {}.", sender, why),
              "all ranks must run the same version of the program.");
}

size_t number_in(std::string_view text, const std::string& sender) {
  size_t number = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (problem != std::errc() || end != text.data() + text.size())
    refuse(sender, "it has no number where one should be");
  return number;
}

// A message is a sequence of fields, each as "LENGTH:BYTES".
std::string join(std::initializer_list<std::string_view> fields) {
  std::string text;
  for (const auto field : fields) text.append(formatted("{}:", field.size())).append(field);
  return text;
}

std::vector<std::string_view> split(std::string_view text, const std::string& sender) {
  std::vector<std::string_view> fields;
  while (!text.empty()) {
    const size_t colon = text.find(':');
    if (colon == std::string_view::npos) refuse(sender, "a field has no length");
    const size_t length = number_in(text.substr(0, colon), sender);
    text.remove_prefix(colon + 1);
    if (length > text.size()) refuse(sender, "it ends too early");
    fields.push_back(text.substr(0, length));
    text.remove_prefix(length);
  }
  return fields;
}

std::vector<std::string_view> split(std::string_view text, size_t count,
                                    const std::string& sender) {
  auto fields = split(text, sender);
  if (fields.size() != count)
    refuse(sender, formatted("it has {} fields instead of {}", fields.size(), count));
  return fields;
}

}  // namespace

std::string Outcome::encode() const {
  if (!failure) return join({"done", result});
  return join({"failed", std::to_string(failure->code()), failure->message(), failure->hint()});
}

Outcome Outcome::decode(std::string_view text, const std::string& sender) {
  const auto fields = split(text, sender);
  if (fields.size() == 2 && fields[0] == "done") return {std::string(fields[1])};
  if (fields.size() == 4 && fields[0] == "failed")
    return {"", CodedError(static_cast<ExitCode>(number_in(fields[1], sender)),
                           std::string(fields[2]), std::string(fields[3]))};
  refuse(sender, "it is neither a result nor a failure");
}

void Outcome::fail() const {
  if (failure->code() == kExitDamaged) throw Damaged(failure->message(), failure->hint());
  throw *failure;
}

void SaveReport::add(SaveReport other) {
  for (const auto& [name, file] : other.manifest.files)
    if (const auto known = manifest.files.find(name);
        known != manifest.files.end() && known->second.sums != file.sums)
      throw Error(formatted("the copies of {} on two hosts differ.", name),
                  "replicas of the model must hold the same values, buffers included.");
  metadata.add(std::move(other.metadata));
  manifest.files.merge(other.manifest.files);
}

std::string SaveReport::encode() const {
  return join({checkpoint::encode(metadata), encode_manifest(manifest)});
}

SaveReport SaveReport::decode(std::string_view text, const std::string& sender) {
  const auto fields = split(text, 2, sender);
  return {checkpoint::decode(fields[0], sender), decode_manifest(fields[1], sender)};
}

std::string FirstPiece::encode() const {
  return join({formatted("{}", pieces), text});
}

FirstPiece FirstPiece::decode(std::string_view text, const std::string& sender) {
  const auto fields = split(text, 2, sender);
  const FirstPiece first{number_in(fields[0], sender), std::string(fields[1])};
  constexpr size_t kMostPieces = 1 << 16;
  if (first.pieces == 0 || first.pieces > kMostPieces)
    refuse(sender, formatted("it has {} pieces", first.pieces));
  return first;
}

}  // namespace fsdp::checkpoint
