from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from tritium.llm.tokenizer.meter import OverBudget
from tritium.llm.tokenizer.sandbox import BUDGET_UNITS, Sandbox

DOUBLING = "{% set ns = namespace(a=START) %}{% for i in range(99) %}{% set ns.a = STEP %}{% endfor %}"
HUGE = {
    "repeated text": "{{ 'a' * 10**9 }}",
    "repeated list": "{{ [1] * 10**9 }}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(9999) if 1|abs %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "doubled by ~": DOUBLING.replace("START", "'a'").replace("STEP", "ns.a ~ ns.a"),
    "doubled by +": DOUBLING.replace("START", "'a'").replace("STEP", "ns.a + ns.a"),
    "doubled lists": DOUBLING.replace("START", "[1]").replace("STEP", "ns.a + ns.a"),
    "shared lists": DOUBLING.replace("START", "[1]").replace("STEP", "[ns.a, ns.a]") + "{{ ns.a }}",
    "shared lists as JSON": DOUBLING.replace("START", "[1]").replace("STEP", "[ns.a, ns.a]") + "{{ ns.a|tojson }}",
    "compared lists": DOUBLING.replace("START", "[1]").replace("STEP", "[ns.a, ns.a]") + "{{ ns.a == [ns.a] }}",
    "shared namespaces": DOUBLING.replace("START", "1").replace("STEP", "namespace(x=[ns.a, ns.a])") + "{{ ns.a }}",
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.a = [ns] * 1000 %}{{ ns }}",
    "searched ranges": "{% for i in range(99999) %}{% if 'a' in range(99999) %}{% endif %}{% endfor %}",
    "searched iterators": "{% for i in range(9999) %}{% if 'a' in (range(99999)|map('abs')) %}{% endif %}{% endfor %}",
    "searched from the right": "{{ ('a' * 1000000).rfind('ab' + 'a' * 100000) }}",
    "split from the right": "{{ ('a' * 1000000).rsplit('ab' + 'a' * 100000) }}",
    "unpacked": "{% for i in range(9999) %}{{ namespace(a=1).b }}{{ dict(a=[1] * 9999) }}{% endfor %}",
    "stripped": "{{ ('a' * 1000000).strip('b' * 100000 + 'a') }}",
    "trimmed": "{{ ('a' * 1000000)|trim('b' * 100000 + 'a') }}",
    "long path": "{% set ns = namespace() %}{% set ns.a = ns %}{{ [{'b': ns}]|map(attribute='b' + '.a' * 9999)|list }}",
    "squares": DOUBLING.replace("START", "3").replace("STEP", "ns.a * ns.a"),
    "power": "{{ 2 ** (10**9) }}",
    "power of a negative": "{{ (-7) ** 99999 }}",
    "two calls each": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "center filter": "{{ 'x'|center(10**9) }}",
    "center method": "{{ 'x'.center(10**9) }}",
    "zfill": "{{ 'x'.zfill(10**9) }}",
    "format operator": "{{ '%1000000000d' % 1 }}",
    "format star": "{{ '%*d' % (10**9, 1) }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "format method": "{{ '{:>1000000000}'.format(1) }}",
    "format nested": "{{ '{:>{}}'.format(1, 10**9) }}",
    "format precision": "{{ '{:.100000000f}'.format(1.0) }}",
    "indent": "{{ ('\n' * 10000)|indent(10000, true) }}",
    "indent with text": "{{ ('\n' * 10000)|indent('x' * 10000) }}",
    "batch": "{{ ['a']|batch(10**9, 'x')|list }}",
    "JSON indent": "{{ [1]|tojson(indent=10**9) }}",
    "JSON indent text": "{{ [1]|tojson(indent='x' * 100) }}",
    "JSON separators": "{{ (['a'] * 10000)|tojson(separators=('x' * 10000, ':')) }}",
    "replace method": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "replace filter": "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
    "join method": "{{ ('b' * 100000).join(['a'] * 100000) }}",
    "join filter": "{{ (['a'] * 100000)|join('b' * 100000) }}",
    "mapped replace": "{{ (['a'] * 100000)|map('replace', '', 'b' * 100000)|join }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(100000) }}",
    "split": "{{ ('a,' * 9999999).split(',')|length }}",
    "listed text": "{{ ('a' * 9999999)|list|length }}",
    "sum of lists": "{{ ([[1] * 1000] * 1000)|sum(start=[]) }}",
    "captured output": "{% set x %}{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}{% endset %}",
    "captured constants": "{% set x %}{% for i in range(99999) %}" + "z" * 10000 + "{% endfor %}{% endset %}",
    "slices": "{% set a = 'x' * 10000000 %}" + "{% set b = a[1:] %}" * 100,
    "negative charges": "{% for i in range(9999) %}{{ (-10**9)|_constant }}{{ 'a' * 100000 }}{% endfor %}",
    "wide dates": "{{ strftime_now('%1000000000Y') }}",
    "long dates": "{{ strftime_now('%Y' * 1000) }}",
    "a large number": "{{ 'a'|truncate(10**6) }}",
}
FORBIDDEN = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({}) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self.__init__.__globals__.os }}",
    "{{ raise_exception.__globals__.x }}",
    "{{ strftime_now.__code__.co_code }}",
    "{{ '{0.__class__.x}'.format(1) }}",
    "{{ ('%s'|safe).format.__self__.x }}",
    "{{ [''|attr('__class__')][0].x }}",
    "{{ (['x']|map(attribute='__class__')|list)[0].x }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ lipsum() }}",
    "{{ 'a'.translate({97: 'b' * 9999}) }}",
    "{{ 'a'.encode('punycode') }}",
)
ALLOWED = {
    "{{ ['b', 'a']|sort }}{{ {'b': 1}|dictsort }}{{ ('a', 'b')|first }}": "['a', 'b'][('b', 1)]a",
    "{{ 1.5|round }}{{ x|default('y') }}{{ [{'a': 1}]|map(attribute='a')|list }}": "2.0y[1]",
    "{{ [{'a': 1}]|selectattr('a', 'equalto', 1)|list|length }}{{ 'ab'[::-1] }}": "1ba",
    "{{ 'a' in ['a'] and 3 is odd and 'a' is string and not ('b' in 'ac') }}": "True",
    "{{ 'a, b'.split(', ')|join('+') }}{{ 'x'.center(5) }}{{ '%03d' % 7 }}{{ '{:>3}'.format(1) }}": "a+b  x  007  1",
    "{{ {'a': [1, 'é']}|tojson }}{{ [1]|tojson(indent=1) }}": '{"a": [1, "é"]}[\n 1\n]',
    "{% for k, v in {'a': 1}.items() %}{{ k ~ v }}{% endfor %}": "a1",
    "{% set ns = namespace(n=0) %}{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{% set ns.n = ns.n + i %}"
    "{% endfor %}{{ ns.n }}": "3",
    "{% macro f(a, b='c') %}{{ a }}{{ b }}{% endmacro %}{{ f(1) }}{{ f(2, b='d') }}": "1c2d",
    "{% macro g() %}<{{ caller() }}>{% endmacro %}{% call g() %}x{% endcall %}": "<x>",
    "{% filter upper %}x{% endfilter %}{% generation %}y{% endgeneration %}{{ '  z '|trim }}": "Xyz",
    "{{ '<&>'|e }}{{ '<&>' }}{{ '<'|safe }}{{ none }}": "&lt;&amp;&gt;<&><None",
    "{{ 10 // 3 }}{{ 7 % 4 }}{{ 2 ** 8 }}{{ 1 / 2 }}{{ -3|abs }}": "332560.53",
    "a\n{% if true %}\nb\n    {% endif %}\nc": "a\nb\nc",
    "{{ strftime_now('%d')|length }}{{ ('a' * 3)|list|length }}{{ [3, 1]|max }}{{ [1, 2]|sum }}": "2333",
    "{{ (range(5000)|list)|map('string')|join(',')|length }}": "23889",
}


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox()


