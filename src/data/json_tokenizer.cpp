// Encoding text on all cores:
//
//   text       made valid UTF-8, split at added tokens, normalized            -> segments
//   segment    split into words by the pre-tokenizers, each encoded by Model  -> ids
//
// Several threads scan a large segment, each starting where no word may begin. The result is still
// exact: the end of the next word depends only on the text and on where it starts (Splitter::next),
// so two scans that reach the same position continue alike. join() follows the scan from the left
// until it meets the one from the middle, usually within a word or two, and takes its ids from
// there.
#include "data/json_tokenizer.h"

#include <algorithm>
#include <cerrno>
#include <deque>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/file_error.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "data/parallel.h"
#include "data/text_parts.h"
#include "data/unicode.h"
#include "fsdp/error.h"

namespace fsdp::data {
namespace {

constexpr size_t kAlone = size_t{1} << 16;  // bytes: shorter texts aren't worth a thread
constexpr size_t kGrowth = 50;              // looks that a byte counts which a step adds to a piece
constexpr size_t kMarks = 4096;             // positions of a scan that join() can use

}  // namespace

struct JsonTokenizer::Segment {
  std::string_view text;
  int32_t token = -1;  // an added token instead of text
  bool first = false;  // begins where the text begins
};

// Either some whole segments, or a part of a large one.
struct JsonTokenizer::Work {
  size_t first = 0, last = 0;  // segments
  bool partial = false;        // segment `first` from `from` until a word ends at `to` or later
  size_t from = 0, to = 0;
  size_t end = 0;  // where the scan stopped
  std::vector<int32_t> ids;
  std::vector<std::pair<size_t, size_t>> marks;  // starts of words, and the number of ids before
};

struct JsonTokenizer::Scanning {
  Model::Scratch& scratch;
  PatternBudget& budget;
  std::vector<int32_t>& ids;
};

class JsonTokenizer::Lease {
 public:
  explicit Lease(const JsonTokenizer& owner) : owner_(owner) {
    Lock lock(owner.mutex_);
    if (owner.idle_.empty()) {
      scratch_ = owner.parts_.model->scratch();
    } else {
      scratch_ = std::move(owner.idle_.back());
      owner.idle_.pop_back();
    }
  }
  ~Lease() {
    Lock lock(owner_.mutex_);
    owner_.idle_.push_back(std::move(scratch_));
  }
  Model::Scratch& operator*() { return *scratch_; }

