// Templates that try to hang, or to eat memory or the stack.
#include <gtest/gtest.h>

#include "base/deadline.h"
#include "chat/cases.h"

namespace fsdp {
namespace {

using test::contains;
using test::Json;
using test::rendered;

std::string times(int count, const std::string& text) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

TEST(Hostile, TemplatesEndWithAnError) {
  const test::WithDeadline deadline;
  const std::string grow = "{% set n = namespace(x=";
  struct Case {
    std::string source;
    const char* expected;
  };
  for (const Case& entry : std::vector<Case>{
           {"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "too many steps"},
           {"{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", "too much text"},
           {grow + "'a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "rendering the template"},
           {grow + "[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "rendering the template"},
           {grow +
                "'ab') %}{% for i in range(99) %}{% set n.x = n.x.replace('', n.x) %}{% endfor %}",
            "rendering the template"},
           {grow + "[]) %}{% for i in range(9999) %}{% set n.x = [n.x] %}{% endfor %}",
            "nested too deeply"},
           {grow + "{}) %}{% for i in range(9999) %}{% set n.x = {'a': n.x} %}{% endfor %}",
            "nested too deeply"},
           {"{{ 'a' * 99999999999999 }}", "too much text"},
           {"{{ [1] * 99999999999999 }}", "too much text"},
           {"{{ '%999999999d' % 1 }}", "too wide"},
           {"{{ 'a'.center(999999999999) }}", "filled up too much"},
           {"{{ 'a\nb'|indent(999999999) }}", "too wide"},
           {"{{ [1]|tojson(indent=999999999) }}", "too wide"},
           {"{{ [1]|batch(99999999999, 0)|list }}", "rendering the template"},
           {"{{ 10 ** 999999999999 }}", "too large"},
           {"{{ range(999999999999) }}", "more than 100000"},
           {"{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}", "too deeply"},
           {"{% macro m(x) %}{{ m(x) }}{{ m(x) }}{% endmacro %}{{ m(1) }}", "too deeply"},
           {"{{ " + times(5000, "(") + "1" + times(5000, ")") + " }}", "nests too deeply"},
           {"{{ " + times(5000, "[") + times(5000, "]") + " }}", "nests too deeply"},
           {"{{ " + times(5000, "not ") + "1 }}", "nests too deeply"},
           {"{{ " + times(5000, "-") + "1 }}", "nests too deeply"},
           {"{{ 1" + times(5000, " + 1") + " }}", "nests too deeply"},
           {"{{ a" + times(5000, ".a") + " }}", "nests too deeply"},
           {"{{ a" + times(5000, "|a") + " }}", "nests too deeply"},
           {"{{ 1" + times(5000, " if 1 else 1") + " }}", "nests too deeply"},
           {times(5000, "{% if 1 %}") + times(5000, "{% endif %}"), "nests too deeply"},
           {std::string(2 << 20, 'x'), "too long"},
       }) {
    const std::string text = rendered(entry.source);
    EXPECT_TRUE(contains(text, entry.expected) && contains(text, "HINT"))
        << entry.source.substr(0, 100) << ": " << text.substr(0, 300);
  }
}

TEST(Hostile, NamespacesThatHoldEachOtherAreFreed) {
  const test::WithDeadline deadline;
  EXPECT_EQ(rendered("{% set n = namespace() %}{% for i in range(50000) %}"
                     "{% set n.x = namespace(x=n.x) %}{% endfor %}{% set n.x = n %}x"),
            "x");
}

TEST(Hostile, DeepConversationsAreRefused) {
  const test::WithDeadline deadline;
  const Json deep = Json::parse(times(3000, "[") + times(3000, "]"));
  const std::string text = rendered("x", {{"messages", {{{"role", "user"}, {"content", deep}}}}});
  EXPECT_TRUE(contains(text, "too deeply")) << text;
}

// Real conversations are far from the limits.
TEST(Hostile, LongConversationsAreRendered) {
  const test::WithDeadline deadline;
  Json messages = Json::array();
  for (int i = 0; i < 400; ++i)
    messages.push_back(
        {{"role", i % 2 ? "assistant" : "user"}, {"content", std::string(5000, 'x')}});
  const Json variables = {{"messages", messages}, {"tools", nullptr}};
  const chat::Template thinking = test::template_named("thinking");
  EXPECT_GT(thinking.render(variables).size(), 2'000'000u);
}

}  // namespace
}  // namespace fsdp
