"""Conventions of FP8 for kernels, quantize kernels, the runtime and oracles: order of keys, rotation, scales.

A value is code * scale. Of a group with one scale the largest finite magnitude m gives scale = m / largest, and a code
is x * (1 / scale), rounded to nearest even: all in fp32, the inverse rounded too, so that codes are the same bits
everywhere. Below ``LEAST_AMAX`` a group counts as zeros, with scale 1.
"""

from __future__ import annotations

import hashlib

KEYS_TOGETHER = 16
"""Keys that V^T has in an order of their own: those of an 8-bit operand's 4 times 4 columns."""
KEY_ORDER = tuple(2 * lane + i if i < 2 else 8 + 2 * lane + i - 2 for lane in range(4) for i in range(4))
"""The key, of 16, at each place of V^T.

Of the accumulators of Q K^T a lane has the columns 2t, 2t + 1, 8 + 2t and 9 + 2t of each 16; of the A operand of P V,
in 8 bits, the columns 4t to 4t + 3. With V's keys in this order the one is the other, register by register.
"""
V_KEYS = 128
"""Keys that V^T is filled up to a multiple of, with zeros."""
LEAST_AMAX = 2.0**-100
"""Magnitudes below count as zeros: their scale would leave the normal numbers of fp32."""
LEAST_SCALE, LARGEST_SCALE = 2.0**-120, 2.0**120
"""Scales that can be given: their inverses, and those of scales before a rotation's factor, are normal numbers too."""
ROTATED_HEADS = (64, 128, 256)
"""Head sizes with a Hadamard rotation."""
ROTARY_HEADS = (64, 128, 256)
"""Head sizes with a rotary embedding: a thread has the pairs of a row, as its chunks are an even number."""
SIGN_BITS = 32
_SEED = b"signs of the columns of Q and K before their Hadamard rotation"


def sign_words(head_dim: int) -> tuple[int, ...]:
    """Return random signs of the columns of a head, the same in every kernel: words of 32 bits, 1 is minus."""
    digest = hashlib.sha256(_SEED).digest()  # 256 bits, one for each column of the widest head
    words = (int.from_bytes(digest[at : at + 4], "little") for at in range(0, len(digest), 4))
    return tuple(words)[: head_dim // SIGN_BITS]
