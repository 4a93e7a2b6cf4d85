"""Renders templates with Python's jinja2 as transformers sets it up.

    python3 render_cases.py TEMPLATES

TEMPLATES is a folder of *.jinja. Prints a JSON list of cases: name, template, variables, prompt (whether
add_generation_prompt is set), and what comes out: text, or error (true). Exits with 77 if a package is
missing.
"""
import datetime
import json
import pathlib
import sys

try:
    import jinja2
    from transformers.utils import chat_template_utils
except ImportError as missing:
    print(missing)
    sys.exit(77)


class FixedTime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26, 14, 3, 9)


chat_template_utils.datetime = FixedTime


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def call(name, arguments, number=1):
    return {"type": "function", "id": f"call{number:05d}", "function": {"name": name, "arguments": arguments}}


WEATHER = {"type": "function", "function": {
    "name": "weather", "description": "The weather <now> & \"here\"", "parameters": {
        "type": "object", "required": ["place"], "properties": {
            "place": {"type": "string", "description": "A city, e.g. Zürich"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "nullable": True},
            "days": {"type": "array", "items": {"type": "integer"}}}},
    "return": {"type": "string"}}}
SEARCH = {"type": "function", "function": {
    "name": "search", "description": "Searches", "parameters": {
        "type": "object", "properties": {
            "query": {"type": ["string", "null"]}, "limit": {"type": "number"}, "deep": {"type": "boolean"},
            "where": {"type": "object", "required": ["site"], "properties": {
                "site": {"oneOf": [{"type": "string"}, {"type": "array"}]}, "tags": {"type": "array", "items": {
                    "type": "array", "items": {"type": "string"}}}}},
            "extra": {"type": "object", "additionalProperties": {"type": "number"}}}}}}

CONVERSATIONS = {
    "short": {"messages": [message("user", "Hi"), message("assistant", "Hello!")]},
    "open": {"messages": [message("user", "Only a question?")]},
    "system": {"messages": [message("system", "  Be brief. /no_think "), message("user", "Hi\n\nyou "),
                            message("assistant", "\n Hello. \n"), message("user", "Tschüß 👋\r\nまた"),
                            message("assistant", "さようなら <b>&</b> '\"")]},
    "thinking": {"messages": [
        message("user", "1+1?"), message("assistant", "<think>\nEasy.\n</think>\n\n2"), message("user", "And 2+2?"),
        message("assistant", "4", reasoning_content="Double.\n", thinking="Double.\n")]},
    "unclosed": {"messages": [message("user", "<tool_response>x</tool_response>"),
                              message("assistant", "a</think>b</think>c")]},
    "tools": {"tools": [WEATHER, SEARCH], "messages": [
        message("system", "Use tools."), message("user", "Weather in Zürich?"),
        message("assistant", "", tool_calls=[call("weather", {"place": "Zürich", "days": [1, 2.5, -3e-7], "unit": None})]),
        message("tool", "{\"t\": 21}", name="weather"), message("tool", "second"),
        message("assistant", "It is 21 °C."), message("user", "Thanks"), message("assistant", "Bye")]},
    "ends in tools": {"tools": [SEARCH], "messages": [
        message("user", "Look it up"), message("assistant", "Sure.", tool_calls=[
            call("search", {"query": "a\n\"b\" \\ \u2028 \u0001 \u007f"}, 1), call("search", {"deep": True}, 2)]),
        message("tool", "nothing")]},
    "none": {"tools": None, "messages": [
        message("user", "x"), message("assistant", None, tool_calls=[call("f", {})]), message("tool", "r"),
        message("assistant", "y")]},
    "parts": {"messages": [message("user", [{"type": "image"}, {"type": "text", "text": " What is this? "}]),
                           message("assistant", [{"type": "text", "text": "A cat."}])]},
    "wrong order": {"messages": [message("user", "a"), message("user", "b"), message("assistant", "c")]},
    "no messages": {"messages": []},
    "settings": {"enable_thinking": False, "reasoning_effort": "low", "date_string": "1 Jan 2000",
                 "documents": [{"doc_id": 0, "title": "One", "text": "First text"}, {"b": 1, "A": 2.0}],
                 "messages": [message("user", "Hi"), message("assistant", "Hello!")]},
}

