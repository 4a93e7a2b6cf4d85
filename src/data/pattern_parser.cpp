// The parser of Pattern. An unsupported construct is an Error that shows it.
#include <algorithm>
#include <cctype>
#include <memory>
#include <optional>

#include "base/format.h"
#include "data/pattern.h"
#include "data/unicode.h"
#include "fsdp/error.h"

namespace fsdp::data {
namespace {

bool is_letter(char32_t code) {
  return (code >= 'a' && code <= 'z') || (code >= 'A' && code <= 'Z');
}

void add_range(CharacterSet& set, char32_t first, char32_t last) {
  for (char32_t code = first; code <= last && code < 256; ++code) set.low[code] = true;
  if (last >= 256) set.ranges.emplace_back(std::max<char32_t>(first, 256), last);
}

void add_categories(CharacterSet& set, uint32_t mask) {
  set.categories |= mask;
  for (char32_t code = 0; code < 256; ++code) {
    if (mask & bit(category(code))) set.low[code] = true;
  }
}

void add_space(CharacterSet& set, bool negated) {
  uint32_t separators = category_mask("Z");
  set.categories |= negated ? ~separators : separators;
  for (char32_t code = 0; code < 256; ++code) {
    if (is_space(code) != negated) set.low[code] = true;
  }
}

// Adds the other case of the ASCII letters in a set, and the two characters beyond ASCII that fold
// to an ASCII letter.
void add_cases(CharacterSet& set) {
  for (char32_t code = 'a'; code <= 'z'; ++code) {
    char32_t upper = code - 'a' + 'A';
    if (!set.low[code] && !set.low[upper]) continue;
    set.low[code] = set.low[upper] = true;
    if (code == 's') set.ranges.emplace_back(0x17f, 0x17f);
    if (code == 'k') set.ranges.emplace_back(0x212a, 0x212a);
  }
}

}  // namespace

class PatternParser {
 public:
  PatternParser(Pattern& pattern, std::string_view text) : pattern_(pattern), text_(text) {}

  int parse() {
    auto tree = alternatives(false);
    if (at_ < text_.size()) refuse("a \")\" without its \"(\"");
    int accept = pattern_.add({});
    return build(*tree, accept);
  }

 private:
  using Node = Pattern::Node;
  struct Tree {
    enum Syntax { kSet, kSequence, kEither, kLook, kOptional } kind = kSequence;
    int set = -1;
    char32_t letter = 0;  // for a set of one letter in both cases
    uint32_t min = 1, max = 1;
    bool possessive = false;
    bool negative = false;
    std::vector<std::unique_ptr<Tree>> parts;
  };
  using TreePtr = std::unique_ptr<Tree>;

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(formatted("the pattern {} has {} (before byte {}), which isn't supported.", text_,
                          what, at_),
                "patterns may have alternatives, classes with \\p{..} and \\s, ? * + {n,m} on a "
                "character, optional groups, lookahead and (?i:..).");
  }

