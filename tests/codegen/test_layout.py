"""Insertions lie as their line does, and leave no line if they are empty."""

from __future__ import annotations

import jinja2
import pytest

from codegen.layout import lay_out, mark

MACROS = """\
{% macro two() %}
first();
  second();
#pragma unroll
third();
{%- endmacro %}
{% macro nothing() %}{% endmacro %}
{% macro outer() %}
if (x) {
  {{ two() }}
  {{ nothing() }}
}
{%- endmacro %}
"""


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("  {{ two() }}\n", "  first();\n    second();\n#pragma unroll\n  third();\n"),
        (
            "    {{ outer() }}\n",
            "    if (x) {\n      first();\n        second();\n#pragma unroll\n      third();\n    }\n",
        ),
        ("a;\n  {{ nothing() }}\nb;\n", "a;\nb;\n"),
        ("a{{ nothing() }};\n", "a;\n"),
        ("a;\n\nb;\n", "a;\n\nb;\n"),
        ("  {{ nothing() }}{{ '' }}\n", ""),
        ("  f({{ 'x' }});\n", "  f(x);\n"),
    ],
)
def test_insertions_lie_as_their_line_does(template: str, text: str) -> None:
    env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, finalize=mark)
    assert lay_out(env.from_string(MACROS + template).render()) == text
