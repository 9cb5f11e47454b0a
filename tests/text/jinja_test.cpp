// The language of chat templates. Expected texts are those that Jinja 3.1 renders with trim_blocks and lstrip_blocks, as transformers sets
// it.
#include "mantissa/text/jinja.h"

#include <gmock/gmock.h>

#include "files.h"

namespace mantissa::jinja_test {

using test::error_of;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string rendered(const std::string& source,
                     const std::string& variables = R"({"a": 3, "s": "Text", "l": [1, 2, 3], "d": {"k": "v", "n": null}})") {
  return render_jinja(source, {.variables = parse_json(variables, "variables")});
}

using Cases = std::vector<std::pair<std::string, std::string>>;
void expect_each(const Cases& cases) {
  for (const auto& [source, expected] : cases) EXPECT_EQ(rendered(source), expected) << source;
}

TEST(Jinja, BlocksTakeTheirLineEndAndTheBlanksBeforeThem) {
  expect_each({{"a\n{% if true %}\nb\n{% endif %}\nc\n", "a\nb\nc"},
               {"a\n  {% if true %}  \n b{% endif %}", "a\n  \n b"},
               {"a  {% if true %}b{% endif %}", "a  b"},
               {"a\n  {%+ if true %}b{% endif %}", "a\n  b"},
               {"a\n  {{ 1 }}\nb", "a\n  1\nb"},
               {"a \n {{- 1 -}} \n b", "a1b"},
               {"a \n {%- if true -%} \n b \n {%- endif +%}\n c", "ab\n c"},
               {"a\n  {# no #}\nb{#- no -#} c{# no +#}\nd", "a\nbc\nd"},
               {"  {% set x = 1 %}{% set y = 2 %}\n{{ x }}{{ y }}", "12"},
               {"a\r\nb\r\n", "a\nb"},
               {"a\n\n", "a\n"},
               {"{", "{"},
               {"{ {x} }", "{ {x} }"}});
}

TEST(Jinja, OperatorsBindAsInJinja) {
  expect_each({{"{{ 1 + 2 * 3 - 4 }}", "3"},
               {"{{ 1 ~ 2 * 3 }}", "16"},
               {"{{ 'a' + 'b' ~ 1 }}", "ab1"},
               {"{{ l | length - 1 }}", "2"},
               {"{{ -a | string }}", "-3"},
               {"{{ not a in l }}", "False"},
               {"{{ 1 == 1 and 2 == 3 or a }}", "3"},
               {"{{ 'x' if false else 'y' ~ 'z' }}", "yz"},
               {"{{ d.k | upper ~ '!' }}", "V!"},
               {"{{ d.k is defined and d.k }}", "v"}});
}

TEST(Jinja, ValuesAreThoseOfPython) {
  expect_each({{"{{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2 ** 3 }}", "3 -4 1 2 3.5 8"},
               {"{{ 'a' ~ 1 ~ none ~ true }}", "a1NoneTrue"},
               {"{{ 'it\\'s' \" \\\"q\\\"\" }}", "it's \"q\""},
               {"{{ '\\n\\t\\\\\\x41\\u00e9\\d' }}", "\n\t\\A\xC3\xA9\\d"},
               {"{{ not a == 4 and (false or a) }}", "3"},
               {"{{ 1 if a > 2 else 2 }}{{ 1 if a > 3 }}{{ 1 if a > 3 else 2 if a > 5 else 4 }}", "14"},
               {"{{ 1 < 2 <= 2 != 3 }} {{ 3 > 2 > 2 }} {{ 'a' < 'b' }}", "True False True"},
               {"{{ 2 in l }} {{ 4 not in l }} {{ 'ex' in s }} {{ 'k' in d }} {{ 'x' in nothing }}", "True True True True False"},
               {"{{ l[0] }}{{ l[-1] }}{{ l[5] }}{{ d['k'] }}{{ d.k }}{{ d.x }}{{ l.1 }}", "13vv2"},
               {"{{ l[1:] | join(',') }} {{ l[::-1] | join }} {{ l[:-1] | join }} {{ s[1:3] }} {{ s[::-1] }} {{ l[9:] | length }}",
                "2,3 321 12 ex txeT 0"},
               {"{{ [1, 'b', (2, 3)] | length }}{{ {'x': 1, 'y': {}} | length }}{{ () | length }}", "320"},
               {"{{ nothing }}{{ nothing is defined }}{{ d.n is none }}{{ d.n is defined }}", "FalseTrueTrue"},
               {"{{ [1, 2] == [1, 2] }} {{ {'k': 'v', 'n': none} == d }} {{ true == 1 }} {{ 'a' == 1 }}", "True True True False"},
               {"{{ 1.5 + 1 }} {{ 2.0 }} {{ -a }} {{ +a }} {{ 'a' + 'b' }} {{ (l + [4]) | length }}", "2.5 2.0 -3 3 ab 4"}});
}

TEST(Jinja, StatementsKeepTheirNames) {
  expect_each(
      {{"{% for i in l %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}", "1/3,2/3,3/3"},
       {"{% for i in l if i != 2 %}{{ i }}{{ loop.first }}{{ loop.revindex0 }} {% endfor %}", "1True1 3False0 "},
       {"{% for i in [] %}a{% else %}none{% endfor %}", "none"},
       {"{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }}{% endfor %}", "k=v;n=None;kn"},
       {"{% for i in range(1, 8, 2) %}{% if i == 3 %}{% continue %}{% endif %}{% if i == 7 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "15"},
       {"{% for i in l %}{{ loop.previtem }}<{{ i }}<{{ loop.nextitem }} {% endfor %}", "<1<2 1<2<3 2<3< "},
       {"{% for c in 'h\xC3\xA9' %}[{{ c }}]{% endfor %}", "[h][\xC3\xA9]"},
       {"{% set x = 1 %}{% for i in l %}{% set x = i %}{% endfor %}{{ x }}", "1"},
       {"{% set n = namespace(x=1) %}{% for i in l %}{% set n.x = n.x + i %}{% endfor %}{{ n.x }}", "7"},
       {"{% if a == 1 %}1{% elif a == 3 %}{% set x = 'if' %}3{% else %}0{% endif %}{{ x }}", "3if"},
       {"{% set x, y = 1, 2 %}{{ y }}{{ x }}{% set t %}b{{ a }}{% endset %}{{ t }}", "21b3"},
       {"{% macro f(x, y='d', z='e') -%} {{ x }}{{ y }}{{ z }}{{ a }} {%- endmacro %}{{ f(1) }} {{ f(1, 2) }} {{ f(y=5, x=4) }}",
        "1de3 12e3 45e3"},
       {"{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}", "3210"},
       {"{% macro f() %}{{ x }}{% endmacro %}{% for x in l %}{{ f() }}{% endfor %}.", "."},
       {"{% generation %}a{% endgeneration %}", "a"}});
}

TEST(Jinja, FiltersTestsAndMethodsAreThoseThatTemplatesUse) {
  expect_each(
      {{"{{ '  a b ' | trim }}|{{ ' a '.strip() }}|{{ '\n\na\n'.lstrip('\n') }}|{{ 'a\n\n'.rstrip('\n') }}|", "a b|a|a\n|a|"},
       {"{{ s | upper }}{{ s | lower }}{{ 'two WORDS' | title }}{{ 'two WORDS' | capitalize }}{{ s.upper() }}",
        "TEXTtextTwo WordsTwo wordsTEXT"},
       {"{{ 'a</t>b</t>c'.split('</t>') | join('|') }} {{ ' a  b '.split() | join('|') }} {{ 'a,b,c'.split(',', 1) | last }}",
        "a|b|c a|b b,c"},
       {"{{ s.startswith('Te') }}{{ s.endswith('x') }}{{ s.startswith(('x', 'T')) }}{{ s.find('x') }}{{ s.find('q') }}",
        "TrueFalseTrue2-1"},
       {"{{ 'aXbX'.replace('X', '--') }}{{ 'aXbX' | replace('X', '') }}", "a--b--ab"},
       {"{{ d.get('k') }}{{ d.get('x') }}{{ d.get('x', 5) }}{{ d.keys() | join }}{{ d.values() | list | length }}", "vNone5kn2"},
       {"{{ d | tojson }} {{ l | tojson }} {{ 'q\"\n' | tojson }} {{ 1.5 | tojson }} {{ true | tojson }}",
        "{\"k\": \"v\", \"n\": null} [1, 2, 3] \"q\\\"\\n\" 1.5 true"},
       {"{{ {'a': [1]} | tojson(indent=2) }}", "{\n  \"a\": [\n    1\n  ]\n}"},
       {"{{ nothing | default('x') }}{{ '' | default('x') }}{{ '' | default('x', true) }}{{ a | d(1) }}", "xx3"},
       {"{{ l | first }}{{ l | last }}{{ l | reverse | join }}{{ l | length }}{{ s | count }}{{ '12' | int + 1 }}{{ 'x' | int }}{{ '1.5' | "
        "float }}",
        "1332134"
        "1301.5"},
       {"{{ [{'r': 1}, {'r': 2}] | selectattr('r', 'equalto', 2) | list | length }}{{ [{'r': 1}, {}] | rejectattr('r') | list | length }}",
        "11"},
       {"{{ [{'r': 1}, {'r': 2}] | map(attribute='r') | join }}{{ ['a'] | map('upper') | join }}{{ [0, 1] | select | join }}", "12A1"},
       {"{{ s is string }}{{ d is mapping }}{{ l is iterable }}{{ a is number }}{{ a is integer }}{{ 1.5 is float }}{{ d is string }}",
        "TrueTrueTrueTrueTrueTrueFalse"},
       {"{{ a is odd }}{{ a is even }}{{ true is true }}{{ 1 is true }}{{ a is not none }}{{ a is eq 3 }}{{ a is in [3] }}{{ a is not "
        "defined or 1 }}",
        "TrueFalseTrueFalseTrueTrueTrue1"}});
}

TEST(Jinja, WhatIsNoTemplateOrNotKnownIsNamedWithItsLine) {
  const Cases cases = {{"a\n{{ 1 | unheard }}", "line 2: the filter unheard is not known here"},
                       {"{{ 1 is unheard }}", "line 1: the test unheard is not known here"},
                       {"{% include 'x' %}", "line 1: the statement include is not known here"},
                       {"\n\n{{ unheard(1) }}", "line 3: the function unheard is not known here"},
                       {"{{ 'a'.unheard() }}", "line 1: the function unheard is not known here"},
                       {"{{ l.append(4) }}", "line 1: the function append is not known here"},
                       {"{{ raise_exception('No system!') }}", "line 1: the template refuses it: No system!"},
                       {"{{ nothing.x }}", "line 1: nothing is undefined"},
                       {"{{ 'a' + 1 }}", "line 1: cannot compute a string + an integer"},
                       {"{{ l }}", "line 1: a list is printed, which is not known here"},
                       {"{{ 1 // 0 }}", "line 1: division by zero"},
                       {"{{ 9223372036854775807 + 1 }}", "line 1: an integer beyond 64 bits"},
                       {"{{ 99999999999999999999 }}", "line 1: 99999999999999999999 is no number"},
                       {"{{ 1", "line 1: a tag has no end"},
                       {"{# a", "line 1: a comment has no end"},
                       {"{{ 'a }}", "line 1: a string has no end"},
                       {"{{ (1 }}", "line 1: \"}\" closes nothing"},
                       {"{{ 1 2 }}", "line 1: expected }}, got \"2\""},
                       {"{{ ? }}", "line 1: \"?\" is not expected"},
                       {"{% if a %}\n\nb", "line 3: expected endif"},
                       {"{% endif %}", "line 1: the statement endif is not known here"},
                       {"{% for x l %}{% endfor %}", "line 1: expected in, got \"l\""},
                       {"{% set a.b = 1 %}", "line 1: a is no namespace"},
                       {"{% for a, b in [[1]] %}{% endfor %}", "line 1: there are 1 values for 2 names"}};
  for (const auto& [source, what] : cases) {
    const Error error = error_of([&, &source = source] { rendered(source); });
    EXPECT_EQ(error.code(), ExitCode::data) << source;
    EXPECT_EQ(error.what(), what) << source;
  }
}

TEST(Jinja, HostileTemplatesEndWithAnError) {
  const std::string
      doubling = "{% set n = namespace(s='0123456789') %}{% for i in range(64) %}{% set n.s = n.s + n.s %}{% endfor %}",
      loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}x{% endfor %}{% endfor %}{% endfor %}",
      recursion = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", cycle = "{% set n = namespace() %}{% set n.n = n %}{{ n | tojson }}";
  for (const std::string& source :
       {doubling, loops, recursion, cycle, "{{ " + std::string(100000, '(') + " }}", "{{ " + test::repeated("not ", 100000) + "1 }}",
        "{{ " + test::repeated("1 + ", 100000) + "1 }}", test::repeated("{% if 1 %}", 100000),
        "{{ " + test::repeated("- ", 100000) + "1 }}", "{{ a" + test::repeated(".a", 100000) + " }}",
        "{{ " + test::repeated("[", 100000) + " }}", std::string(3 << 20, 'a')}) {
    EXPECT_EQ(error_of([&] { rendered(source); }).code(), ExitCode::data) << source.substr(0, 80);
  }
}

TEST(Jinja, TheTimeIsAskedOfTheCaller) {
  EXPECT_EQ(render_jinja("{{ strftime_now('%d') }}", {.strftime_now = [](const std::string& format) { return format + "!"; }}), "%d!");
  EXPECT_EQ(rendered("{{ strftime_now is defined }}"), "False");
}

}  // namespace mantissa::jinja_test
