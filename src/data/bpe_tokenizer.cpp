// Encoding text on all cores:
//
//   text       made valid UTF-8, split at added tokens, normalized           -> segments
//   segment    split into words by the pattern, each word merged by Bpe      -> ids
//
// Several threads scan a large segment, each starting where no word may begin. The result is still
// exact: the end of the next word depends only on the text and on where it starts (Pattern::find),
// so two scans that reach the same position continue alike. join() follows the scan from the left
// until it meets the one from the middle, usually within a word or two, and takes its ids from
// there.
#include "data/bpe_tokenizer.h"

#include <algorithm>
#include <cerrno>
#include <deque>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/file_error.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "data/nfc.h"
#include "data/parallel.h"
#include "data/unicode.h"
#include "fsdp/error.h"

namespace fsdp::data {
namespace {

constexpr size_t kAlone = size_t{1} << 16;  // bytes: shorter texts aren't worth a thread
constexpr size_t kMarks = 4096;             // positions of a scan that join() can use

std::vector<AddedToken> those(const std::vector<AddedToken>& tokens, bool normalized,
                              bool nfc_first) {
  std::vector<AddedToken> chosen;
  for (AddedToken token : tokens) {
    if (token.normalized != normalized) continue;
    if (normalized && nfc_first) token.content = nfc(token.content);
    chosen.push_back(std::move(token));
  }
  return chosen;
}

// Cuts `text` into parts of about `size` bytes, each before a byte that `can_cut` accepts.
template <class CanCut>
std::vector<std::string_view> parts_of(std::string_view text, size_t size, CanCut can_cut) {
  std::vector<std::string_view> parts;
  while (text.size() > size) {
    size_t at = size;
    while (at < text.size() && !can_cut(text[at])) ++at;
    parts.push_back(text.substr(0, at));
    text.remove_prefix(at);
  }
  parts.push_back(text);
  return parts;
}

// True if `good` holds for every part. Not std::vector<bool>: threads would write to the same byte.
template <class Good>
bool all_parts(const std::vector<std::string_view>& parts, int threads, Good good) {
  std::vector<char> results(parts.size());
  for_each_index(parts.size(), threads, [&](size_t i) { results[i] = good(parts[i]); });
  return std::find(results.begin(), results.end(), 0) == results.end();
}

}  // namespace

struct BpeTokenizer::Segment {
  std::string_view text;
  int32_t token = -1;  // an added token instead of text
};

// Either some whole segments, or a part of a large one.
struct BpeTokenizer::Work {
  size_t first = 0, last = 0;  // segments
  bool partial = false;        // segment `first` from `from` until a word ends at `to` or later
  size_t from = 0, to = 0;
  size_t end = 0;  // where the scan stopped
  std::vector<int32_t> ids;
  std::vector<std::pair<size_t, size_t>> marks;  // starts of words, and the number of ids before
};

struct BpeTokenizer::Scanning {
  BpeScratch& scratch;
  PatternBudget& budget;
  std::vector<int32_t>& ids;
};

class BpeTokenizer::Lease {
 public:
  explicit Lease(const BpeTokenizer& owner) : owner_(owner) {
    Lock lock(owner.mutex_);
    if (owner.idle_.empty()) {
      scratch_ = std::make_unique<BpeScratch>();
    } else {
      scratch_ = std::move(owner.idle_.back());
      owner.idle_.pop_back();
    }
  }
  ~Lease() {
    Lock lock(owner_.mutex_);
    owner_.idle_.push_back(std::move(scratch_));
  }
  BpeScratch& operator*() { return *scratch_; }

