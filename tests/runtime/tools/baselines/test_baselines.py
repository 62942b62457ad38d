"""``codegen bench``: what is noise, stored baselines, peers by name; with a GPU of the test's own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from codegen.errors import CodegenError
from codegen.library import NamedSpec, find_spec
from runtime.tools.baselines.compared import compare
from runtime.tools.baselines.stored import BaselineError, Machine, Row, Timings, check_may_save, read_baseline, save
from runtime.tools.bench.noise import change, interval

torch = pytest.importorskip("torch")

import runtime.tools.baselines.run as bench  # noqa: E402
from runtime.cli import app  # noqa: E402
from runtime.errors import DeviceError  # noqa: E402
from runtime.tools.baselines import peers  # noqa: E402
from runtime.tools.bench.measurement import Workload  # noqa: E402

HERE = Machine(device="H100", driver="580.1", torch="2.13", compiler="nvrtc 13.0")


def timings(single: float, back_to_back: float | None = None, noise: float = 0.01) -> Timings:
    """Five repeats around a time."""
    steps = [1 + noise * (i - 2) / 2 for i in range(5)]
    ways = (single, single if back_to_back is None else back_to_back)
    return Timings(**{w: tuple(t * s for s in steps) for w, t in zip(("single", "back_to_back"), ways, strict=True)})


def row(own: float, peer: float | None = None, noise: float = 0.01, **more: Any) -> Row:
    fields: dict[str, Any] = {"kernel": "ours", "spec_hash": "0", "source_sha256": "0", "workload": "a shape"}
    beside = {} if peer is None else {"SDPA flash": timings(peer, noise=noise)}
    return Row(**(fields | {"flops": 1e12, "own": timings(own, noise=noise), "peers": beside, "peer_flops": {}} | more))


# Noise


def test_a_change_is_real_where_the_repeats_of_two_runs_do_not_overlap() -> None:
    before = interval([1.00, 1.02, 0.99, 1.01, 1.00])
    assert (before.low, before.middle, before.high) == (0.99, 1.00, 1.02)
    assert change(interval([0.97, 0.98, 0.985]), before) == "faster"
    assert change(interval([0.97, 0.98, 0.99]), before) == "noise", "one repeat is as short as one of before"
    assert change(interval([1.03, 1.04]), before) == "slower"


def test_both_ways_of_timing_are_judged_by_themselves() -> None:
    now, before = row(1.0).model_copy(update={"own": timings(1.0, 0.9)}), row(1.0)
    assert [(each.way, each.verdict) for each in compare(now, before)] == [
        ("single", "noise"),
        ("back_to_back", "faster"),
    ]
    assert compare(now, before)[1].ratio == pytest.approx(1 / 0.9)


def test_a_change_that_a_peer_shares_is_the_machines() -> None:
    found = compare(row(1.05, 2.10), row(1.0, 2.0))[0]
    assert found.verdict == "machine" and found.peers == {"SDPA flash": "slower"}


def test_a_change_beyond_that_of_a_peer_is_the_kernels() -> None:
    found = compare(row(1.20, 2.10), row(1.0, 2.0))[0]
    assert found.verdict == "slower" and found.peers == {"SDPA flash": "slower"}
    assert compare(row(0.9, 2.1), row(1.0, 2.0))[0].verdict == "faster", "the peer has moved the other way"
    assert compare(row(0.9, 2.0), row(1.0, 2.0))[0].verdict == "faster", "the peer has not moved"
    assert compare(row(1.0, 2.1), row(1.0, 2.0))[0].verdict == "noise"


# Stored


def test_rows_of_a_file_are_read_back_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    save(path, None, HERE, "2026-01-01", [row(1.0, 2.0), row(3.0, kernel="other")])
    save(path, check_may_save(path, HERE), HERE, "2026-01-02", [row(1.5)])
    found = read_baseline(path)
    assert found.machine == HERE and [(each.kernel, each.own) for each in found.rows] == [
        ("other", timings(3.0)),
        ("ours", timings(1.5)),
    ]


@pytest.mark.parametrize("change", [{"device": "H200"}, {"driver": "590.0"}])
def test_a_baseline_of_another_device_or_driver_is_refused(tmp_path: Path, change: dict[str, str]) -> None:
    path = tmp_path / "before.json"
    save(path, None, HERE.model_copy(update=change), "2026-01-01", [row(1.0)])
    text = path.read_text()
    with pytest.raises(BaselineError, match=r"this is H100, driver 580.1, .* with --save-baseline and another file"):
        check_may_save(path, HERE)
    assert path.read_text() == text


def test_rows_of_another_torch_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    save(path, None, HERE.model_copy(update={"torch": "2.12"}), "2026-01-01", [row(1.0)])
    with pytest.raises(BaselineError, match=r"holds timings of torch 2.12"):
        check_may_save(path, HERE)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text[: len(text) // 2], r"is not a baseline of codegen bench: is not JSON"),
        (lambda text: "[]", r"codegen bench: is \[\]; Input should be an object"),
        (lambda text: text.replace('"format": 1', '"format": 2'), r"format: is 2; Input should be 1"),
        (lambda text: text.replace("1.0,", "-1.0,", 1), r"single.\d: is -1.0; Input should be greater than 0"),
        (lambda text: text.replace('"flops"', '"flop"', 1), r"flops: .*Field required"),
        (
            lambda text: text.replace('"flops"', '"flops": 1.0, "flops"', 1),
            r"codegen bench: has the name 'flops' twice",
        ),
    ],
)
def test_a_file_that_is_no_baseline_is_refused_and_not_written_over(tmp_path: Path, spoil: Any, message: str) -> None:
    path = tmp_path / "before.json"
    save(path, None, HERE, "2026-01-01", [row(1.0)])
    text = spoil(path.read_text())
    path.write_text(text)
    for read in (read_baseline, lambda path: check_may_save(path, HERE)):
        with pytest.raises(BaselineError, match=message):
            read(path)
    assert path.read_text() == text


# The command


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A GPU whose timings a test sets: microseconds by kernel, of the peer, repeats' noise."""
    state: dict[str, Any] = {"peer": 2.0, "noise": 0.01, "here": HERE, "times": {}, "done": []}

    def measured(named: NamedSpec, sizes: Any, names: Any, repeats: int) -> bench.Measured:
        if state["times"].get(named.stem) == "wrong":
            raise DeviceError(f"{named.stem} is wrong, so it is not timed: plain")
        if state["times"].get(named.stem) == "stop":
            raise KeyboardInterrupt
        state["done"].append((named.stem, dict(sizes), tuple(names), repeats))
        own = state["times"].get(named.stem, 1.0)
        made = row(own, state["peer"], state["noise"], kernel=named.stem, workload=f"S{sizes.get('length', 16384)}")
        return bench.Measured(made, {"FA4": "does not compute this workload"})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "measure", measured)
    monkeypatch.setattr(bench, "machine", lambda: state["here"])
    monkeypatch.setattr("runtime.tools.baselines.cli.require_gpu", lambda *told: None)
    return state