# Small templates: each is rendered alone, with VARIABLES.
VARIABLES = {"n": None, "t": True, "i": 7, "x": 2.5, "s": "Hello, World", "u": "äöü ✓ 日本", "e": "", "html": "<a & 'b'>",
             "list": [3, 1, 2], "words": ["b", "A", "c", "a"], "nested": [[1, 2], [3, [4]]],
             "d": {"b": 1, "a": {"c": [1, 2]}, "items": "field", "Z": None},
             "rows": [{"k": "x", "v": 1}, {"k": "y", "v": 2}, {"k": "x", "v": 3}], "messages": []}
SNIPPETS = """
{{ 1 }}|{{ 1.0 }}|{{ 1e20 }}|{{ 1.5e-7 }}|{{ 0.1 + 0.2 }}|{{ 123456789012345.0 }}|{{ 1e16 }}|{{ -0.0 }}|{{ 100000.0 * 3 }}
{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 7 / 2 }} {{ 6 / 3 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 7.5 // 2 }} {{ -7.5 % 2 }}
{{ 1 + 2 * 3 - 4 }} {{ (1 + 2) * 3 }} {{ -2 ** 2 }} {{ 2 * -3 }} {{ +i }} {{ true + true }} {{ 10 - 3 - 2 }} {{ 2 ** 3 ** 2 }}
{{ 'a' 'b' }} {{ "q'q" }} {{ 'a\\n\\t\\x41\\u00e9\\101\\q' }} {{ 'it\\'s' }}
{{ [1, 'a', none, true, 1.5, [], (), (1,), {}, {'k': 'v', 1: 2}] }}
{{ ['it\\'s', 'a"b', 'b\\'"', 'new\\nline', 'tab\\t', '\\x01', 'é', '\\u200b'] }}
{{ n }} {{ t }} {{ missing }} {{ false }} {{ none }} {{ None }} {{ True }}
{{ missing.field }}
{{ missing['field'] }}
{{ missing + 1 }}
{{ missing ~ 'x' }} {{ missing == other }} {{ missing|length }} {{ missing is defined }} {{ missing or 'else' }}
{{ d.a.c[1] }} {{ d['a']['c'][-1] }} {{ d.nope }} {{ d['items'] }} {{ list[5] }} {{ list[-1] }} {{ s[0] }} {{ u[-1] }} {{ d.b }}
{{ list[1:] }} {{ list[:-1] }} {{ list[::-1] }} {{ list[::2] }} {{ s[7:] }} {{ s[-5:-1] }} {{ u[1:6] }} {{ u[::-1] }} {{ s[::3] }} {{ list[5:] }} {{ s[3:1] }} {{ s[100:] }} {{ list[-100:2] }} {{ list[2:0:-1] }}
{{ s[:5] ~ s[5:] }} {{ (1, 2, 3)[1:] }} {{ range(5)[2] }} {{ range(2, 9, 3)|list }} {{ range(3, 0, -1)|list }}
{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ 1 == 1.0 }} {{ true == 1 }} {{ 'a' == 'a' }} {{ [1] == (1,) }} {{ 1 != 2 }} {{ d == d }} {{ none == false }} {{ 1 >= 1 }} {{ 3 <= 2.5 }}
{{ 1 < 'a' }}
{{ none < 1 }}
{{ 'ell' in s }} {{ 3 in list }} {{ 'b' in d }} {{ 5 not in list }} {{ 1 in missing }} {{ 'x' in words }} {{ not 1 in list }}
{{ 1 in 5 }}
{{ 1 in 'a' }}
{{ 'a' if t else 'b' }} {{ 'a' if n else 'b' }} {{ 'a' if n }}| {{ 'x' if 0 else 'y' if 0 else 'z' }}
{{ 1 and 0 or 3 }} {{ not n }} {{ not (t and n) }} {{ '' or [] or 'last' }} {{ 0 and missing.x }}
{{ 'a' * 3 }} {{ 2 * [1] }} {{ [1] + [2] }} {{ 'a' + 'b' }} {{ (1,) + (2,) }}
{{ 'a' + 1 }}
{{ [1] + (2,) }}
{{ 1 / 0 }}
{{ 'a' ~ 1 ~ none ~ [1] ~ 1.0 }}
{{ 'abc'.upper() }} {{ 'ABC'.lower() }} {{ 'hello world-foo it\\'s'.title() }} {{ 'hELLO wORLD'.capitalize() }} {{ 'aB'.swapcase() }}
{{ 'hello world-foo it\\'s (x)'|title }} {{ 'hELLO'|capitalize }} {{ 'ÀÉ'|lower }} {{ 'àé'|upper }} {{ 'x'|upper }}
[{{ '  a b  '.strip() }}] [{{ '  a '.lstrip() }}] [{{ ' a  '.rstrip() }}] [{{ 'xxaxx'.strip('x') }}] [{{ '\\n\\u3000a\\u00a0'|trim }}] [{{ 'abcba'.strip('ab') }}] [{{ 'xay'|trim('xy') }}]
{{ 'a b  c'.split() }} {{ 'a,b,,c'.split(',') }} {{ 'a,b,c'.split(',', 1) }} {{ 'a b c d'.split(none, 2) }} {{ ''.split() }} {{ ''.split(',') }} {{ 'a--b'.split('--') }} {{ ' a  b '.split(maxsplit=1) }}
{{ 'a,b,c'.rsplit(',', 1) }} {{ ' a b c '.rsplit(none, 1) }} {{ 'aXXbXXc'.rsplit('XX', 1) }} {{ 'a,b'.rsplit(',', 5) }}
{{ 'a'.split('') }}
{{ 'a\\nb\\r\\nc\\n'.splitlines() }} {{ 'a\\n\\nb'.splitlines(true) }} {{ ''.splitlines() }}
{{ 'k=v=w'.partition('=') }} {{ 'k=v=w'.rpartition('=') }} {{ 'kv'.partition('=') }} {{ 'kv'.rpartition('=') }}
{{ 'prefix-x'.removeprefix('prefix-') }} {{ 'x.txt'.removesuffix('.txt') }} {{ 'x'.removesuffix('y') }}
{{ s.startswith('Hello') }} {{ s.endswith(('x', 'World')) }} {{ s.startswith('ello', 1) }} {{ s.find('o') }} {{ s.rfind('o') }} {{ s.find('zz') }} {{ s.index('W') }} {{ s.count('l') }} {{ u.find('✓') }} {{ s.count('') }} {{ s.find('o', 5) }} {{ s.endswith('o', 0, 5) }}
{{ s.index('zz') }}
{{ '12'.isdigit() }} {{ ''.isdigit() }} {{ 'ab'.isalpha() }} {{ 'a1'.isalnum() }} {{ ' \\t'.isspace() }} {{ 'ab'.islower() }} {{ 'AB1'.isupper() }} {{ '1'.isnumeric() }} {{ 'é'.isascii() }}
{{ s.replace('l', 'L') }} {{ s.replace('l', 'L', 2) }} {{ 'abc'.replace('', '-') }} {{ 'aaa'|replace('a', 'b', 2) }} {{ 5|replace(5, 6) }} {{ 'abc'.replace('', '-', 2) }}
{{ ', '.join(['a', 'b']) }} {{ ''.join([]) }} {{ '-'.join('abc') }}
{{ ', '.join([1]) }}
{{ 'a'.center(5) }}| {{ 'ab'.center(5) }}| {{ 'abc'.center(6, '*') }}| {{ 'a'.ljust(3) }}| {{ 'a'.rjust(3, '.') }}| {{ '-5'.zfill(4) }}| {{ 'x'|center(4) }}|
{{ '%s is %d and %.2f, %5s|%-5s|%05d %% %r %x'|format('a', 3, 2.345, 'b', 'c', 42, 'd', 255) }} {{ '%s' % 'x' }} {{ '%s-%s' % ('a', 1) }} {{ '%+d' % 5 }} {{ '%i' % 3.9 }}
{{ '%d' % 'x' }}
{{ '{} {}'.format(1, 'a') }} {{ '{0}{1}{0}'.format('x', 'y') }} {{ '{name}!'.format(name='n') }} {{ '{{}}'.format() }}
{{ list|length }} {{ s|length }} {{ u|length }} {{ d|count }} {{ e|length }}
{{ 5|length }}
{{ list|first }} {{ list|last }} {{ s|first }} {{ []|first }}| {{ words|sort }} {{ words|sort(reverse=true) }} {{ words|sort(case_sensitive=true) }} {{ list|sort|join(',') }}
{{ rows|sort(attribute='v', reverse=true)|map(attribute='v')|list }}
{{ [1, 'a']|sort }}
{{ list|min }} {{ list|max }} {{ words|max }} {{ list|sum }} {{ rows|sum(attribute='v') }} {{ [1.5, 2]|sum }} {{ rows|max(attribute='v') }}
{{ words|unique|list }} {{ [1, 1, 2]|unique|list }} {{ list|reverse|list }} {{ s|reverse }} {{ [1, 2, 3, 4, 5]|batch(2)|list }} {{ [1, 2, 3]|batch(2, 'x')|list }}
{{ words|join }} {{ list|join('-') }} {{ rows|join('+', attribute='k') }} {{ 'abc'|join('.') }} {{ d|join(',') }}
{{ words|map('upper')|list }} {{ rows|map(attribute='v')|list }} {{ rows|map(attribute='w', default=0)|list }} {{ nested|map('length')|list }} {{ [' a ', 'b ']|map('trim')|join('|') }} {{ nested|map(attribute=0)|list }} {{ rows|map(attribute='k')|map('replace', 'x', 'z')|list }}
{{ rows|selectattr('k', 'equalto', 'x')|list }} {{ rows|rejectattr('k', 'eq', 'x')|map(attribute='v')|list }} {{ list|select('gt', 1)|list }} {{ list|reject('odd')|list }} {{ [0, 1, '', 'a', none]|select|list }} {{ rows|selectattr('w', 'defined')|list }} {{ rows|selectattr('v')|list|length }} {{ words|select('in', ['a', 'b'])|list }}
{% set g = list|select('gt', 1) %}{{ g|list }}{{ g|list }} {{ 'yes' if [1]|select('gt', 5) else 'no' }}
{{ (list|select('gt', 1))|length }}
{{ d|dictsort }} {{ d|dictsort(reverse=true)|map('first')|list }} {{ {'b': 1, 'A': 2}|dictsort(false, 'value') }} {{ {'b': 1, 'A': 2}|dictsort(true) }}
{{ d|items|list }} {{ d.keys()|list }} {{ d.values()|list }} {{ d.get('b') }} {{ d.get('q') }} {{ d.get('q', 5) }} {{ d.items() is iterable }} {{ missing|items|list }}
{{ s|default('x') }} {{ missing|default('x') }} {{ e|default('x') }} {{ e|default('x', true) }} {{ n|d('x') }} {{ n|d('x', boolean=true) }} {{ missing|d }}|
{{ '42'|int }} {{ ' 42 '|int }} {{ 'x'|int }} {{ 'x'|int(7) }} {{ 3.9|int }} {{ '3.9'|int }} {{ '2.5'|float }} {{ 'x'|float }} {{ 1|float }} {{ '-1e3'|float }} {{ true|int }} {{ '+5'|int }} {{ none|int }} {{ [1]|int(3) }}
{{ 2.5|round }} {{ 3.5|round }} {{ 2.675|round(2) }} {{ 42.55|round(1, 'floor') }} {{ 42.51|round(1, 'ceil') }} {{ 5|round }} {{ -5|abs }} {{ -2.5|abs }} {{ 1234.5678|round(3) }}
{{ list|string ~ '' }} {{ 1|string }} {{ list|list }} {{ 'ab'|list }} {{ d|list }}
{{ 'a\\nb\\n\\nc'|indent }}|{{ 'a\\nb'|indent(2, true) }}|{{ 'a\\n\\nb'|indent(1, blank=true) }}|{{ 'a\\nb'|indent('> ') }}|{{ 'a\\n'|indent }}|{{ ''|indent }}|
{{ d|tojson }} {{ d|tojson(indent=2) }} {{ list|tojson(indent=0) }} {{ u|tojson }} {{ u|tojson(ensure_ascii=true) }} {{ '😀 \\x7f \\x1f'|tojson(true) }} {{ d|tojson(sort_keys=true) }} {{ d|tojson(separators=(',', ':')) }} {{ []|tojson(indent=2) }} {{ {}|tojson(indent=2) }} {{ [[], [1]]|tojson(indent='-') }}
{{ html|tojson }} {{ '"\\\\/\\b\\f\\n\\r\\t\\x1f\\x7f'|tojson }} {{ 1.0|tojson }} {{ 1e30|tojson }} {{ none|tojson }} {{ true|tojson }} {{ (1, 2)|tojson }} {{ {1: 2, none: 3, true: 4, 1.5: 5}|tojson }}
{{ missing|tojson }}
{{ d.keys()|tojson }}
{{ html|e }} {{ html|escape ~ html }} {{ html|safe }} {{ html|e|e }} {{ 'x'|safe + 'y' }} {{ html|safe + html + (html|safe) }} {{ html + html|safe }} {{ ('a'|safe + html)|e }}
{{ none|map('upper')|list }} {{ 0|select|list }} {{ none|selectattr('a')|list }} {{ ''|reject('odd')|list }}
{{ 5 is odd }} {{ 4 is even }} {{ 6 is divisibleby 3 }} {{ 6 is divisibleby(4) }} {{ n is none }} {{ s is string }} {{ d is mapping }} {{ list is sequence }} {{ list is iterable }} {{ 5 is number }} {{ true is number }} {{ 5 is integer }} {{ true is integer }} {{ 5.0 is float }} {{ t is boolean }} {{ t is true }} {{ t is false }} {{ s is callable }} {{ s.upper is callable }} {{ d is iterable }} {{ d is sequence }} {{ 5 is iterable }} {{ none is sameas none }} {{ 1 is eq 1 }} {{ 1 is not eq 2 }} {{ 2 is gt 1 }} {{ 'a' is in 'abc' }} {{ 'a' is lower }} {{ 'aB' is upper }} {{ list is not string }} {{ missing is undefined }} {{ x is ge(2) and x is le 3 }}
{{ 1 is nosuchtest }}
{{ 1|nosuchfilter }}
{{ list.append(4) }}
{{ d.update({}) }}
{{ d.pop('a') }}
{{ ''.__class__ }}
{{ s.nosuchmethod() }}
{{ nosuchfunction() }}
{{ raise_exception('stop') }}
{{ strftime_now('%Y-%m-%d %H:%M:%S %j %A %B %%') }}
{{ dict(a=1, b=[2]) }} {{ dict({'a': 1}, a=2) }} {{ dict() }}
{% for x in list %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }}{{ x }},{% endfor %}
{% for x in list %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }};{% endfor %}
{% for x in list if x > 1 %}{{ loop.index }}/{{ loop.length }}:{{ x }} {% else %}none{% endfor %}
{% for x in [] %}{{ x }}{% else %}none{% endfor %} {% for x in missing %}{{ x }}{% else %}undefined{% endfor %}
{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %} {% for k in d %}{{ k }}{% endfor %} {% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}
{% for c in 'aé日' %}{{ c }}.{% endfor %} {% for x in nested %}{% for y in x %}{{ y }}{{ loop.last }} {% endfor %}{% endfor %}
{% for x in 5 %}{% endfor %}
{% for a, b in [1] %}{% endfor %}
{% for x in range(10) %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 5 %}{% break %}{% endif %}{{ x }}{% endfor %}
{% set y = 0 %}{% for x in list %}{% set y = y + x %}{{ y }} {% endfor %}{{ y }}
{% set ns = namespace(y=0, z='a') %}{% for x in list %}{% set ns.y = ns.y + x %}{% endfor %}{{ ns.y }}{{ ns.z }}{{ ns.q is defined }}
{% set ns = namespace({'a': 1}, b=2) %}{% set ns.c = [ns.a, ns.b] %}{{ ns.c }}
{% set q.x = 1 %}
{% set a, b = 1, 2 %}{{ a }}{{ b }} {% set c = 1, 2 %}{{ c }} {% set (p, r) = 'xy' %}{{ p }}{{ r }}
{% set block %}  text {{ i }}
 more{% endset %}[{{ block }}] {% set up | upper | trim %} abc {% endset %}[{{ up }}]
{% if 0 %}a{% elif '' %}b{% elif list %}c{% else %}d{% endif %} {% if missing %}x{% else %}y{% endif %}{% if t: %}z{% endif %}
{% macro m(a, b=2, c=a) %}{{ a }}{{ b }}{{ c }};{% endmacro %}{{ m(1) }}{{ m(1, c=3) }}{{ m(b=5, a=4) }}{{ m(1, 2, 3) }}{{ m() }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(q=2) }}
{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, x=3) }} {{ m() }}
{% macro m(x) %}<{{ caller() }}|{{ x }}>{% endmacro %}{% call m('v') %}inner {{ i }}{% endcall %}
{% macro m() %}{% for x in list %}{{ caller(x, loop.index) }}{% endfor %}{% endmacro %}{% call(a, b) m() %}[{{ a }}{{ b }}]{% endcall %}
{% macro fact(k) %}{{ k * (fact(k - 1)|int) if k > 1 else 1 }}{% endmacro %}{{ fact(5) }}
{% macro show() %}{{ later }}{% endmacro %}{% set later = 'set' %}{{ show() }} {% macro inner(x) %}{% set i = x %}{{ i }}{% endmacro %}{{ inner(1) }}{{ i }}
{{ m(*[1, 2]) }}
{% macro m(a, b, c=0) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(*[1, 2]) }}{{ m(1, **{'b': 5, 'c': 6}) }}{{ m(*[7], b=8) }}
{% with a = 1, b = i %}{{ a }}{{ b }}{% endwith %}{{ a }}
{% filter upper %}text {{ s }}{% endfilter %} {% filter replace('a', 'b')|upper %}aaa{% endfilter %}
{% raw %}{{ not }} {% nor this %}{% endraw %} {%- raw -%}  x  {%- endraw %}
{# a comment with {{ x }} and {% if %} #}a{#- b -#} c
  {%- if t -%}  a  {%- endif -%}  b
  {% if t %}
line
  {% endif %}
end
  {%+ if t %}x{% endif +%}
y
{{ 'a' -}}   {{- 'b' }}
{{ i }}{{ s }}
  {#- x #}
{% set x = 1 %} {% if x %}yes{% endif %}	tail
{{ {'a': {'b': [1, {'c': 2}]}}.a.b[1].c }} {{ ([1, 2] + [3])[-1] }} {{ ('a' ~ 'b')[0] }} {{ {'a': 1}['a'] }} {{ [1, 2,] }} {{ {'a': 1,} }}
{{ (s|upper).lower()[:3] }} {{ s|upper|lower|length }} {{ (-5)|abs }} {{ not s|length > 3 }}
{{ -s|length }}
{{ d.a is mapping and d.b is number }} {{ s is string and 'x' not in s or t }} {{ d.a.c|length > 1 and d.b == 1 }} {{ 'a' in d and d.a is defined }}
{% generation %}a{{ i }}{% endgeneration %}{% set q = 1 %}{% generation %}{% set q = 2 %}{{ q }}{% endgeneration %}{{ q }}
{{ range(200000) }}
{{ undefined_thing.x.y }}
{% unknown %}
{% if t %}
{{ 'open }}
{{ 1 + }}
{{ (1 }}
{{ 1 ] }}
{% for %}{% endfor %}
{{ 'a' | }}
{% set 1 = 2 %}
{% endif %}
{{ a b }}
{{ "\\u00e9" }}{{ 'tab\\there' }}{{ 'a\\
b' }}
{{ words[0].lower() ~ words[1] }}{{ rows[0]['k'] }}{{ rows[-1].v }}{{ rows[0].get('zz', 'dflt') }}
{{ messages is defined and messages }}{{ messages|length }}{{ messages[-1] is defined }}{{ (messages or [{'a': 'b'}])[0].a }}
{{ [1, 2, 3][1:]|first }}{{ 'a,b'.split(',')|last }}{{ (1, 2)|list }}{{ ((1)) }}{{ () }}
{{ 'x' ~ ('y' if t else 'z') ~ 'w' }}{{ ('y' if n else 'z') + 'w' }}{{ s if s is string else s|join(' ') }}
"""