 private:
  const BpeTokenizer& owner_;
  std::unique_ptr<BpeScratch> scratch_;
};

BpeTokenizer::BpeTokenizer(std::string name, std::string json, std::string config,
                           std::string chat_template)
    : name_(std::move(name)),
      json_(std::move(json)),
      config_(std::move(config)),
      chat_template_(std::move(chat_template)),
      parts_(parse_tokenizer(json_, name_)),
      raw_(those(parts_.added, false, parts_.nfc)),
      normal_(those(parts_.added, true, parts_.nfc)),
      special_(parts_.pieces.size()) {
  for (const AddedToken& token : parts_.added) special_[token.id] = token.special;
  auto by_name = [&](const char* key, std::initializer_list<const char*> usual) {
    std::optional<int32_t> id;
    nlohmann::json root =
        config_.empty() ? nlohmann::json() : nlohmann::json::parse(config_, nullptr, false);
    if (root.is_object() && root.contains(key)) {
      const auto& value = root[key];
      const auto& content =
          value.is_object() && value.contains("content") ? value["content"] : value;
      if (content.is_string()) id = id_of(content.get<std::string>());
    }
    for (const char* token : usual) {
      if (!id) id = id_of(token);
    }
    return id;
  };
  eos_ = by_name("eos_token", {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"});
  bos_ = by_name("bos_token", {"<|begin_of_text|>", "<s>", "<bos>"});
}

std::optional<int32_t> BpeTokenizer::id_of(std::string_view token) const {
  for (const AddedToken& added : parts_.added) {
    if (added.content == token) return added.id;
  }
  auto found = std::find(parts_.pieces.begin(), parts_.pieces.end(), token);
  if (token.empty() || found == parts_.pieces.end()) return std::nullopt;
  return static_cast<int32_t>(found - parts_.pieces.begin());
}

std::string_view BpeTokenizer::piece(int32_t id) const {
  if (id < 0 || id >= vocab_size() || !parts_.known[id]) {
    throw Error(
        formatted("{} has no token {}.", name_, id),
        "were the tokens made with another tokenizer, or does the model have a larger vocabulary?");
  }
  return parts_.pieces[id];
}

std::string BpeTokenizer::chat_template() const {
  if (!chat_template_.empty() || config_.empty()) return chat_template_;
  const auto root = nlohmann::json::parse(config_, nullptr, false);
  if (!root.is_object() || !root.contains("chat_template")) return "";
  const auto& found = root["chat_template"];
  if (found.is_string()) return found.get<std::string>();
  if (!found.is_array()) return "";
  for (const auto& entry : found) {  // several, by name
    const bool whole = entry.is_object() && entry.contains("name") && entry.contains("template");
    if (whole && entry["name"] == "default" && entry["template"].is_string())
      return entry["template"].get<std::string>();
  }
  return "";
}

void BpeTokenizer::save(const std::string& folder) const {
  auto write = [&](const char* file, const std::string& text) {
    std::string path = (std::filesystem::path(folder) / file).string();
    std::ofstream out(place_of_file(path), std::ios::binary);
    out << text;
    if (!out.flush()) {
      const int why = errno;
      throw Error(formatted("can't write {}: {}.", path, errno_text(why)), file_hint(why));
    }
  };
  write("tokenizer.json", json_);
  if (!config_.empty()) write("tokenizer_config.json", config_);
  if (!chat_template_.empty()) write("chat_template.jinja", chat_template_);
}

std::string_view BpeTokenizer::normalized(std::string_view text, int threads,
                                          std::string& storage) const {
  auto parts =
      parts_of(text, size_t{1} << 20, [](char c) { return static_cast<unsigned char>(c) < 0x80; });
  if (!parts_.nfc || all_parts(parts, threads, surely_nfc)) return text;
  std::vector<std::string> results(parts.size());
  for_each_index(parts.size(), threads, [&](size_t i) { results[i] = nfc(parts[i]); });
  for (const auto& result : results) storage += result;
  return storage;
}

// `storage` owns the result if it had to be changed.
static std::string_view made_valid(std::string_view text, int threads, std::string& storage) {
  // No ill-formed part extends past a byte that starts a character.
  auto parts = parts_of(text, size_t{1} << 20, [](char c) { return !continues(c); });
  auto good = [](std::string_view part) { return valid_prefix(part) == part.size(); };
  if (all_parts(parts, threads, good)) return text;
  return storage = repaired(text);
}

std::vector<BpeTokenizer::Segment> BpeTokenizer::segments(std::string_view text, int threads,
                                                          std::deque<std::string>& storage) const {
  std::vector<Segment> result;
  auto split = [&](std::string_view part, const AddedTokens& tokens, auto&& plain) {
    size_t at = 0;
    for (const auto& found : tokens.find(part, threads)) {
      if (found.begin > at) plain(part.substr(at, found.begin - at));
      result.push_back({{}, found.id});
      at = found.end;
    }
    if (at < part.size()) plain(part.substr(at));
  };
  bool prefix = parts_.steps[0].prefix_space;
  split(made_valid(text, threads, storage.emplace_back()), raw_, [&](std::string_view part) {
    split(normalized(part, threads, storage.emplace_back()), normal_, [&](std::string_view plain) {
      if (prefix && plain[0] != ' ') plain = storage.emplace_back(" ").append(plain);
      result.push_back({plain, -1});
    });
  });
  return result;
}

std::vector<BpeTokenizer::Work> BpeTokenizer::cut(const std::vector<Segment>& segments) const {
  std::vector<Work> all;
  size_t filled = chunk_;  // bytes in the last Work; chunk_ if it can take no more
  for (size_t i = 0; i < segments.size(); ++i) {
    std::string_view text = segments[i].text;
    if (text.size() <= 2 * chunk_ || !parts_.steps[0].pattern) {
      if (filled >= chunk_) {
        all.emplace_back().first = i;
        filled = 0;
      }
      all.back().last = i + 1;
      filled += text.size() + 1;
      continue;
    }
    for (size_t from = 0; from < text.size();) {
      size_t to = std::min(text.size(), from + chunk_);
      while (to < text.size() && continues(text[to])) ++to;
      Work& work = all.emplace_back();
      work.first = i, work.last = i + 1, work.partial = true, work.from = from, work.to = to;
      from = to;
    }
    filled = chunk_;
  }
  return all;
}

void BpeTokenizer::words(std::string_view piece, size_t index, Scanning& scanning) const {
  if (index == parts_.steps.size())
    return parts_.bpe->encode(piece, scanning.scratch, scanning.ids);
  const WordStep& step = parts_.steps[index];
  if (step.prefix_space && piece[0] != ' ')
    return words(std::string(1, ' ').append(piece), index, scanning);
  if (!step.pattern) return words(piece, index + 1, scanning);
  for (size_t at = 0; at < piece.size();) {
    auto [begin, end, ignored] = step.pattern->find(piece, at, scanning.budget);
    if (begin == Pattern::kNone) begin = end = piece.size();
    if (begin > at) words(piece.substr(at, begin - at), index + 1, scanning);
    if (end > begin) words(piece.substr(begin, end - begin), index + 1, scanning);
    at = end;
  }
}

// Encodes the text from `from` to the end of the first step's next match, and returns that end. If
// this depends on what is beyond `limit`, where a character begins, does nothing and returns
// `from`.
size_t BpeTokenizer::scan_piece(std::string_view text, size_t from, size_t limit,
                                Scanning& scanning) const {
  const std::string_view front = text.substr(0, limit);
  auto [begin, end, reached_end] = parts_.steps[0].pattern->find(front, from, scanning.budget);
  if (reached_end && limit < text.size()) return from;
  if (begin == Pattern::kNone) begin = end = text.size();
  if (begin > from) words(text.substr(from, begin - from), 1, scanning);
  if (end > begin) words(text.substr(begin, end - begin), 1, scanning);
  return end;
}

void BpeTokenizer::run(const std::vector<Segment>& segments, Work& work) const {
  Lease scratch(*this);
  if (work.partial) {
    std::string_view text = segments[work.first].text;
    // A word that spans many chunks would be looked at in each of them: join() does it once.
    size_t limit = std::min(text.size(), work.to + chunk_);
    while (limit < text.size() && continues(text[limit])) ++limit;
    PatternBudget budget = budget_for(limit - work.from);
    Scanning scanning{*scratch, budget, work.ids};
    for (work.end = work.from; work.end < work.to;) {
      size_t before = work.ids.size();
      size_t after = scan_piece(text, work.end, limit, scanning);
      if (after == work.end) break;
      if (work.marks.size() < kMarks) work.marks.emplace_back(work.end, before);
      work.end = after;
    }
    return;
  }
  size_t bytes = 0;
  for (size_t i = work.first; i < work.last; ++i) bytes += segments[i].text.size();
  PatternBudget budget = budget_for(bytes);
  Scanning scanning{*scratch, budget, work.ids};
  for (size_t i = work.first; i < work.last; ++i) {
    std::string_view text = segments[i].text;
    if (segments[i].token >= 0) {
      work.ids.push_back(segments[i].token);
    } else if (!parts_.steps[0].pattern) {
      words(text, 1, scanning);
    } else {
      for (size_t at = 0; at < text.size();) at = scan_piece(text, at, text.size(), scanning);
    }
  }
}

// Appends the ids of `work` from `from` on, a position that the scan from the left reached. Returns
// the position reached.
size_t BpeTokenizer::join(const std::vector<Segment>& segments, Work& work, size_t from,
                          PatternBudget& budget, std::vector<int32_t>& ids) const {
  std::string_view text = segments[work.first].text;
  std::optional<Lease> scratch;
  while (from < work.to) {
    auto mark = std::lower_bound(work.marks.begin(), work.marks.end(), std::pair{from, size_t{0}});
    if (mark != work.marks.end() && mark->first == from) {
      ids.insert(ids.end(), work.ids.begin() + mark->second, work.ids.end());
      from = work.end;
      continue;
    }
    if (!scratch) scratch.emplace(*this);
    Scanning scanning{**scratch, budget, ids};
    from = scan_piece(text, from, text.size(), scanning);
  }
  return from;
}

std::vector<int32_t> BpeTokenizer::encode(std::string_view text, EncodeOptions options) const {
  int threads = text.size() < kAlone ? 1 : thread_count(options.threads);
  std::deque<std::string> storage;
  auto all = segments(text, threads, storage);
  auto works = cut(all);
  for_each_index(works.size(), threads, [&](size_t i) { run(all, works[i]); });

  std::vector<int32_t> ids;
  size_t total = parts_.before.size() + parts_.after.size();
  for (const Work& work : works) total += work.ids.size();
  ids.reserve(total);
  if (options.special_tokens) ids = parts_.before;
  size_t at = 0;
  PatternBudget budget = budget_for(text.size());
  for (Work& work : works) {
    if (work.partial) {
      if (work.from == 0) at = 0;
      at = join(all, work, at, budget, ids);
    } else {
      ids.insert(ids.end(), work.ids.begin(), work.ids.end());
    }
    std::vector<int32_t>().swap(work.ids);
  }
  if (options.special_tokens) ids.insert(ids.end(), parts_.after.begin(), parts_.after.end());
  return ids;
}

std::vector<std::vector<int32_t>> BpeTokenizer::encode_batch(
    const std::vector<std::string_view>& texts, EncodeOptions options) const {
  std::vector<std::vector<int32_t>> results(texts.size());
  auto large = [&](size_t i) { return texts[i].size() > 8 * chunk_; };
  EncodeOptions alone = options;
  alone.threads = 1;
  for_each_index(texts.size(), options.threads, [&](size_t i) {
    if (!large(i)) results[i] = encode(texts[i], alone);
  });
  for (size_t i = 0; i < texts.size(); ++i) {
    if (large(i)) results[i] = encode(texts[i], options);
  }
  return results;
}

}  // namespace fsdp::data
