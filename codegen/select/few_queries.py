"""Choice between the kernel for decoding and those of tiles, for attention of a few queries over contiguous keys.

Thread blocks of the kernel for decoding divide the keys of a request. A tile of the others has 128 queries of one head,
and one thread block computes it: calls with few queries leave most rows of a tile empty and most of the GPU idle.
"""

from __future__ import annotations

from dataclasses import dataclass

from codegen.arch import ARCHS
from codegen.patterns import PatternBase

MOST_ROWS, MOST_OF_CALL = 64, 1024
"""Rows of a KV head at most, queries times query heads, and of a call with several queries: the kernel for decoding
reads the keys again for each 16. With 4096 keys on an H200, in a graph: 64 rows of 8 KV heads take 17 us, and 31 with
tiles; 32 rows of 32 KV heads take 27 and 33, and 64 rows of them 41 and 33."""
LEAST_KEYS, LEAST_OF_SEVERAL = 128, 512
"""Keys that a query may see at least, with one query and with several: with fewer, a tile has too few steps to divide.
On an H200, one query of 32 heads takes 7.1 us over 128 keys, and 7.5 with tiles; 8 queries over 1024 keys take 10.4 and
12.2 us. Fewer keys were not timed, neither for one query nor for several."""
TILE_QUERIES = 128
"""Queries of a tile of the other kernels."""


@dataclass(frozen=True)
class FewQueriesCall:
    """What the choice depends on.

    Attributes:
        arch: architecture of the GPU.
        batch: batch size.
        heads: query heads.
        kv_heads: heads of K and V.
        q_len: queries.
        kv_len: keys.
        pattern: the pattern, with its numbers.
        score: whether the call has a score expression.
        kv_lengths: whether it has lengths of batches.
    """

    arch: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    pattern: PatternBase
    score: bool = False
    kv_lengths: bool = False

    @property
    def rows(self) -> int:
        """Rows of a batch and a KV head: its queries times its query heads."""
        return self.q_len * self.heads // self.kv_heads

    @property
    def sees_all(self) -> bool:
        """Whether each query sees all keys."""
        return self.pattern.band is not None and self.pattern.band.sees_all(self.q_len)

    def tiles_reason(self) -> str:
        """Reason for a kernel of tiles; "" if the call takes the kernel for decoding."""
        if min(self.batch, self.heads, self.kv_heads, self.q_len, self.kv_len) < 1:
            return "a tensor is empty"
        band = self.pattern.band
        if band is None:
            return f"its pattern is {self.pattern.stem()}"
        seen = band.most_keys(self.kv_len)
        tiles = self.batch * self.heads * -(-self.q_len // TILE_QUERIES)
        least = LEAST_KEYS if self.q_len == 1 else LEAST_OF_SEVERAL
        all_rows = self.batch * self.heads * self.q_len
        reasons = {
            "it has a score": self.score,
            f"it has {self.rows} queries and query heads of a KV head, more than {MOST_ROWS}": self.rows > MOST_ROWS,
            f"it has {all_rows} rows, more than {MOST_OF_CALL}": self.q_len > 1 and all_rows > MOST_OF_CALL,
            f"a query sees at most {seen} keys, fewer than {least}": seen < least,
            "kv_lengths do not move its diagonal": self.kv_lengths and not self.sees_all,
            "its tiles fill the GPU": self.q_len > 1 and tiles >= ARCHS[self.arch].machine.sms,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")


def may_decode(pattern: PatternBase, heads: int, kv_heads: int, q_len: int, kv_len: int) -> bool:
    """Whether some call of these sizes takes the kernel for decoding: a test that takes little time."""
    return pattern.band is not None and q_len * heads <= MOST_ROWS * kv_heads and kv_len >= LEAST_KEYS
