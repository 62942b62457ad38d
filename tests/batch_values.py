"""Host programs that run a pattern's part of a kernel: the tensors that have one value for each batch."""

from __future__ import annotations

from collections.abc import Iterable

from codegen.patterns import PatternBase

# What a program includes before its patterns, %(params)s by `params`: values are those of batch kBatch.
DECLARATIONS = """\
using int64 = long long;
struct Params { int q_len, kv_len;%(params)s };
constexpr int kBatch = 1;
int values[2];
inline int __ldg(const int* word) { return *word; }
// Of queries, keys and the batch's value; another batch has another one.
inline Params params_of(int q_len, int kv_len, int value) {
  values[kBatch] = value;
  values[1 - kBatch] = 1000000;
  return {q_len, kv_len%(arguments)s};
}
"""


def declarations(patterns: Iterable[PatternBase]) -> str:
    """Return the declarations of a program with these patterns."""
    names = dict.fromkeys(t.name for pattern in patterns for t in pattern.index_tensors if t.per_batch)
    params = "".join(f" const int* {name}; int64 {name}_batch_stride;" for name in names)
    return DECLARATIONS % {"params": params, "arguments": ", values, 1" * len(names)}


def problems(pattern: PatternBase, lengths: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return queries, keys and a value, 0 if the pattern has none; else none, one, some, all, and two out of range."""
    values = (lambda n: 0, lambda n: 1, lambda n: n // 2, lambda n: n, lambda n: -(2**31), lambda n: 2**31 - 1)
    used = values if any(tensor.per_batch for tensor in pattern.index_tensors) else values[:1]
    return [(q_len, kv_len, value(kv_len)) for q_len, kv_len in lengths for value in used]
