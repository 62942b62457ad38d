"""The source of a twin: the committed source of the first type, with words replaced.

Reading the committed source is therefore enough to know the twin. ``codegen check`` compares it with the rendered spec
of the twin.
"""

from __future__ import annotations

import hashlib
import json
import re

from codegen.dtypes import DTYPES, TWINS
from codegen.render import seal, spec_json_of, without_seal
from codegen.spec import canonical

_FIRST, _TWIN = (DTYPES[name] for name in TWINS)

WORDS = {
    **{getattr(_FIRST, each): getattr(_TWIN, each) for each in ("name", "ptx", "packed_ptx", "cuda")},
    _FIRST.header.removesuffix(".h"): _TWIN.header.removesuffix(".h"),
}
"""Words of the first type, and their replacements in the twin."""

PASSAGES = {
    """\
// cvt.f32.f16: converts the bits of an fp16 to a float (PTX ISA, "cvt")
__device__ __forceinline__ float widen(unsigned short bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
""": """\
// Converts the bits of a bf16, the upper half of a float, to that float.
__device__ __forceinline__ float widen(unsigned short bits) {
  return __uint_as_float(static_cast<uint32>(bits) << 16);
""",
    r"""
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 { low, high }, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}\n" : "=f"(found.x), "=f"(found.y) : "r"(pair));
""": """
  found.x = __uint_as_float(pair << 16);  // a bf16 is the upper half of a float
  found.y = __uint_as_float(pair & 0xFFFF0000);
""",
}
"""Conversions to float: before sm_90 no instruction converts bf16, whose bits are the upper half of a float's."""

KEPT = ("the most that fp16 can hold",)
"""Comments on the first type that both sources have."""

_ANY = re.compile(rf"\b(?:{'|'.join(map(re.escape, (*KEPT, *WORDS)))})\b")


def twin_source(source: str, stem: str) -> str:
    """Source of the twin of a kernel.

    Args:
        source: source of the kernel of the first type, with its banner.
        stem: name of that kernel.
    """
    banner, blank, body = without_seal(source).partition("\n\n")
    for passage, other in PASSAGES.items():
        body = body.replace(passage, other)
    body = _ANY.sub(lambda match: WORDS.get(match[0], match[0]), body)
    for symbol in dict.fromkeys(re.findall(rf"__global__ [^{{;]*?\b({re.escape(stem)}(?:_\w+)?)\(", body)):
        twin = f"{stem}_{_TWIN.name}{symbol.removeprefix(stem)}"
        body = re.sub(rf"\b{symbol}\b", twin, body)
    return seal(_twin_banner(banner) + blank + body)


def _twin_banner(banner: str) -> str:
    """Banner with the spec of the twin and its hash."""
    text = spec_json_of(banner)
    if text is None:
        return banner
    spec = canonical(json.loads(text) | {"dtype": _TWIN.name})
    banner = banner.replace(text, spec)
    return re.sub(r"(?m)^(// spec hash: )\w+$", rf"\g<1>{hashlib.sha256(spec.encode()).hexdigest()}", banner)
