"""Conventions of FP8 for kernels, quantize kernels, the runtime and oracles: order of keys, rotation, scales.

A value is code * scale. For a group with a common scale and the largest finite magnitude m, scale = m / largest, and a
code is x * (1 / scale), rounded to nearest even. All of it is computed in fp32 with a rounded inverse, so that codes
are bitwise reproducible. A group with m below ``LEAST_AMAX`` counts as zeros, with scale 1.
"""

from __future__ import annotations

import hashlib

KEYS_TOGETHER = 16
"""Keys that are permuted together in V^T: the 4 x 4 columns of an 8-bit operand."""
KEY_ORDER = tuple(2 * lane + i if i < 2 else 8 + 2 * lane + i - 2 for lane in range(4) for i in range(4))
"""The key, of 16, at each position of V^T.

A lane holds columns 2t, 2t + 1, 8 + 2t and 9 + 2t of each 16 columns of the accumulators of Q K^T, but needs columns 4t
to 4t + 3 of the 8-bit A operand of P V. With V's keys in this order, the registers match.
"""
V_KEYS = 128
"""V^T is padded with zeros to a multiple of this number of keys."""
LEAST_AMAX = 2.0**-100
"""Smaller magnitudes count as zeros, as their scale would not be a normal fp32 number."""
LEAST_SCALE, LARGEST_SCALE = 2.0**-120, 2.0**120
"""Range of given scales: their inverses, also before a rotation's factor, are normal numbers."""
ROTATED_HEADS = (64, 128, 256)
"""Head sizes that support the Hadamard rotation."""
ROTARY_HEADS = (64, 128, 256)
"""Head sizes that support the rotary embedding: a thread has an even number of chunks, hence whole pairs of a row."""
SIGN_BITS = 32
_SEED = b"signs of the columns of Q and K before their Hadamard rotation"


def sign_words(head_dim: int) -> tuple[int, ...]:
    """Fixed random signs of the columns of a head, the same in every kernel: 32-bit words in which 1 is minus."""
    digest = hashlib.sha256(_SEED).digest()  # 256 bits, one for each column of the widest head
    words = (int.from_bytes(digest[at : at + 4], "little") for at in range(0, len(digest), 4))
    return tuple(words)[: head_dim // SIGN_BITS]