  bool more() const { return at_ < text_.size(); }
  bool take(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  TreePtr alternatives(bool caseless) {
    auto either = std::make_unique<Tree>();
    either->kind = Tree::kEither;
    do {
      either->parts.push_back(sequence(caseless));
    } while (take("|"));
    if (either->parts.size() == 1) return std::move(either->parts[0]);
    return either;
  }

  TreePtr sequence(bool caseless) {
    auto tree = std::make_unique<Tree>();
    while (more() && text_[at_] != '|' && text_[at_] != ')') {
      TreePtr part = quantified(atom(caseless));
      if (caseless && !tree->parts.empty()) refuse_folded_pair(*tree->parts.back(), *part);
      tree->parts.push_back(std::move(part));
    }
    return tree;
  }

  // Oniguruma lets (?i:ss) match one character that folds to two letters. No tokenizer needs it.
  void refuse_folded_pair(const Tree& first, const Tree& second) const {
    std::string pair = {static_cast<char>(first.letter | 0x20),
                        static_cast<char>(second.letter | 0x20)};
    for (const char* folded : {"ff", "fi", "fl", "ss", "st"}) {
      if (first.letter && second.letter && pair == folded)
        refuse(formatted("\"{}\" in both cases", pair));
    }
  }

  TreePtr atom(bool caseless) {
    if (take("(")) return group(caseless);
    auto tree = std::make_unique<Tree>();
    tree->kind = Tree::kSet;
    CharacterSet set;
    if (take("[")) {
      set = character_class(caseless);
    } else if (take(".")) {
      set.low['\n'] = true;
      negate(set);
    } else if (take("\\")) {
      escape(set, caseless);
    } else {
      char c = text_[at_];
      if (c == '^' || c == '$') refuse(formatted("\"{}\"", c));
      if (c == '*' || c == '+' || c == '?') refuse("a repetition of nothing");
      char32_t code = next_code(text_, at_);
      literal(set, code, caseless);
      if (caseless && is_letter(code)) tree->letter = code;
    }
    tree->set = static_cast<int>(pattern_.sets_.size());
    pattern_.sets_.push_back(std::move(set));
    return tree;
  }

  TreePtr group(bool caseless) {
    if (++depth_ > 50) refuse("more than 50 nested groups");
    TreePtr tree;
    if (take("?:")) {
      tree = alternatives(caseless);
    } else if (take("?i:")) {
      tree = alternatives(true);
    } else if (take("?=") || take("?!")) {
      tree = std::make_unique<Tree>();
      tree->kind = Tree::kLook;
      tree->negative = text_[at_ - 1] == '!';
      tree->parts.push_back(alternatives(caseless));
    } else if (more() && text_[at_] == '?') {
      refuse(formatted("the group \"({}\"", text_.substr(at_, 3)));
    } else {
      tree = alternatives(caseless);
    }
    if (!take(")")) refuse("a \"(\" without its \")\"");
    --depth_;
    return tree;
  }

  static void negate(CharacterSet& set) {
    for (bool& has : set.low) has = !has;
    set.negated = !set.negated;
  }

  void literal(CharacterSet& set, char32_t code, bool caseless) const {
    add_range(set, code, code);
    if (!caseless) return;
    if (code >= 0x80) refuse("a letter beyond ASCII in both cases");
    add_cases(set);
  }

  // After the backslash. Returns the character, if the escape stands for one.
  std::optional<char32_t> escape(CharacterSet& set, bool caseless) {
    if (!more()) refuse("a \"\\\" at its end");
    char c = text_[at_++];
    auto one = [&](char32_t code) {
      literal(set, code, caseless);
      return code;
    };
    switch (c) {
      case 'n':
        return one('\n');
      case 'r':
        return one('\r');
      case 't':
        return one('\t');
      case 'f':
        return one('\f');
      case 'v':
        return one('\v');
      case 'x':
        return one(take("{") ? hexadecimal(1, 6, true) : hexadecimal(2, 2, false));
      case 'u':
        return one(hexadecimal(4, 4, false));
      case 's':
        return add_space(set, false), std::nullopt;
      case 'S':
        return add_space(set, true), std::nullopt;
      case 'd':
        return add_categories(set, bit(Category::Nd)), std::nullopt;
      case 'D':
        return add_categories(set, ~bit(Category::Nd)), std::nullopt;
      case 'p':
      case 'P':
        return property(set, c == 'P', caseless), std::nullopt;
      default:
        break;
    }
    auto code = static_cast<unsigned char>(c);
    if (code >= 0x80 || is_letter(code) || (c >= '0' && c <= '9')) {
      refuse(formatted("\"\\{}\"", c));
    }
    return one(code);
  }

  char32_t hexadecimal(int least, int most, bool closed) {
    char32_t code = 0;
    int digits = 0;
    for (; digits < most && more() && std::isxdigit(static_cast<unsigned char>(text_[at_]));
         ++digits) {
      char c = text_[at_++];
      code = code * 16 + (c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
    }
    if (digits < least || (closed && !take("}")) || code > 0x10ffff)
      refuse("a character given by its number");
    return code;
  }

  void property(CharacterSet& set, bool negated, bool caseless) {
    size_t end = text_.find('}', at_);
    if (!take("{") || end == std::string_view::npos) refuse("a \\p without {..}");
    if (take("^")) negated = !negated;
    std::string name(text_.substr(at_, end - at_));
    uint32_t mask = category_mask(name);
    if (!mask) refuse(formatted("\\p{{{}}}", name));
    if (caseless && name.size() == 2 && name[0] == 'L')
      refuse(formatted("\\p{{{}}} in both cases", name));
    at_ = end + 1;
    add_categories(set, negated ? ~mask : mask);
  }

  // After the "[".
  CharacterSet character_class(bool caseless) {
    CharacterSet set;
    bool negated = take("^");
    for (bool first = true; first || !take("]"); first = false) {
      if (!more()) refuse("a \"[\" without its \"]\"");
      if (text_[at_] == '[' || text_.substr(at_, 2) == "&&") refuse("a class within a class");
      if (first && text_[at_] == ']') refuse("an empty class");
      std::optional<char32_t> from;
      CharacterSet item;
      if (take("\\")) {
        from = escape(item, false);
      } else {
        from = next_code(text_, at_);
        add_range(item, *from, *from);
      }
      if (from && text_.substr(at_, 1) == "-" && text_.substr(at_ + 1, 1) != "]") {
        ++at_;
        CharacterSet ignored;
        auto to = take("\\") ? escape(ignored, false)
                  : more()   ? std::optional(next_code(text_, at_))
                             : std::nullopt;
        if (!to || *to < *from) refuse("a range without an end");
        add_range(item, *from, *to);
      }
      if (caseless && !item.ranges.empty()) refuse("letters beyond ASCII in both cases");
      if (caseless && !item.categories) add_cases(item);
      for (int i = 0; i < 256; ++i) set.low[i] = set.low[i] || item.low[i];
      set.categories |= item.categories;
      set.ranges.insert(set.ranges.end(), item.ranges.begin(), item.ranges.end());
    }
    if (negated) negate(set);
    return set;
  }

  TreePtr quantified(TreePtr tree) {
    uint32_t min = 1, max = 1;
    bool braces = false;
    if (take("?")) {
      min = 0;
    } else if (take("*")) {
      min = 0, max = Pattern::kMany;
    } else if (take("+")) {
      max = Pattern::kMany;
    } else if (more() && text_[at_] == '{') {
      braces = read_braces(min, max);
      if (!braces) refuse("a \"{\" that isn't a repetition");
    } else {
      return tree;
    }
    if (more() && text_[at_] == '?') refuse("a lazy repetition");
    bool possessive = take("+");
    if (possessive && braces) refuse("a repetition of a repetition");
    if (more() && (text_[at_] == '*' || text_[at_] == '{')) refuse("a repetition of a repetition");
    if (tree->kind == Tree::kSet) {
      tree->min = min, tree->max = max, tree->possessive = possessive;
      tree->letter = 0;
      return tree;
    }
    if (tree->kind == Tree::kLook || min != 0 || max != 1 || possessive) {
      refuse("a repetition of a group");
    }
    auto optional = std::make_unique<Tree>();
    optional->kind = Tree::kOptional;
    optional->parts.push_back(std::move(tree));
    return optional;
  }

  bool read_braces(uint32_t& min, uint32_t& max) {
    size_t at = at_ + 1;
    auto number = [&](uint32_t otherwise) {
      uint32_t value = 0;
      size_t from = at;
      for (; at < text_.size() && at - from < 5 && text_[at] >= '0' && text_[at] <= '9'; ++at) {
        value = value * 10 + (text_[at] - '0');
      }
      return at == from ? otherwise : value;
    };
    size_t begin = at;
    min = number(0);
    bool has_min = at != begin;
    max = min;
    if (at < text_.size() && text_[at] == ',') {
      size_t comma = at++;
      max = number(Pattern::kMany);
      if (!has_min && at == comma + 1) return false;
    } else if (!has_min) {
      return false;
    }
    if (at >= text_.size() || text_[at] != '}' || max < min || max == 0) return false;
    at_ = at + 1;
    return true;
  }

  // Adds the nodes of `tree`, followed by `next`. Returns the first of them.
  int build(const Tree& tree, int next) {
    Node node;
    node.next = next;
    switch (tree.kind) {
      case Tree::kSequence:
        for (auto part = tree.parts.rbegin(); part != tree.parts.rend(); ++part)
          next = build(**part, next);
        return next;
      case Tree::kSet:
        node.kind = Node::kSet;
        node.set = tree.set, node.min = tree.min, node.max = tree.max,
        node.possessive = tree.possessive;
        return pattern_.add(std::move(node));
      case Tree::kLook:
        node.kind = Node::kLook;
        node.negative = tree.negative;
        node.inner = build(*tree.parts[0], pattern_.add({}));
        return pattern_.add(std::move(node));
      case Tree::kOptional:
      case Tree::kEither:
        break;
    }
    node.kind = Node::kEither;
    for (const auto& part : tree.parts) node.branches.push_back(build(*part, next));
    if (tree.kind == Tree::kOptional) node.branches.push_back(next);
    if (node.branches.size() > 32) refuse("more than 32 alternatives");
    return pattern_.add(std::move(node));
  }

  Pattern& pattern_;
  std::string_view text_;
  size_t at_ = 0;
  int depth_ = 0;
};

Pattern::Pattern(std::string_view expression, std::string where)
    : expression_(expression), where_(std::move(where)) {
  if (valid_prefix(expression) != expression.size()) {
    throw Error("a pattern isn't valid UTF-8.",
                "the tokenizer.json is damaged; download it again.");
  }
  if (expression.size() > kLongest) {
    throw Error(
        formatted("a pattern has {} bytes.", expression.size()),
        formatted("the limit is {}; the tokenizer.json is damaged or malicious.", kLongest));
  }
  start_ = PatternParser(*this, expression).parse();
  if (nodes_[start_].empty) {
    throw Error(formatted("the pattern {} matches the empty text.", expression),
                "a pattern that splits text into words must match at least one character.");
  }
}

}  // namespace fsdp::data
