"""Host programs that run a pattern's part of a kernel: values of batches, and numbers that calls decide."""

from __future__ import annotations

from collections.abc import Iterable

from codegen.patterns import PatternBase
from codegen.plan import Plan
from codegen.problem import Lengths
from codegen.render import render_template

# What a program includes before its patterns, %(params)s by `params`: values are those of batch kBatch.
DECLARATIONS = """\
using int64 = long long;
%(numbers)sstruct Params { int q_len, kv_len;%(params)s };
constexpr int kBatch = 1;
int values[2];
inline int __ldg(const int* word) { return *word; }
int lengths[2];
// Of queries, keys, the batch's value and its length; another batch has others.
inline Params params_of(int q_len, int kv_len, int value, int length = 0) {
  values[kBatch] = value;
  values[1 - kBatch] = 1000000;
  lengths[kBatch] = length;
  lengths[1 - kBatch] = kv_len / 2 + 1;
  return {q_len, kv_len%(arguments)s};
}
"""


WINDOWS = [
    *[(0, 0, 0), (0, 0, 1), (7, 0, 64), (127, 0, 4), (100, 37, 128), (254, 126, 200)],
    *[(3, 900, 70), (5000, 0, 5000), (0, 260, 0), (1 << 24, 1 << 24, 1 << 24)],
]
"""Keys before and after a query's own, and at the beginning, of patterns that leave them to the call."""
PARAMS = ("window_left", "window_right", "sink_keys")


def numbered(pattern: PatternBase, value: int) -> PatternBase:
    """Return the pattern of a problem with this value."""
    return pattern.with_params(dict(zip(PARAMS, WINDOWS[value], strict=True))) if pattern.is_general else pattern


def window_or(value: int, pattern: PatternBase) -> int:
    """Which of WINDOWS a problem has, where the pattern leaves them to the call; else the value."""
    return value % len(WINDOWS) if pattern.is_general else value


def declarations(patterns: Iterable[PatternBase], *, kv_lengths: bool = False) -> str:
    """Return the declarations of a program with these patterns, and with lengths of batches."""
    patterns = tuple(patterns)
    names = dict.fromkeys(t.name for pattern in patterns for t in pattern.index_tensors if t.per_batch)
    general = any(pattern.is_general for pattern in patterns)
    arguments = ", values, 1" * len(names) + ", lengths, 1" * kv_lengths
    arguments += "".join(f", kNumbers[value][{place}]" for place in range(len(PARAMS)) if general)
    params = "".join(
        f" const int* {name}; int64 {name}_batch_stride;" for name in (*names, *["kv_lengths"] * kv_lengths)
    )
    params += "".join(f" int {name};" for name in PARAMS if general)
    each = ", ".join(f"{{{', '.join(map(str, numbers))}}}" for numbers in WINDOWS)
    table = f"constexpr int kNumbers[][{len(PARAMS)}] = {{{each}}};  // by the value of a problem\n" if general else ""
    return DECLARATIONS % {"params": params, "arguments": arguments, "numbers": table}


def problems(pattern: PatternBase, lengths: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return queries, keys and a value, 0 if the pattern has none; else none, one, some, all, and two out of range.

    Of a pattern that leaves its numbers to the call, it says which of WINDOWS they are.
    """
    if pattern.is_general:
        return [(q_len, kv_len, value) for q_len, kv_len in lengths for value in range(len(WINDOWS))]
    values = (lambda n: 0, lambda n: 1, lambda n: n // 2, lambda n: n, lambda n: -(2**31), lambda n: 2**31 - 1)
    used = values if any(tensor.per_batch for tensor in pattern.index_tensors) else values[:1]
    return [(q_len, kv_len, value(kv_len)) for q_len, kv_len in lengths for value in used]


PROBLEMS_OF_LENGTHS = [(1, 50), (200, 200), (9, 300), (150, 40), (70, 320)]
"""Queries and keys of problems of which each batch has a length."""


def lengths_of(kv_len: int) -> list[int]:
    """None, one, at the edges of steps, all but one, all, and two out of range."""
    wanted = (0, 1, 33, 64, 65, 128, 129, kv_len - 1, kv_len)
    return [*sorted({length for length in wanted if 0 <= length <= kv_len}), -(2**31), 2**31 - 1]


def seqlen_info(plan: Plan) -> str:
    """Lengths of the sequences of a kernel, as its source has them."""
    lengths: Lengths = plan.flags.named()["lengths"]  # type: ignore[assignment]
    return render_template(plan, f"attention/seqlen_info/{lengths.layout}.cuh.j2").strip()