def snippets():
    """One per line; a line that doesn't begin a template continues the one before."""
    lines, starts = SNIPPETS.strip("\n").split("\n"), ("{{", "{%", "{#", "[", " ", "'")
    found = []
    for line in lines:
        begins = line.startswith(("{{", "{%", "{#", "["))
        if begins or not found:
            found.append(line)
        else:
            found[-1] += "\n" + line
    return found


def rendered(template, variables, prompt):
    try:
        compiled = chat_template_utils._compile_jinja_template(template)
        return {"text": compiled.render(add_generation_prompt=prompt, **variables)}
    except Exception as problem:  # whatever Python raises, we refuse it
        return {"error": f"{type(problem).__name__}: {problem}"}


def main(folder):
    cases = []

    def add(name, template, variables, prompt=False):
        cases.append({"name": name, "template": template, "variables": variables, "prompt": prompt,
                      **rendered(template, variables, prompt)})

    for path in sorted(pathlib.Path(folder).glob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        for name, conversation in CONVERSATIONS.items():
            variables = {"bos_token": "<s>", "eos_token": "</s>", "tools": None, "documents": None, **conversation}
            for prompt in (False, True):
                add(f"{path.stem}: {name}{' with a prompt' if prompt else ''}", template, variables, prompt)
        add(f"{path.stem}: with Windows' lines", template.replace("\n", "\r\n"),
            {"bos_token": "<s>", "eos_token": "</s>", "tools": None, **CONVERSATIONS["short"]})
    for number, template in enumerate(snippets(), 1):
        add(f"snippet {number}", template, VARIABLES)
    print(json.dumps(cases))


if __name__ == "__main__":
    main(sys.argv[1])
