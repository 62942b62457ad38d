"""What specs, problems, receipts and names are made of that attack their readers: shipped ones, mutated."""

from __future__ import annotations

import copy
import json
import random
import re
import string
from functools import cache
from typing import Any

from codegen.library import find_spec, shipped_files, shipped_specs
from codegen.receipts import receipt_path
from codegen.select.problem import PROBLEM_ADAPTER, said_by
from codegen.spec import SPEC_ADAPTER, UnchosenSpec

DEEP = 6
"""Levels to which data that contain themselves are spelt."""

TOKENS = (
    *("!!bool maybe", "!!int ''", "!!float ''", "!!set x", "!!set {a, b}", "!!omap [a: 1]", "!!binary _", "!!null x"),
    *(
        "!!timestamp 2001-99-99",
        "!!python/object:os.system x",
        "!<tag> x",
        "!x",
        "!!str 128",
        "!!map [1]",
        "!!seq {a: 1}",
    ),
    *("&a", "*a", "&t {<<: *t}", "<<: *a", "<<: [*a, *a]", "<<: 1", "&a [*a]", "? ", "? [1, 2]\n: 3", "? {a: 1}\n: 3"),
    *(r'"\UFFFFFFFF"', r'"\uD800"', r'"\x"', "|", "|9", ">-", "---", "...", "%YAML 9.9", "%TAG ! !", "#", "# x\n"),
    *("{", "}", "[", "]", ",", ":", "- ", "'", '"', "\t", "\n", "\r\n", "\\", "@", "`", "\ufeff", "\u2028", "\0", "é"),
    *("0x" + "f" * 40, "9" * 30, "9" * 5000, "1e999", "-.inf", ".nan", "0o17", "1:59:59", "1_0", "0b1", "+1", "-0"),
    *("true", "no", "~", "null", "2001-01-01", "2001-01-01T00:00:00Z", "=", "<<", "[" * 50, "{a: " * 50, "- " * 50),
)
ATOMS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 128, 2**31, 2**62, 2**63, -(2**63), 10**5000, 0.0, -0.0, 0.5, 128.0),
    *(
        1e308,
        float("inf"),
        float("-inf"),
        float("nan"),
        "",
        "x",
        "\ud800",
        "\0",
        "a\nb",
        "128",
        "é" * 300,
        "x" * 100_000,
    ),
    *([], [1], [[]], {}, {"": None}, {"a": 1}, {1: 2}, {None: 1}, {(1, 2): 3}, b"x", (), (1,), {1}, object(), range(3)),
    *("sm_90a", "sm_89", "attention", "bsr_spmm", "causal", "topk", "wgmma", "tma", "dense", "none", "ping_pong"),
)


def _field_names() -> list[str]:
    """Return the names of all fields of specs and problems, those within others too."""
    schemas = [adapter.json_schema() for adapter in (SPEC_ADAPTER, PROBLEM_ADAPTER)]
    models = [model for schema in schemas for model in schema["$defs"].values()]
    return sorted({name for model in models for name in model.get("properties", ())})


KEYS: tuple[Any, ...] = (
    *_field_names(),
    *("share_kv", "balanced", "cluster", "blocks_per_sm", "paced"),  # as fields were called
    *("copy_", "", "x.y", "\n", "\ud800", 1, None, True, 1.5, (1,)),
)
"""Names of fields, and what is none."""
REQUIRED = ("op", "arch", "head_dim", "pattern", "block")
SHARES = (1.0, 0.3, 0.3, 0.0)
"""Of the other fields that a spec has, those that an input begins with: the rest is filled in if it is accepted."""


@cache
def texts() -> list[str]:
    """The shipped specs, as YAML."""
    return [path.read_text(encoding="utf-8") for path in shipped_files().values()]


@cache
def plain() -> list[str]:
    """The same as JSON: each use makes its own data."""
    return [find_spec(name).spec.canonical_json() for name in shipped_files()]


@cache
def problems() -> list[str]:
    """What the shipped specs say of their problems, as JSON."""
    specs = [named.spec for named in shipped_specs() if not isinstance(named.spec, UnchosenSpec)]
    return [json.dumps(said_by(spec)) for spec in specs]


@cache
def receipts() -> list[bytes]:
    """Some of the shipped receipts."""
    return [
        path.read_bytes() for name in list(shipped_files())[:10] if (path := receipt_path(find_spec(name))).is_file()
    ]


def spec_text(draw: random.Random) -> str:
    """Return the text of a shipped spec, with all or some of its fields and comments."""
    share = draw.choice(SHARES)
    parts = re.split(r"^(?=\S)", draw.choice(texts()), flags=re.MULTILINE)
    return "".join(part for part in parts if part.partition(":")[0] in REQUIRED or draw.random() < share)