def run(sandbox: Sandbox, source: str, **variables: Any) -> str:
    return sandbox.run(sandbox.from_string(source), variables)


@pytest.mark.parametrize("name", HUGE)
def test_no_template_uses_the_machine_up(name: str) -> None:
    sandbox = Sandbox(BUDGET_UNITS // 16)
    start = time.process_time()
    with pytest.raises(OverBudget):
        run(sandbox, HUGE[name], messages=[{"a": "b"}])
    assert time.process_time() - start < 0.5


def test_the_whole_budget_is_used_up_in_seconds(sandbox: Sandbox) -> None:
    start = time.process_time()
    with pytest.raises(OverBudget):
        run(sandbox, HUGE["two calls each"])
    assert time.process_time() - start < 5


@pytest.mark.parametrize("source", FORBIDDEN)
def test_no_template_reaches_python(sandbox: Sandbox, source: str) -> None:
    with pytest.raises((SecurityError, TemplateError, TypeError)):
        run(sandbox, source, messages=[{"a": "b"}])


@pytest.mark.parametrize("source", ALLOWED)
def test_what_templates_do_works(sandbox: Sandbox, source: str) -> None:
    assert run(sandbox, source) == ALLOWED[source]


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in 'abc' recursive %}{{ loop('x') }}{% endfor %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "-" * 5000 + "1 }}",
        "{{ 1" + "|e" * 5000 + " }}",
        "{% if x %}" * 1000 + "{% endif %}" * 1000,
        "{% for x in y %}" * 90 + "{% endfor %}" * 90,
        DOUBLING.replace("range(99)", "range(5000)").replace("START", "[]").replace("STEP", "[ns.a]") + "{{ ns.a }}",
    ],
)
def test_depth_ends_in_an_error(sandbox: Sandbox, source: str) -> None:
    with pytest.raises((RecursionError, SyntaxError, TemplateError)):
        run(sandbox, source)


def test_the_budget_grows_with_the_request(sandbox: Sandbox) -> None:
    source = "{% for m in messages %}{{ '<' ~ m.role ~ '>' + m.content|trim }}{% endfor %}"
    messages = [{"role": "user", "content": "word " * 20}] * 20_000
    assert len(run(sandbox, source, messages=messages)) > 20_000 * 100


def test_long_texts_pass(sandbox: Sandbox) -> None:
    source = (
        "{% for m in messages %}{% set c = m.content %}{% if '</think>' in c %}"
        "{% set r = c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
        "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{% if c is string and c|length > 1 and c.rfind('x') != 0 and c.split() %}"
        "{{ '<' + m.role ~ '>' + c|trim + '\n' }}{{ c.strip().replace('z', 'y') }}{% endif %}{% endfor %}"
    )
    for content in ("<think>\n\na\n</think>" + "some words here\n" * 130_000, "词" * 700_000):
        assert len(run(sandbox, source, messages=[{"role": "user", "content": content}] * 2)) > 2 * len(content)


def test_budgets_of_threads_are_apart(sandbox: Sandbox) -> None:
    def burn() -> None:
        with pytest.raises(OverBudget):
            run(sandbox, HUGE["doubled by ~"])

    threads = [threading.Thread(target=burn) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert run(sandbox, "{{ 'a' * 1000 }}") == "a" * 1000
    for thread in threads:
        thread.join()
    assert run(sandbox, "{{ 'a' * 1000 }}") == "a" * 1000
