// The language of chat templates. Expected texts are those that Jinja 3.1 renders with trim_blocks and lstrip_blocks, as transformers sets
// it.
#include "text/jinja.h"

#include <gmock/gmock.h>
#include <sys/resource.h>

#include "files.h"

namespace mantissa::jinja_test {

using test::error_of;

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
  expect_each({{"{{ 1 + 5 % 3 - 4 }}", "-1"},
               {"{{ 1 ~ 5 % 3 }}", "12"},
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
  expect_each(
      {{"{{ 7 - 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ -6 % 3 }} {{ true + 1 }}", "5 1 2 0 2"},
       {"{{ 'a' ~ 1 ~ none ~ true }}", "a1NoneTrue"},
       {"{{ 'it\\'s' \" \\\"q\\\"\" }}", "it's \"q\""},
       {"{{ '\\n\\t\\\\\\d\\\n' }}", "\n\t\\\\d"},
       {"{{ not a == 4 and (false or a) }}", "3"},
       {"{{ 1 if a > 2 else 2 }}{{ 1 if a > 3 }}{{ 1 if a > 3 else 2 if a > 5 else 4 }}", "14"},
       {"{{ 1 < 2 <= 2 != 3 }} {{ 3 > 2 > 2 }} {{ 'a' < 'b' }}", "True False True"},
       {"{{ 2 in l }} {{ 4 not in l }} {{ 'ex' in s }} {{ 'k' in d }} {{ 'x' in nothing }}", "True True True True False"},
       {"{{ l[0] }}{{ l[-1] }}{{ l[5] }}{{ d['k'] }}{{ d.k }}{{ d.x }}", "13vv"},
       {"{{ l[1:] | join(',') }} {{ l[::-1] | join }} {{ l[:-1] | join }} {{ s[1:3] }} {{ s[::-1] }} {{ l[9:] | length }}",
        "2,3 321 12 ex txeT 0"},
       {"{{ [1, 'b', (2, 3)] | length }}{{ {'x': 1, 'y': {}} | length }}{{ () | length }}", "320"},
       {"{{ nothing }}{{ nothing is defined }}{{ d.n is none }}{{ d.n is defined }}", "FalseTrueTrue"},
       {"{{ [1, 2] == [1, 2] }} {{ {'k': 'v', 'n': none} == d }} {{ true == 1 }} {{ 'a' == 1 }}", "True True True False"},
       {"{{ 2.0 }} {{ -0.5 }} {{ 1.5 < 2 }} {{ -a }} {{ +a }} {{ 'a' + 'b' }} {{ (l + [4]) | length }}", "2.0 -0.5 True -3 3 ab 4"}});
}

TEST(Jinja, StatementsKeepTheirNames) {
  expect_each(
      {{"{% for i in l %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}", "1/3,2/3,3/3"},
       {"{% for i in l if i != 2 %}{{ i }}{{ loop.first }}{{ loop.revindex0 }} {% endfor %}", "1True1 3False0 "},
       {"{% for i in [] %}a{% else %}none{% endfor %}", "none"},
       {"{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }}{% endfor %}", "k=v;n=None;kn"},
       {"{% for i in range(1, 8) %}{% if i == 3 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "124"},
       {"{% for i in l %}{{ loop.previtem }}<{{ i }}<{{ loop.nextitem }} {% endfor %}", "<1<2 1<2<3 2<3< "},
       {"{% for c in 'h\xC3\xA9' %}[{{ c }}]{% endfor %}", "[h][\xC3\xA9]"},
       {"{% set x = 1 %}{% for i in l %}{% set x = i %}{% endfor %}{{ x }}", "1"},
       {"{% set n = namespace(x=1) %}{% for i in l %}{% set n.x = n.x + i %}{% endfor %}{{ n.x }}", "7"},
       {"{% if a == 1 %}1{% elif a == 3 %}{% set x = 'if' %}3{% else %}0{% endif %}{{ x }}", "3if"},
       {"{% set t %}b{{ a }}{% endset %}{{ t }}{% for x, y in [[1, 2]] %}{{ y }}{{ x }}{% endfor %}", "b321"},
       {"{% macro f(x, y='d', z='e') -%} {{ x }}{{ y }}{{ z }}{{ a }} {%- endmacro %}{{ f(1) }} {{ f(1, 2) }} {{ f(y=5, x=4) }}",
        "1de3 12e3 45e3"},
       {"{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}", "3210"},
       {"{% macro f() %}{{ x }}{% endmacro %}{% for x in l %}{{ f() }}{% endfor %}.", "."},
       {"{% generation %}a{% endgeneration %}", "a"}});
}

TEST(Jinja, FiltersTestsAndMethodsAreThoseThatTemplatesUse) {
  expect_each(
      {{"{{ '  a b ' | trim }}|{{ ' a '.strip() }}|{{ '\n\na\n'.lstrip('\n') }}|{{ 'a\n\n'.rstrip('\n') }}|", "a b|a|a\n|a|"},
       {"{{ s | upper }}{{ s | lower }}{{ 'two WORDS' | capitalize }}{{ s.upper() }}", "TEXTtextTwo wordsTEXT"},
       {"{{ 'a</t>b</t>c'.split('</t>') | join('|') }} {{ 'a,b,c'.split(',', 1) | last }} {{ 'a,b'.split(',', 0) | length }}",
        "a|b|c b,c 1"},
       {"{{ s.startswith('Te') }}{{ s.endswith('x') }}", "TrueFalse"},
       {"{{ 'aXbX'.replace('X', '--') }}{{ 'aXbX' | replace('X', '') }}", "a--b--ab"},
       {"{{ 'abcbcd' | replace('bc', 'x') }} {{ 'azAZ' | upper }} {{ 'azAZ' | lower }} {{ true is number }}", "axxd AZAZ azaz True"},
       {"{{ [1] is mapping }} {{ {} is mapping }} {{ 2.0 }}", "False True 2.0"},
       {"[{{ '' | default('z', false) }}] {{ 'x' or 'y' }} {{ '' and 'y' }}|", "[] x |"},
       {"{% macro m(q) %}{{ q }}{% endmacro %}{{ m('a') }} {{ q is defined }}", "a False"},
       {"{{ d.get('k') }}{{ d.get('x') }}{{ d.get('x', 5) }}{{ d.keys() | join }}{{ d.values() | list | length }}", "vNone5kn2"},
       {"{{ d | tojson }} {{ l | tojson }} {{ 'q\"\n' | tojson }} {{ 1.5 | tojson }} {{ true | tojson }}",
        "{\"k\": \"v\", \"n\": null} [1, 2, 3] \"q\\\"\\n\" 1.5 true"},
       {"{{ {'a': [1]} | tojson(indent=2) }}", "{\n  \"a\": [\n    1\n  ]\n}"},
       {"{{ nothing | default('x') }}{{ '' | default('x') }}{{ '' | default('x', true) }}{{ a | d(1) }}", "xx3"},
       {"{{ l | first }}{{ l | last }}{{ l | reverse | join }}{{ l | length }}{{ s | count }}{{ [] | first }}{{ 'abc' | reverse }}",
        "1332134cba"},
       {"{{ [{'r': 1}, {'r': 2}] | selectattr('r', 'equalto', 2) | list | length }}{{ [{'r': 1}, {}] | rejectattr('r') | list | length }}",
        "11"},
       {"{{ [{'r': 1}, {'r': 2}] | map(attribute='r') | join }}{{ [0, 1] | select | join }}", "121"},
       {"{{ s is string }}{{ d is mapping }}{{ l is iterable }}{{ a is number }}{{ a is integer }}{{ 1.5 is float }}{{ d is string }}",
        "TrueTrueTrueTrueTrueTrueFalse"},
       {"{{ true is integer }}{{ 1.5 is integer }}{{ 1 is float }}", "FalseFalseFalse"},
       {"{{ true is true }}{{ 1 is true }}{{ a is not none }}{{ a is eq 3 }}{{ a is in [3] }}{{ a is not defined or 1 }}",
        "TrueFalseTrueTrueTrue1"},
       {"{{ ['x', 'y'] | reject('equalto', 'x') | join }}{{ {'b': 1, 'a': 2} | list | join }}", "yba"}});
}

TEST(Jinja, ArgumentsAreTakenAsInJinja) {
  expect_each(
      {{"{{ 'xax' | trim('x') }}|{{ '\xC3\xA9 \xC3\xA8'.strip('\xC3\xA8 ') }}|{{ 'xaxx'.lstrip('x') }}|{{ 'xaxx'.rstrip('x') }}",
        "a|\xC3\xA9|axx|xa"},
       {"{{ 'a-b-c'.split('-', 1) | join('|') }} {{ 'a,b,c'.split(sep=',', maxsplit=1) | join('|') }} {{ ''.split(',') | length }}",
        "a|b-c a|b,c 1"},
       {"{{ 'aX' | replace(old='X', new='y') }} {{ l | join(d='-') }} {{ '' | default(boolean=true, default_value='z') }}", "ay 1-2-3 z"},
       {"{{ d | tojson(indent=none) }} {{ [1, {}] | tojson(indent=0) }} {{ [1] | tojson(false, 1) }}",
        "{\"k\": \"v\", \"n\": null} [\n1,\n{}\n] [\n 1\n]"},
       {"{{ {'a': [1, {'b': [], 'c': 2}]} | tojson(indent=2) }}",
        "{\n  \"a\": [\n    1,\n    {\n      \"b\": [],\n      \"c\": 2\n    }\n  ]\n}"},
       {"{% macro f(x, y=x ~ z, z=3) %}{{ x }}{{ y }}{{ z }} {% endmacro %}{{ f(1) }}{{ f(1, z=5) }}{{ f(1, 2) }}", "113 1155 123 "},
       {"{{ namespace(b=2).b }}{{ dict(b=3).b }}", "23"}});
  EXPECT_EQ(rendered("{{ d | tojson }}", R"({"d": {"role": 1, "content": 2}})"), R"({"role": 1, "content": 2})") << "as it stands there";
}

TEST(Jinja, WhiteSpaceIsThatOfPython) {
  expect_each({{"{{ ' a\xC2\xA0'.strip() }}|{{ '\xE3\x80\x80"
                "a\x1C' | trim }}|{{ '\xE2\x80\x83'.strip() }}|",
                "a|a||"},
               {"a{%- if true %}\xE3\x80\x80 {%- endif %}\xE3\x80\x80 {{-\xE3\x80\x80"
                "1\xE3\x80\x80}}",
                "a1"},
               {"a\rb\r\nc", "a\nb\nc"}});
}

TEST(Jinja, NamesAreThoseOfJinja) {
  expect_each({{"{% set n = namespace(x=1) %}{% set n.x %}b{{ a }}{% endset %}{{ n.x }}", "b3"},
               {"{% set t %}{% set x = 1 %}{{ x }}{% endset %}[{{ t }}{{ x }}]", "[1]"},
               {"{{ nothing is iterable }}{{ nothing is sequence }}{{ nothing is mapping }}{{ nothing | items | list | length }}",
                "TrueTrueFalse0"},
               {"{{ {'k': 'v'} == d }}{{ d == {'k': 'v', 'm': none} }}{{ {'n': none, 'k': 'v'} == d }}", "FalseFalseTrue"},
               {"{{ 'a' if 1 else 'b' if 0 else 'c' }}{% for i in l if i > 9 %}x{% else %}none{% endfor %}{% for i in l %}{{ loop.revindex "
                "}}{% endfor %}",
                "anone321"}});
}

// Nothing that a template gives is passed over.
TEST(Jinja, ArgumentsThatAreNotKnownAreNamed) {
  const std::string macro = "{% macro f(x, y=2) %}{{ x }}{% endmacro %}";
  const Cases cases = {{"{{ l | first(1) }}", "first takes 0 arguments"},
                       {"{{ l | map(attribute='x', q=1) }}", "map takes no argument q"},
                       {"{{ ['a'] | map('upper') }}", "map without an attribute is not supported"},
                       {"{{ l | map(attribute='a.b') }}", "the attribute a.b is not supported"},
                       {"{{ l | select(x=1) }}", "the argument x of select is not supported"},
                       {"{{ l | selectattr }}", "selectattr needs 1 argument"},
                       {"{{ l | join(',', attribute='r') }}", "join takes no argument attribute"},
                       {"{{ 'a' | replace('a', 'b', old='c') }}", "replace takes no argument old twice"},
                       {"{{ 'a' | replace('a', 'b', 1) }}", "replace takes 2 arguments"},
                       {"{{ 'a' | replace('a') }}", "replace needs 2 arguments"},
                       {"{{ 'a'.replace('', 'b') }}", "replace needs a text that is not empty"},
                       {"{{ 'a' | trim(chars='x', chars='y') }}", "expected an argument with a new name, got \"chars\""},
                       {"{{ 'a' | tojson(ensure_ascii=true) }}", "the argument ensure_ascii of tojson is not supported"},
                       {"{{ l | tojson(indent='x') }}", "tojson takes an indent from 0 to 16"},
                       {"{{ l | tojson(separators=[',', ':']) }}", "tojson takes no argument separators"},
                       {"{{ a | default(1, 2, 3) }}", "default takes 2 arguments"},
                       {"{{ a is defined(1) }}", "the test defined with 1 argument is not supported"},
                       {"{{ a is eq(b=3) }}", "expected one argument of a test"},
                       {"{{ 'abc'.startswith('b', 1) }}", "startswith takes 1 argument"},
                       {"{{ 'a'.upper(1) }}", "upper takes 0 arguments"},
                       {"{% for a, b in [[1, 2, 3]] %}{% endfor %}", "there are 3 values for 2 names"},
                       {"{{ 'a b'.split() }}", "split needs 1 argument"},
                       {"{{ 'a'.split(',', 'x') }}", "split needs a separator that is not empty, and an integer"},
                       {"{{ 'a'.strip(chars='a') }}", "strip takes no argument chars"},
                       {"{{ d.get('x', default=1) }}", "get takes no argument default"},
                       {"{{ d.items(1) }}", "items takes 0 arguments"},
                       {"{{ d.items }}", "the method items without a call is not supported"},
                       {"{{ range(1, 2, 3) }}", "range takes 2 arguments"},
                       {"{{ range('a') }}", "range needs integers up to 100000"},
                       {"{{ namespace(1) }}", "namespace with an argument without a name is not supported"},
                       {"{% set f = range %}{{ f(3) }}", "the function f is not supported"},
                       {"{% set strftime_now = range %}{{ strftime_now('%d') }}", "the function strftime_now is not supported"},
                       {"{{ 'h\xC3\xA9' | upper }}", "upper of non-ASCII text is not supported"},
                       {"{{ 'h\xC3\xA9'.lower() }}", "lower of non-ASCII text is not supported"},
                       {"{{ '12' | int }}", "the filter int is not supported"},
                       {"{{ 2 ** 3 }}", "the operator ** is not supported"},
                       {"{{ 7 // 2 }}", "the operator // is not supported"},
                       {"{{ 7 % 0 }}", "the operator % 0 or less is not supported"},
                       {"{{ 1.5 + 1 }}", "cannot compute a number + an integer"},
                       {"{{ '\\u00e9' }}", "the escape \\u is not supported"},
                       {"{{ l[::2] }}", "a slice with a step other than [::-1] is not supported"},
                       {"{{ d[1:] }}", "cannot take a slice of an object"},
                       {"{% set d.k = 1 %}", "d is not a namespace"},
                       {"{% break %}", "break is not inside a loop"},
                       {"{% for i in l %}{% set x %}{% continue %}{% endset %}{% endfor %}", "continue is not inside a loop"},
                       {macro + "{{ f(1, x=2) }}", "f takes no argument x twice"},
                       {macro + "{{ f(1, z=2) }}", "f takes no argument z"},
                       {macro + "{{ f(1, 2, 3) }}", "f takes 2 arguments"},
                       {"{% for i in l %}" + macro + "{% endfor %}", "a macro within a loop, a macro or a set is not supported"},
                       {"{% set a.b %}{% endset %}", "a is not a namespace"}};
  for (const auto& [source, what] : cases)
    EXPECT_EQ(std::string(error_of([&, &source = source] { rendered(source); }).what()), "line 1: " + what) << source;
}

TEST(Jinja, WhatIsNoTemplateOrNotKnownIsNamedWithItsLine) {
  const Cases cases = {{"{{ nothing.x\n\n}}", "line 1: nothing is undefined"},
                       {"a\n{{ 1\n| unheard\n}}", "line 3: the filter unheard is not supported"},
                       {"{{ [1,\n 2 - 'a',\n 3] }}", "line 2: cannot compute an integer - a string"},
                       {"{{ 1 is\n unheard(\n) }}", "line 2: the test unheard is not supported"},
                       {"{{ unheard(\n1\n) }}", "line 1: the function unheard is not supported"},
                       {"\n{% set a.b = 1\n%}", "line 2: a is not a namespace"},
                       {"\n{% for x in 1\n%}\n{% endfor %}", "line 2: cannot go through an integer"},
                       {"{% include\n'x' %}", "line 1: the statement include is not supported"},
                       {"a\n{{ 1 | unheard }}", "line 2: the filter unheard is not supported"},
                       {"{{ 1 is unheard }}", "line 1: the test unheard is not supported"},
                       {"{% include 'x' %}", "line 1: the statement include is not supported"},
                       {"\n\n{{ unheard(1) }}", "line 3: the function unheard is not supported"},
                       {"{{ 'a'.unheard() }}", "line 1: the function unheard is not supported"},
                       {"{{ l.append(4) }}", "line 1: the function append is not supported"},
                       {"{{ raise_exception('No system!') }}", "line 1: the template raised an exception: No system!"},
                       {"{{ nothing.x }}", "line 1: nothing is undefined"},
                       {"{{ 'a' + 1 }}", "line 1: cannot compute a string + an integer"},
                       {"{{ l }}", "line 1: printing a list is not supported"},
                       {"{{ 9223372036854775807 + 1 }}", "line 1: an integer beyond 64 bits"},
                       {"{{ 99999999999999999999 }}", "line 1: 99999999999999999999 is not a number"},
                       {"{{ 1", "line 1: a tag is not closed"},
                       {"{# a", "line 1: a comment is not closed"},
                       {"{{ 'a }}", "line 1: a string is not closed"},
                       {"{{ (1 }}", "line 1: \"}\" closes nothing"},
                       {"{{ 1 2 }}", "line 1: expected }}, got \"2\""},
                       {"{{ ? }}", "line 1: \"?\" is not expected"},
                       {"{% if a %}\n\nb", "line 3: expected endif"},
                       {"{% endif %}", "line 1: the statement endif is not supported"},
                       {"{% for x l %}{% endfor %}", "line 1: expected in, got \"l\""},
                       {"{% set a.b = 1 %}", "line 1: a is not a namespace"},
                       {"{% for a, b in [[1]] %}{% endfor %}", "line 1: there are 1 values for 2 names"},
                       {"{% set a, b %}{% endset %}", "line 1: expected the end of the block, got \",\""},
                       {"{% set a.b %}\n{% endset %}", "line 1: a is not a namespace"},
                       {"\xFF", "line 1: the template is not UTF-8"},
                       {"a\n{{ raise_exception('line 7: x') }}", "line 2: the template raised an exception: line 7: x"}};
  for (const auto& [source, what] : cases) {
    const Error error = error_of([&, &source = source] { rendered(source); });
    EXPECT_EQ(error.code(), ExitCode::data) << source;
    EXPECT_EQ(error.what(), what) << source;
  }
}

void expect_refusal(const std::string& source, const std::string& what) {
  const Error error = error_of([&] { rendered(source); });
  EXPECT_EQ(error.code(), ExitCode::data) << source.substr(0, 80);
  EXPECT_EQ(error.what(), "line 1: " + what) << source.substr(0, 80);
}

TEST(Jinja, NestingIsBounded) {
  const std::string deep = "more than 200 levels deep", values = "lists and objects more than 32 levels deep";
  expect_refusal("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", deep);
  for (const char* const part : {"not ", "1 + ", "- ", "1 < (", "1 if 0 else "})
    expect_refusal("{{ " + test::repeated(part, 20000) + "1" + (part[2] == '<' ? std::string(20000, ')') : "") + " }}", deep);
  for (const char* const part : {".a", "|d", "()", "[0]", " is none", " if 1"})
    expect_refusal("{{ a" + test::repeated(part, 20000) + " }}", deep);
  expect_refusal(test::repeated("{% if 1 %}", 20000), deep);
  expect_refusal("{{ " + std::string(20000, '(') + std::string(20000, ')') + " }}", deep);
  expect_refusal("{{ " + std::string(20000, '[') + std::string(20000, ']') + " }}", deep);
  expect_refusal("{% set n = namespace(a=[]) %}{% for i in range(99999) %}{% set n.a = [n.a] %}{% endfor %}", values);
  expect_refusal("{% set a = [] %}" + test::repeated("{% set a=[a] %}", 15000), values);
  expect_refusal("{% set a = {} %}" + test::repeated("{% set a={'a': a} %}", 12000), values);
  for (const char* const holder : {"n", "[n]", "{'n': n}", "namespace(n=n)", "dict(n=n)"})
    expect_refusal(text("{% set n = namespace() %}{% set n.n = ", holder, " %}"),
                   "a namespace in a list, an object or a namespace is not supported");
}

TEST(Jinja, WorkAndMemoryAreBounded) {
  const auto peak = [] {
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    return used.ru_maxrss;  // KiB
  };
  const auto before = peak();
  const std::string large = "{% set s = 'x' %}" + test::repeated("{% set s = s + s %}", 20), much = "the template does too much",
                    alike = "{% set a = [1] %}{% set b = [1] %}" +
                            test::repeated("{% set a = [a,a,a,a,a,a,a,a] %}{% set b = [b,b,b,b,b,b,b,b] %}", 25),
                    members = "{% set d = {'0': 0" + [] {
                      std::string all;
                      for (int i = 1; i < 9999; ++i) all += text(", '", i, "': 1");
                      return all;
                    }() + "} %}";
  for (const char* const repeatedly : {"s.upper()",
                                       "s | upper",
                                       "s.strip()",
                                       "s.strip(s)",
                                       "s | trim",
                                       "s.split('x')",
                                       "s.replace('y', '')",
                                       "s.replace('x', s)",
                                       "s[0]",
                                       "s[1:]",
                                       "s | list",
                                       "s | length",
                                       "s | reverse",
                                       "s | string",
                                       "s | tojson",
                                       "'y' in s",
                                       "s.startswith(s)",
                                       "s == s ~ ''",
                                       "s < s ~ ''",
                                       "(s ~ 'y') in s",
                                       "s ~ s",
                                       "[s] | join(s)",
                                       "{}[s]",
                                       "range(99999)",
                                       "range(9999) + range(9999)",
                                       "range(9999) | select('eq', 1)"})
    expect_refusal(text(large, "{% for i in range(99999) %}{% set t = ", repeatedly, " %}{% endfor %}"), much);
  for (const char* const one : {"a == a", "a == b", "a != b", "a in [b]", "[a] | select('equalto', b)", "a | tojson"})
    expect_refusal(text(alike, "{{ ", one, " }}"), much);
  expect_refusal(members + "{% for i in range(99999) %}{% set t = '9998' in d %}{% endfor %}", much);
  expect_refusal("{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
                 much);
  expect_refusal("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(18) }}", much);
  EXPECT_EQ(rendered(large + "{{ [" + test::repeated("s,", 60000) + "] | length }}"), "60000") << "entries share their text";
  EXPECT_EQ(rendered("{{ 1" + test::repeated("<(1", 40) + std::string(40, ')') + " }}"), "False") << "a tree as large as its source";
  EXPECT_EQ(rendered("{{ " + std::string(50, '(') + "1" + test::repeated(")<1", 50) + " }}"), "True");
  EXPECT_LT(peak() - before, 1 << 20);
}

TEST(Jinja, SourceAndOutputAreBounded) {
  expect_refusal(std::string(300 << 10, 'a'), "the template has more than 262144 bytes");
  expect_refusal("{% set s = 'x' %}" + test::repeated("{% set s = s + s %}", 20) + "{{ s }}{{ s }}{{ s }}{{ s }}{{ s }}",
                 "the template writes more than 4194304 bytes");
  const std::string refusal = error_of([] { rendered("{{ raise_exception('" + std::string(9999, 'x') + "') }}"); }).what();
  EXPECT_LT(refusal.size(), 1100U);
}

TEST(Jinja, TheTimeIsAskedOfTheCaller) {
  EXPECT_EQ(render_jinja("{{ strftime_now('%d') }}", {.strftime_now = [](const std::string& format) { return format + "!"; }}), "%d!");
  EXPECT_EQ(rendered("{{ strftime_now is defined }}"), "False");
}

}  // namespace mantissa::jinja_test