 private:
  const JsonTokenizer& owner_;
  std::unique_ptr<Model::Scratch> scratch_;
};

JsonTokenizer::JsonTokenizer(std::string name, std::string json, std::string config,
                             std::string chat_template)
    : name_(std::move(name)),
      json_(std::move(json)),
      config_(std::move(config)),
      chat_template_(std::move(chat_template)),
      parts_(parse_tokenizer(json_, name_)),
      raw_(added(false)),
      normal_(added(true)),
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

// The added tokens that are searched for before normalization, or after it.
std::vector<AddedToken> JsonTokenizer::added(bool after) const {
  std::vector<AddedToken> chosen;
  for (AddedToken token : parts_.added) {
    if (token.normalized != after) continue;
    token.content = parts_.tokens[token.id];
    chosen.push_back(std::move(token));
  }
  return chosen;
}

std::optional<int32_t> JsonTokenizer::id_of(std::string_view token) const {
  for (const AddedToken& added : parts_.added) {
    if (added.content == token) return added.id;
  }
  if (token.empty()) return std::nullopt;
  // Bytes may have two tokens, such as A and <0x41>: the file's own spelling counts first.
  const auto* spellings = parts_.byte_level ? &parts_.pieces : &parts_.tokens;
  for (const auto* texts : {spellings, &parts_.pieces}) {
    auto found = std::find(texts->begin(), texts->end(), token);
    if (found != texts->end()) return static_cast<int32_t>(found - texts->begin());
  }
  return std::nullopt;
}

std::string JsonTokenizer::decode(const std::vector<int32_t>& ids, bool skip_special) const {
  if (parts_.decoder.empty()) return Tokenizer::decode(ids, skip_special);
  std::vector<std::string> tokens;
  tokens.reserve(ids.size());
  for (int32_t id : ids) {
    piece(id);  // throws if there is none
    if (!skip_special || !special(id)) tokens.push_back(parts_.tokens[id]);
  }
  return decoded(parts_.decoder, std::move(tokens));
}

std::string_view JsonTokenizer::piece(int32_t id) const {
  if (id < 0 || id >= vocab_size() || !parts_.known[id]) {
    throw Error(
        formatted("{} has no token {}.", name_, id),
        "were the tokens made with another tokenizer, or does the model have a larger vocabulary?");
  }
  return parts_.pieces[id];
}

std::string JsonTokenizer::chat_template() const {
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

void JsonTokenizer::save(const std::string& folder) const {
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

// `storage` owns the result if it had to be changed.
static std::string_view made_valid(std::string_view text, int threads, std::string& storage) {
  // No ill-formed part extends past a byte that starts a character.
  auto parts = parts_of(text, size_t{1} << 20, [](char c) { return !continues(c); });
  auto good = [](std::string_view part) { return valid_prefix(part) == part.size(); };
  if (all_parts(parts, threads, good)) return text;
  return storage = repaired(text);
}

std::vector<JsonTokenizer::Segment> JsonTokenizer::segments(
    std::string_view text, int threads, std::deque<std::string>& storage) const {
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
  const Rewriter* rewriter = parts_.steps.empty() ? nullptr : parts_.steps[0].rewriter.get();
  const std::string_view whole = made_valid(text, threads, storage.emplace_back());
  Normalizing work(whole.size(), parts_.normalizers.size(), threads);
  split(whole, raw_, [&](std::string_view raw) {
    std::string& normal = storage.emplace_back();
    const std::string_view part = normalized(parts_.normalizers, raw, work, normal);
    split(part, normal_, [&](std::string_view plain) {
      const bool first = raw.data() == whole.data() && plain.data() == part.data();
      if (rewriter) {
        std::string& changed = storage.emplace_back();
        if (rewriter->rewrite(plain, first, changed)) plain = changed;
        work.room.take(changed.size(), name_);
      }
      if (!plain.empty()) result.push_back({plain, -1, first});
    });
  });
  return result;
}

// The first step's rewriter has been applied to segments.
const Splitter* JsonTokenizer::first_splitter() const {
  return parts_.steps.empty() ? nullptr : parts_.steps[0].splitter.get();
}

std::vector<JsonTokenizer::Work> JsonTokenizer::cut(const std::vector<Segment>& segments) const {
  std::vector<Work> all;
  size_t filled = chunk_;  // bytes in the last Work; chunk_ if it can take no more
  for (size_t i = 0; i < segments.size(); ++i) {
    std::string_view text = segments[i].text;
    if (text.size() <= 2 * chunk_ || !first_splitter()) {
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

// Applies the steps from `index` on to a piece, and encodes the words that are left.
void JsonTokenizer::words(std::string_view piece, size_t index, bool first,
                          Scanning& scanning) const {
  if (index == parts_.steps.size())
    return parts_.model->encode(piece, scanning.scratch, scanning.ids);
  const Rewriter* rewriter = parts_.steps[index].rewriter.get();
  if (!rewriter) return split(piece, index, first, scanning);
  std::string changed;
  if (rewriter->rewrite(piece, first, changed)) {
    scanning.budget.spend(changed.size() + kGrowth * (changed.size() - piece.size()));
    piece = changed;
  }
  split(piece, index, first, scanning);
}

void JsonTokenizer::split(std::string_view piece, size_t index, bool first,
                          Scanning& scanning) const {
  const Splitter* splitter = parts_.steps[index].splitter.get();
  if (!splitter) return words(piece, index + 1, first, scanning);
  for (size_t at = 0; at < piece.size();) {
    const auto step = splitter->next(piece, at, scanning.budget);
    const auto use = [&](Splitter::Piece part) {
      if (part.empty()) return;
      words(piece.substr(part.begin, part.end - part.begin), index + 1, first && part.begin == 0,
            scanning);
    };
    use(step.first);
    use(step.second);
    at = step.end;
  }
}

// Encodes the first step's next pieces from `from` on, and returns where they end. If this depends
// on what is beyond `limit`, where a character begins, does nothing and returns `from`.
size_t JsonTokenizer::scan_piece(const Segment& segment, size_t from, size_t limit,
                                 Scanning& scanning) const {
  const std::string_view text = segment.text;
  const auto step = first_splitter()->next(text.substr(0, limit), from, scanning.budget);
  if (step.reached_end && limit < text.size()) return from;
  const auto use = [&](Splitter::Piece part) {
    if (part.empty()) return;
    const bool first = segment.first && part.begin == 0;
    words(text.substr(part.begin, part.end - part.begin), 1, first, scanning);
  };
  use(step.first);
  use(step.second);
  return step.end;
}

void JsonTokenizer::run(const std::vector<Segment>& segments, Work& work) const {
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
      size_t after = scan_piece(segments[work.first], work.end, limit, scanning);
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
    } else if (!first_splitter()) {
      words(text, std::min<size_t>(1, parts_.steps.size()), segments[i].first, scanning);
    } else {
      for (size_t at = 0; at < text.size();)
        at = scan_piece(segments[i], at, text.size(), scanning);
    }
  }
}

// Appends the ids of `work` from `from` on, a position that the scan from the left reached. Returns
// the position reached.
size_t JsonTokenizer::join(const std::vector<Segment>& segments, Work& work, size_t from,
                           PatternBudget& budget, std::vector<int32_t>& ids) const {
  const Segment& segment = segments[work.first];
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
    from = scan_piece(segment, from, segment.text.size(), scanning);
  }
  return from;
}

std::vector<int32_t> JsonTokenizer::encode(std::string_view text, EncodeOptions options) const {
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
  size_t bytes = 0;
  for (const Segment& segment : all) bytes += segment.text.size();
  PatternBudget budget = budget_for(bytes);
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

std::vector<std::vector<int32_t>> JsonTokenizer::encode_batch(
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