def run(*options: str) -> Result:
    return CliRunner().invoke(app, ["bench", *options])


def test_a_kernel_stands_beside_its_peers(machine: dict[str, Any]) -> None:
    result = run("h100_dense", "--peer", "sdpa", "--peer", "flex")
    assert result.exit_code == 0, result.stderr
    assert "h100_dense: S16384" in result.stdout
    assert "    ours: 1000 / 1000 TFLOPS\n        1 (0.99 to 1.01) / 1 (0.99 to 1.01) ms\n" in result.stdout
    assert "    SDPA flash: 500 / 500 TFLOPS, 2.00 / 2.00 x our time\n        2 (1.98 to 2.02)" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "no time: does not compute this workload" in result.stdout
    assert machine["done"] == [("h100_dense", {}, ("sdpa", "flex"), 5)]


def test_a_change_beyond_noise_is_told_and_a_slower_kernel_is_an_exit_code(machine: dict[str, Any]) -> None:
    assert run("h100_dense", "h100_causal", "--save-baseline", "before.json").exit_code == 0
    machine["times"] = {"h100_dense": 0.9, "h100_causal": 1.005}
    result = run("h100_dense", "h100_causal", "--baseline", "before.json")
    assert result.exit_code == 0 and "1.111 x as fast as before" in result.stdout
    words = " ".join(result.stdout.split())
    assert "faster, beyond the noise of both" in words and "within noise" in words
    machine["times"] = {"h100_dense": 1.1}
    slower = run("h100_dense", "--baseline", "before.json")
    assert slower.exit_code == 1 and "SLOWER, beyond the noise of both" in " ".join(slower.stdout.split())
    machine["peer"] = 2.2
    shared = run("h100_dense", "--baseline", "before.json", "--json")
    found = json.loads(shared.stdout)["rows"][0]["baseline"]
    assert shared.exit_code == 0 and [each["verdict"] for each in found] == ["machine", "machine"]


