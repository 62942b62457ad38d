"""The samples of docs/guide/tools.md are what the commands print."""

from __future__ import annotations

from functools import cache

import pytest
from scripts import load_script

from codegen.library import GENERATED
from codegen.receipts import Receipt
from runtime.compile import toolchain
from runtime.tools.analysis import disassembly

pytestmark = pytest.mark.nvrtc

script = load_script("tools_page")


def test_the_samples_are_what_the_commands_print(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Receipt.read(GENERATED / "h100_topk32.json").cubin.compiler_package
    if toolchain.compiler_version()[1] != known:
        pytest.skip(f"the samples are of {known}")
    monkeypatch.setattr(disassembly, "disassemble", cache(disassembly.disassemble))  # two samples are of one kernel
    assert script.main(["--check"]) == 0, capsys.readouterr().out
