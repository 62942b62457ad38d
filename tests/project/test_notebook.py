"""The notebook runs on a CPU, and shows what its cells print."""

from __future__ import annotations

import json

import pytest
from scripts import SCRIPTS, load_script

pytest.importorskip("torch")
script = load_script("notebook", SCRIPTS)


def cell(source: str) -> dict[str, object]:
    return {"cell_type": "code", "source": [source], "outputs": ["old"], "execution_count": None}


def test_it_runs_and_its_outputs_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 0, capsys.readouterr().out


def test_it_has_nothing_of_a_machine() -> None:
    notebook = json.loads(script.NOTEBOOK.read_text(encoding="utf-8"))
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert not [cell["id"] for cell in notebook["cells"] if cell["metadata"]]


def test_cells_share_names_and_an_error_names_its_cell() -> None:
    made = script.executed({"cells": [cell("x = 2"), cell("print(x + 1)")]})
    assert [each["outputs"] for each in made["cells"]] == [
        [],
        [{"name": "stdout", "output_type": "stream", "text": ["3\n"]}],
    ]
    with pytest.raises(ZeroDivisionError) as caught:
        script.executed({"cells": [cell("x = 2"), cell("x / 0")]})
    assert "cell 1" in str(caught.traceback[-1].path)
