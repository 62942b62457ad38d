"""Rules of tiles: what plans refuse by them is what they do not list."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from codegen.errors import SpecError
from codegen.library import shipped_specs
from codegen.planning import plan_of, tiles_of
from codegen.spec import TileCopySpec
from codegen.tile_rules import Fits, OneOf, Rule, check_tile, tiles, with_tile

SIZES = (*range(16, 257, 16), 384, 512, 1024)
RULES: tuple[Rule[Any], ...] = (
    OneOf("m", lambda spec: (32, 64), lambda spec, sizes: f"allowed: {sizes}"),
    OneOf("n", lambda spec: (spec.tile.m, 2 * spec.tile.m), lambda spec, sizes: f"once or twice tile.m: {sizes}"),
    Fits("n", lambda spec: spec.tile.n < 128, lambda spec: "less than 128"),
)


def copy_spec() -> TileCopySpec:
    (found, *_) = (named.spec for named in shipped_specs() if isinstance(named.spec, TileCopySpec))
    return found


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        ({"m": 16, "n": 7}, "tile.m: is 16; allowed: 32, 64"),
        ({"m": 32, "n": 48}, "tile.n: is 48; once or twice tile.m: 32, 64"),
        ({"m": 64, "n": 128}, "tile.n: is 128; less than 128"),
    ],
)
def test_the_first_rule_that_is_broken_is_named(tile: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=f"^{message}$"):
        check_tile(SimpleNamespace(tile=SimpleNamespace(**tile)), RULES)


def test_tiles_are_those_that_no_rule_refuses() -> None:
    found = [tuple(tile.values()) for tile in tiles(copy_spec(), RULES)]
    assert found == [(32, 32), (32, 64), (64, 64)]


def test_tiles_of_shipped_kernels_keep_their_rules() -> None:
    for named in shipped_specs():
        assert named.spec.tile.model_dump() in tiles_of(named.spec), named.stem


def test_other_tiles_have_no_plan() -> None:
    """The rules list whatever a plan accepts: drawn tiles that they do not list are refused."""
    draw = random.Random(1)
    refused = 0
    for named in shipped_specs():
        allowed, fields = tiles_of(named.spec), list(named.spec.tile.model_dump())
        for _ in range(3):
            tile = draw.choice(allowed) | {draw.choice(fields): draw.choice(SIZES)}
            if tile not in allowed:
                refused += 1
                with pytest.raises(SpecError):
                    plan_of(with_tile(named.spec, tile), named.stem)
    assert refused > 300