def test_what_the_baseline_has_not_is_told(machine: dict[str, Any]) -> None:
    run("h100_dense", "--save-baseline", "before.json")
    result = run("h100_dense", "--workload", "length=4096", "--baseline", "before.json")
    assert result.exit_code == 0 and "the baseline does not have this kernel and workload" in result.stdout


@pytest.mark.parametrize("option", ["--baseline", "--save-baseline"])
def test_a_foreign_baseline_is_refused_before_anything_is_timed(machine: dict[str, Any], option: str) -> None:
    run("h100_dense", "--save-baseline", "before.json")
    machine["here"], machine["done"] = HERE.model_copy(update={"device": "H200"}), []
    result = run("h100_dense", option, "before.json")
    assert result.exit_code == 2 and machine["done"] == []
    assert "was measured on H100, driver 580.1; this is H200" in result.stderr


def test_an_interrupted_run_has_stored_what_it_timed(machine: dict[str, Any]) -> None:
    machine["times"] = {"h100_causal": "stop"}
    assert run("h100_dense", "h100_causal", "--save-baseline", "before.json").exit_code == 130
    assert [each.kernel for each in read_baseline(Path("before.json")).rows] == ["h100_dense"]


def test_a_wrong_kernel_gets_no_time_and_the_others_go_on(machine: dict[str, Any]) -> None:
    machine["times"] = {"h100_dense": "wrong"}
    result = run("h100_dense", "h100_causal", "--json")
    assert result.exit_code == 1 and "h100_dense is wrong, so it is not timed" in result.stderr
    assert [each["kernel"] for each in json.loads(result.stdout)["rows"]] == ["h100_dense", "h100_causal"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("h100_dense", "--peer", "fa5"), "--peer: unknown peer fa5; did you mean fa4"),
        (
            ("h100_dense", "--workload", "size=3"),
            "--workload size: the workload of attention has no such size; there are",
        ),
        (("h100_dense", "--workload", "length=0"), "--workload length: is 0; a positive integer is expected"),
        (("h100_dense", "--workload", "length=x"), "--workload length: is 'x'; a positive integer"),
        (("h100_dense", "--workload", "length=8,length=9"), "--workload length: is given twice"),
        (("h100_dense", "--baseline", "none.json"), "none.json: cannot be read"),
        ((), "name one spec or more"),
    ],
)
def test_bad_options_are_refused_before_anything_is_timed(
    machine: dict[str, Any], options: tuple[str, ...], message: str
) -> None:
    result = run(*options)
    assert result.exit_code == 2 and message in result.stderr and machine["done"] == []


def test_without_a_gpu_nothing_is_timed() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert "bench needs a GPU, and torch sees none; nothing was timed" in run("h100_dense").stderr


# Peers, and what is timed


def load(**calls: Any) -> Workload:
    made = {name.replace("_", " "): call for name, call in calls.items()}
    return Workload("a shape", 1.0, lambda: torch.ones(4), made, {"SDPA other": 2.0})


def test_peers_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "INSTALLED", {})
    spec = find_spec("h100_dense").spec
    every, _ = peers.peers_of(load(SDPA_flash=int, FlexAttention=int), spec, ())
    some, missing = peers.peers_of(load(SDPA_flash=int, FlexAttention=int), spec, ("sdpa", "cublas"))
    assert list(every) == ["SDPA flash", "FlexAttention"] and list(some) == ["SDPA flash"]
    assert missing == {"cuBLAS": "does not compute this workload"}


def test_a_package_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "INSTALLED", {"fa4": ("a_package_that_there_is_not", int)})
    with pytest.raises(CodegenError, match=r"--peer fa4: its package a_package_that_there_is_not is not installed"):
        peers.check_names(["fa4"])
    assert peers.peers_of(load(), None, ()) == ({}, {})


