// What templates write, compared with Python's jinja2 as transformers sets it up: for templates
// like those of many model families, and for small ones of each construct.
#include "chat/template.h"

#include <gtest/gtest.h>

#include "base/subprocess.h"
#include "chat/cases.h"
#include "paths.h"

namespace fsdp {
namespace {

using test::contains;
using test::Json;
using test::rendered;

// The cases of render_cases.py, which runs once.
class Jinja : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    const Finished done = run_program({test::python(), paths::source("tests/chat/render_cases.py"),
                                       paths::source("tests/chat/templates")},
                                      false);
    code_ = done.code;
    if (code_ == 0) cases_ = new Json(Json::parse(done.output));
  }
  static void TearDownTestSuite() { delete cases_; }
  void SetUp() override {
    if (code_ == 77 || code_ == 127) GTEST_SKIP() << "no Python with transformers";
    ASSERT_EQ(code_, 0);
  }

  static inline Json* cases_ = nullptr;
  static inline int code_ = 0;
};

TEST_F(Jinja, WritesTheSameTextAndRefusesTheSameTemplates) {
  ASSERT_GT(cases_->size(), 500u);
  for (const Json& entry : *cases_) {
    const std::string name = entry["name"].get<std::string>();
    auto options = test::fixed_time();
    options.generation_prompt = entry["prompt"].get<bool>();
    std::string error;
    const std::string text = [&] {
      try {
        const chat::Template one(entry["template"].get<std::string>(), name);
        return one.render(entry["variables"], options).bytes();
      } catch (const Error& problem) {
        error = problem.what();
        return std::string();
      }
    }();
    if (entry.contains("error")) {
      EXPECT_NE(error, "") << name << ": " << entry["template"] << entry["error"] << text;
      EXPECT_TRUE(contains(error, name + ": line ") && contains(error, "HINT")) << error;
    } else {
      EXPECT_EQ(error, "") << name << ": " << entry["template"];
      EXPECT_EQ(text, entry["text"].get<std::string>()) << name << ": " << entry["template"];
    }
  }
}

TEST(Template, ErrorsNameTheLine) {
  struct Case {
    const char* source;
    const char* expected;
  };
  for (const Case& entry : std::vector<Case>{
           {"a\n{% if x %}\nb\n{{ y.z }}\n{% endif %}", "line 4: \"y\" isn't defined"},
           {"a\r\nb\r\n{{ 1 | nope }}", "line 3: the filter \"nope\" isn't supported"},
           {"\n{{ 1 is nope }}", "line 2: the test \"nope\" isn't supported"},
           {"\n\n{% include 'x' %}", "line 3: the tag \"include\" isn't supported"},
           {"{% for x in y recursive %}{% endfor %}", "line 1: recursive loops"},
           {"{% if x %}\n\n", "line 2: a tag {% endif %} is missing"},
           {"\n{{ 'a\n", "line 2: a string has no end"},
           {"\n{# a\n", "a comment has no end"},
           {"{% raw %}", "a raw block has no end"},
           {"{{ (1 }}", "line 1: a \"}\" closes nothing"},
           {"{{ 1 ? 2 }}", "unexpected character \"?\""},
           {"{% break %}", "outside of a loop"},
           {"{{ raise_exception('no\n' ~ 'system') }}", "refuses the conversation: no"},
           {"{{ 'İ'.lower() }}", "only that of ASCII and Latin-1"},
           {"{{ 9223372036854775807 + 1 }}", "64 bits"},
           {"{{ 99999999999999999999 }}", "too large a number"},
       }) {
    const std::string text = rendered(entry.source, {{"x", true}, {"messages", Json::array()}});
    EXPECT_TRUE(contains(text, "t.jinja: line ") && contains(text, entry.expected)) << text;
  }
}

TEST(Template, MessagesAreAListOfObjects) {
  EXPECT_TRUE(contains(rendered("x", {{"messages", "text"}}), "the messages aren't a list"));
  EXPECT_TRUE(contains(rendered("x", {{"messages", {"text"}}}), "a message isn't an object"));
  EXPECT_TRUE(contains(rendered("x", {{"n", UINT64_MAX}}), "too large a number"));
}

}  // namespace
}  // namespace fsdp