def spec_fields(draw: random.Random) -> dict[str, Any]:
    """Return the fields of a shipped spec, all or some."""
    share, fields = draw.choice(SHARES), json.loads(draw.choice(plain()))
    return {name: value for name, value in fields.items() if name in REQUIRED or draw.random() < share}


def by_bytes(draw: random.Random, data: bytes) -> bytes:
    """Flip, insert, remove, repeat and cut bytes."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(len(out) + 1)
        end = min(len(out), at + draw.choice((1, 1, 2, 8, 64)))
        how = draw.randrange(5)
        if how == 0 and at < len(out):
            out[at] ^= 1 << draw.randrange(8)
        elif how == 1:
            out[at:at] = draw.randbytes(draw.choice((1, 2, 4)))
        elif how == 2:
            del out[at:end]
        elif how == 3:
            out[at:at] = out[at:end] * draw.choice((1, 2, 30))
        else:
            out[at:at] = draw.choice(string.printable).encode()
    return bytes(out)


def by_tokens(draw: random.Random, text: str) -> str:
    """Put tokens of YAML that parsers stumble over beside words, or in their place."""
    words = text.replace("\n", " \n ").replace("{", " { ").split(" ")
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        at = draw.randrange(len(words))
        token = draw.choice((draw.choice(TOKENS), draw.choice(words), str(draw.choice(KEYS))))
        words[at : at + draw.randrange(2)] = [token]
    return " ".join(words)


def atom(draw: random.Random) -> Any:
    """Return a value that a field may have or not, the caller's own."""
    return copy.deepcopy(draw.choice(ATOMS))


def by_structure(draw: random.Random, data: Any) -> Any:
    """Change names and values of a mapping, its own and those within."""
    for _ in range(draw.choice((1, 1, 2, 3, 6))):
        inner = data
        while isinstance(inner, dict) and (parts := [v for v in inner.values() if isinstance(v, dict)]):
            if draw.randrange(3):
                break
            inner = draw.choice(parts)
        how, key = draw.randrange(6), draw.choice(list(inner) or ["x"])
        if how == 0:
            inner.pop(key, None)
        elif how == 1:
            inner[draw.choice(KEYS)] = inner.pop(key, None)
        elif how == 2:
            inner[draw.choice(KEYS)] = atom(draw)
        elif how == 3:
            inner[draw.choice(KEYS)] = draw.choice((data, inner, [inner], json.loads(draw.choice(plain()))))
        else:
            inner[key] = draw.choice((atom(draw), draw.randrange(-4, 300), draw.getrandbits(draw.randrange(1, 70))))
    return data


def problem_text(draw: random.Random) -> str:
    """Return FIELD=VALUE,... of names and values that there are and of such that there are not."""
    values = (*map(spelt, ATOMS[:30]), "causal", "1e999", "[" * 2000, "{}", "[1]", '"x"', "9" * 5000, "64", "bsr_spmm")
    parts = ["head_dim=64,pattern=causal", "op=bsr_spmm,block=64,m=4096,n=16,k=4096"][: draw.randrange(3)]
    for _ in range(draw.randrange(1, 6)):
        name = draw.choice((str(draw.choice(KEYS)), f"{draw.choice(KEYS)}.{draw.choice(KEYS)}"))
        parts.append(f"{name}{draw.choice(('=', '=', '=', '==', ''))}{draw.choice(values)[:6000]}")
    return ",".join(parts)


def problem_fields_of(draw: random.Random) -> dict[str, Any]:
    """Return the fields of a problem that is one, with some sizes."""
    sizes = {
        name: draw.choice((1, 128, 4096)) for name in draw.choice(((), ("batch", "heads", "q_len"), ("m", "n", "k")))
    }
    return {**json.loads(draw.choice(problems())), **sizes}


def name(draw: random.Random) -> str:
    """Return the name of a file, or what is none."""
    parts = (
        "kernel",
        ".yaml",
        ".y",
        "\n",
        "\\",
        "??/",
        "é",
        "\udcff",
        "\0",
        "/",
        "..",
        " ",
        "int x;",
        "x" * 300,
        "'",
        "~",
    )
    return "kernel." + "".join(draw.choice(parts) for _ in range(draw.randrange(8)))


def yaml_of(value: Any, level: int = 0) -> str:
    """Return data as YAML in braces; what YAML has no word for, by its Python spelling."""
    if isinstance(value, dict) and level < DEEP:
        return "{" + ", ".join(f"{yaml_of(key, DEEP)}: {yaml_of(part, level + 1)}" for key, part in value.items()) + "}"
    if isinstance(value, list) and level < DEEP:
        return "[" + ", ".join(yaml_of(part, level + 1) for part in value) + "]"
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__


def spelt(given: Any) -> str:
    """Return an input as a failure shows it."""
    try:
        return ascii(given)[:4000]
    except (ValueError, RecursionError) as error:
        return f"({error})"