def test_a_library_that_fails_has_no_time_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(load: Workload, spec: Any) -> Any:
        raise RuntimeError("no such\narchitecture")

    monkeypatch.setattr(peers, "INSTALLED", {"fa4": ("json", make)})
    assert peers.peers_of(load(), None, ()) == ({}, {"FA4": "RuntimeError: no such\\narchitecture"})


def test_peers_that_differ_get_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "INSTALLED", {})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def fails() -> None:
        raise ValueError("too large")

    made = load(
        SDPA_same=lambda: SimpleNamespace(out=torch.ones(4)),
        SDPA_wrong=lambda: torch.tensor([1.0, 1.0, 1.0, 1.5]),
        SDPA_nan=lambda: torch.full((4,), torch.nan),
        SDPA_other=lambda: torch.zeros(4),
        SDPA_fails=fails,
    )
    kernel: Any = SimpleNamespace(spec=find_spec("h100_dense").spec)
    right, missing = bench._right_calls(made, kernel, ())
    assert list(right) == ["SDPA same", "SDPA other"], "what does other work is not compared"
    assert missing["SDPA wrong"] == "differs by 0.5 of the largest element, allowed 0.02"
    assert missing["SDPA nan"].startswith("differs by nan") and missing["SDPA fails"] == "ValueError: too large"


def test_a_row_has_all_repeats_of_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(100))
    monkeypatch.setattr(bench, "single_calls", lambda calls: {name: 1.0 + next(count) for name in calls})
    monkeypatch.setattr(bench, "back_to_back", lambda calls, rounds: {name: 50.0 + rounds for name in calls})
    found = bench._timings({"ours": int, "peer": int}, 3)
    assert found["ours"] == Timings(single=(1.0, 3.0, 5.0), back_to_back=(51.0,) * 3)
    assert found["peer"].single == (2.0, 4.0, 6.0)


def test_a_kernel_is_checked_then_timed_beside_what_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    named, asked = find_spec("h100_dense"), []
    compiled = SimpleNamespace(source="the source")
    kernel: Any = SimpleNamespace(spec=named.spec, compiled=compiled)

    def workload(kernel: Any, heads: int | None = None, length: int | None = None) -> Workload:
        asked.append((heads, length))
        made = load(SDPA_flash=lambda: torch.ones(4), SDPA_wrong=lambda: torch.zeros(4), SDPA_other=lambda: None)
        return Workload(made.shape, made.flops, made.call, made.peers, {**made.peer_flops, "SDPA none": 3.0})

    monkeypatch.setattr(peers, "INSTALLED", {})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench, "load_kernel", lambda named, forward_compatible: kernel)
    monkeypatch.setattr(bench, "plain_failure", lambda kernel: "")
    monkeypatch.setattr(bench, "workload_of", lambda spec: workload)
    monkeypatch.setattr(bench, "single_calls", lambda calls: dict.fromkeys(calls, 1.0))
    monkeypatch.setattr(bench, "back_to_back", lambda calls, rounds: dict.fromkeys(calls, 2.0))
    found = bench.measure(named, {"length": 64}, (), 2)
    assert asked == [(None, 64)] and found.row.spec_hash == named.spec.hash and list(found.missing) == ["SDPA wrong"]
    assert list(found.row.peers) == ["SDPA flash", "SDPA other"] and found.row.peer_flops == {"SDPA other": 2.0}
    assert found.row.own == Timings(single=(1.0, 1.0), back_to_back=(2.0, 2.0))

    def too_little(calls: Any) -> Any:
        raise RuntimeError("CUDA out of memory\ntried to allocate")

    monkeypatch.setattr(bench, "single_calls", too_little)
    with pytest.raises(DeviceError, match=r"h100_dense cannot be timed: CUDA out of memory$"):
        bench.measure(named, {}, (), 2)
    monkeypatch.setattr(bench, "plain_failure", lambda kernel: "plain: error 1, allowed 0.1")
    with pytest.raises(DeviceError, match=r"h100_dense is wrong, so it is not timed: plain: error 1, allowed 0.1"):
        bench.measure(named, {}, (), 2)


def test_results_are_compared_dense_or_block_by_block() -> None:
    blocks = torch.eye(4).to_sparse_bsr((2, 2))
    found = bench.result_of(blocks)
    assert found is not None and found.shape == (2, 2, 2) and bench.result_of(3) is None
