#include "data/decoder.h"

#include <algorithm>

#include "data/replace.h"
#include "data/spelling.h"
#include "data/unicode.h"

namespace fsdp::data {
namespace {

class ReplaceDecoder : public DecodeStep {
 public:
  explicit ReplaceDecoder(Replace replace) : replace_(std::move(replace)) {}

  void apply(std::vector<std::string>& tokens, Decoding& work) const override {
    std::string out;
    for (std::string& token : tokens) {
      if (replace_.apply(token, work.budget, work.room, out)) token.swap(out);
      out.clear();
    }
  }

 private:
  Replace replace_;
};

class ByteFallbackDecoder : public DecodeStep {
 public:
  void apply(std::vector<std::string>& tokens, Decoding&) const override {
    std::vector<std::string> joined;
    std::string bytes;
    const auto flush = [&] {
      const bool valid = valid_prefix(bytes) == bytes.size();
      if (valid && !bytes.empty()) joined.push_back(bytes);
      for (size_t i = 0; i < bytes.size() && !valid; ++i) joined.emplace_back("\xef\xbf\xbd");
      bytes.clear();
    };
    for (std::string& token : tokens) {
      const int byte = byte_of_token(token);
      if (byte >= 0) {
        bytes.push_back(static_cast<char>(byte));
      } else {
        flush();
        joined.push_back(std::move(token));
      }
    }
    flush();
    tokens = std::move(joined);
  }
  bool reads_bytes() const override { return true; }
};

class FuseDecoder : public DecodeStep {
 public:
  void apply(std::vector<std::string>& tokens, Decoding&) const override {
    std::string all;
    for (const std::string& token : tokens) all += token;
    tokens.assign(1, std::move(all));
  }
};

class StripDecoder : public DecodeStep {
 public:
  StripDecoder(char32_t content, size_t start, size_t stop) : start_(start), stop_(stop) {
    append_utf8(content_, content);
  }

  void apply(std::vector<std::string>& tokens, Decoding&) const override {
    for (std::string& token : tokens) {
      std::string_view left = token;
      for (size_t i = 0; i < start_ && left.starts_with(content_); ++i)
        left.remove_prefix(content_.size());
      for (size_t i = 0; i < stop_ && left.ends_with(content_); ++i)
        left.remove_suffix(content_.size());
      if (left.size() < token.size()) token = std::string(left);
    }
  }

 private:
  std::string content_;
  size_t start_, stop_;
};

class MetaspaceDecoder : public DecodeStep {
 public:
  MetaspaceDecoder(std::string replacement, bool dropped_first)
      : dropped_first_(dropped_first),
        to_nothing_(replacement, "", "the decoder"),
        to_space_(replacement, " ", "the decoder") {}

  void apply(std::vector<std::string>& tokens, Decoding& work) const override {
    std::string out;
    for (size_t i = 0; i < tokens.size(); ++i) {
      const Replace& replace = i == 0 && dropped_first_ ? to_nothing_ : to_space_;
      if (replace.apply(tokens[i], work.budget, work.room, out)) tokens[i].swap(out);
      out.clear();
    }
  }

 private:
  bool dropped_first_;
  Replace to_nothing_, to_space_;
};

}  // namespace

std::unique_ptr<const DecodeStep> replace_decoder(std::variant<Pattern, std::string> what,
                                                  std::string by, std::string where) {
  return std::make_unique<ReplaceDecoder>(
      Replace(std::move(what), std::move(by), std::move(where)));
}

std::unique_ptr<const DecodeStep> byte_fallback_decoder() {
  return std::make_unique<ByteFallbackDecoder>();
}

std::unique_ptr<const DecodeStep> fuse_decoder() {
  return std::make_unique<FuseDecoder>();
}

std::unique_ptr<const DecodeStep> strip_decoder(char32_t content, size_t start, size_t stop) {
  return std::make_unique<StripDecoder>(content, start, stop);
}

std::unique_ptr<const DecodeStep> metaspace_decoder(std::string replacement, bool dropped_first) {
  return std::make_unique<MetaspaceDecoder>(std::move(replacement), dropped_first);
}

std::string decoded(const DecodeSteps& steps, std::vector<std::string> tokens) {
  size_t bytes = 0;
  for (const std::string& token : tokens) bytes += token.size();
  Decoding work(bytes, steps.size());
  for (const auto& step : steps) step->apply(tokens, work);
  std::string text;
  for (const std::string& token : tokens) text += token;
  return text;
}

std::string decoded_piece(const DecodeSteps& steps, const std::string& token) {
  const int byte = byte_of_token(token);
  const auto reads = [](const auto& step) { return step->reads_bytes(); };
  if (byte >= 0 && std::any_of(steps.begin(), steps.end(), reads))
    return std::string(1, static_cast<char>(byte));
  // Between two others it is neither first nor last.
  std::string text = decoded(steps, {"x", token, "x"});
  if (text.size() < 2 || text.front() != 'x' || text.back() != 'x') return token;
  return text.substr(1, text.size() - 2);
}

}  // namespace fsdp::data
