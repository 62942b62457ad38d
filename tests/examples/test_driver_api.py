"""The C example: it builds, and hands to the driver what the runtime does. tests/gpu/test_export.py runs it."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import driver_api
import pytest

from codegen.library import find_spec, shipped_specs
from codegen.planning import plan_for
from codegen.render import Generated
from codegen.tools.c_header import c_header
from codegen.tools.descriptor import facts_of, launch_record
from codegen.tools.exports import read_export
from codegen.tools.sized_launch import sized_launch, smallest_shape
from runtime.driver.api import driver

torch = pytest.importorskip("torch")

from runtime.driver import launch, tensor_map  # noqa: E402
from runtime.kernels import attention  # noqa: E402

pytestmark = [
    pytest.mark.nvrtc,
    pytest.mark.skipif(driver_api.COMPILER is None, reason="there is no C compiler: cc, or what CC names"),
]
SMS = 132
PARAMS_BYTES = facts_of(plan_for(find_spec(driver_api.KERNEL))).params_bytes


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if driver_api.cuda_headers() is None:
        pytest.skip("the packages of CUDA's headers have no cuda.h")
    return tmp_path_factory.mktemp("driver_api")


@pytest.fixture(scope="module")
def folder(place: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CODEGEN_CACHE_DIR", str(place / "cache"))
        return driver_api.exported(place, SMS)


@pytest.fixture(scope="module")
def program(place: Path, folder: Path) -> Path:
    """The example, linked with a driver that writes down what it is given."""
    library = place / "libcuda.so.1"
    driver_api.compiled(["-shared", "-fPIC", str(Path(__file__).with_name("fake_libcuda.c"))], library)
    return driver_api.built(folder, str(library), place / "attention")


def run(program: Path, *arguments: Path, major: int = 9, sm_count: int = SMS) -> tuple[Any, list[list[str]]]:
    told = program.with_name("launches")
    environment = {
        **os.environ,
        "FAKE_LAUNCHES": str(told),
        "FAKE_SM_COUNT": str(sm_count),
        "FAKE_MAJOR": str(major),
        "FAKE_PARAMS_BYTES": str(PARAMS_BYTES),
    }
    told.unlink(missing_ok=True)
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, env=environment)
    return done, [line.split() for line in told.read_text().splitlines()] if told.is_file() else []


def calls(lines: list[list[str]], what: str) -> list[list[str]]:
    return [rest for first, *rest in lines if first == what]


def signature(generated: Generated, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the runtime prepares for the same call."""
    monkeypatch.setattr(attention, "check_tensor", lambda *arguments: None)
    loaded = launch.LoadedKernel.__new__(launch.LoadedKernel)
    loaded.plan, loaded.layout = generated.plan, launch.ParameterLayout.of(generated.plan.params)
    loaded._sm_counts = {None: SMS}  # type: ignore[dict-item]
    kernel = attention.AttentionKernel(generated, loaded)  # type: ignore[arg-type]
    sizes = driver_api.SIZES
    q, k = (
        torch.zeros(sizes["batch"], sizes[heads], sizes[length], 128).half()
        for heads, length in (("heads", "q_len"), ("kv_heads", "kv_len"))
    )
    return kernel._check(q, k, k, indices=(), scale=None, out=None, sink=None, return_lse=True)


def test_the_headers_of_all_kernels_compile_side_by_side(tmp_path: Path) -> None:
    """With the offsets that they assert, which the compiler works out by itself."""
    lines = ["int main(void) {"]
    for named in shipped_specs():
        plan = plan_for(named)
        sizes = {name: value for name, value in vars(smallest_shape(plan)).items() if value is not None}
        header = c_header(facts_of(plan), launch_record(sized_launch(plan, sizes, SMS)))
        (tmp_path / f"{named.stem}.h").write_text(header)
        lines.insert(0, f'#include "{named.stem}.h"')
        numbers = f"struct {named.stem}_params p; {named.stem.upper()}_SET_NUMBERS(&p);"
        boxes = [f"{named.stem.upper()}_{name.upper()}" for name in plan.tensor_maps]
        used = [f"const cuuint32_t b{i}[{box}_RANK] = {box}_BOX_DIM; (void)b{i};" for i, box in enumerate(boxes)]
        lines.append("{ " + " ".join([numbers, "(void)p;", *used]) + " }")
    program = tmp_path / "all.c"
    program.write_text("\n".join([*lines, "return 0; }"]) + "\n")
    driver_api.compiled([f"-I{tmp_path}", str(program)], tmp_path / "all")


def test_it_launches_as_the_runtime_does(program: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, lines = run(program, folder)
    generated = read_export(folder).generated
    plan, wanted = generated.plan, signature(generated, monkeypatch)
    assert calls(lines, "function") == [[plan.stem]] and calls(lines, "shared") == [[str(plan.shared_bytes)]]
    first, second = calls(lines, "launch")
    grid, block, shared, params = first[:3], first[3:6], first[6], bytearray.fromhex(first[7])
    assert first == second
    assert [grid, block] == [[str(wanted.config.gridDimX), "1", "1"], [str(wanted.config.blockDimX), "1", "1"]]
    assert shared == str(wanted.config.sharedMemBytes)
    # The driver above leaves the address in a tensor map; the numbers are those of the runtime to the byte.
    layout = launch.ParameterLayout.of(plan.params)
    addresses = {}
    for name, kind in layout.types.items():
        if kind in ("tensor_map", "pointer"):
            size = 128 if kind == "tensor_map" else 8
            place = slice(layout.offsets[name], layout.offsets[name] + size)
            addresses[name] = int.from_bytes(params[place][:8], "little")
            params[place] = bytes(size)
    assert bytes(params) == bytes(wanted.block)
    sizes = {int(address): int(size) for address, size in calls(lines, "alloc")}
    shapes = driver_api.SIZES
    elements = {
        "q": 2 * shapes["batch"] * shapes["heads"] * shapes["q_len"] * 128,
        "k": 2 * shapes["batch"] * shapes["kv_heads"] * shapes["kv_len"] * 128,
        "lse": 4 * shapes["batch"] * shapes["heads"] * shapes["q_len"],
    }
    expected = {"q_map": "q", "o_map": "q", "k_map": "k", "v_map": "k", "lse": "lse"}
    assert {name: sizes[addresses[name]] for name in expected} == {n: elements[of] for n, of in expected.items()}
    assert sizes[addresses["scheduler"]] == 8 and len(set(addresses.values())) == len(addresses) == len(sizes)


def test_it_encodes_tensor_maps_as_the_runtime_does(
    program: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, lines = run(program, folder)
    seen: list[list[int]] = []

    def call(function: Any, kind: Any, rank: int, address: int, *rest: Any) -> Any:
        flat = [int(each) for argument in rest for each in (argument if isinstance(argument, list) else [argument])]
        seen.append([int(kind), rank, *flat])
        raise RuntimeError("seen")

    monkeypatch.setattr(tensor_map, "call", call)
    for place in signature(read_export(folder).generated, monkeypatch).maps:
        with pytest.raises(RuntimeError, match="seen"):
            place.encoder.at(0)
    assert [[int(each) for each in line[1:]] for line in calls(lines, "encode")] == seen and len(seen) == 4
    assert driver().CUDA_VERSION >= 12000


def test_a_wrong_result_is_found(program: Path, folder: Path) -> None:
    done, _ = run(program, folder)  # its launches write nothing, and the output begins as NaN
    assert done.returncode == 1 and done.stdout.startswith("WRONG: 200 rows, max difference of out nan"), done


def attention_of(memory: Path) -> tuple[Any, Any]:
    """Return out and LSE of the q, k and v that the program made: its first three allocations."""
    sizes = driver_api.SIZES
    batch, heads, kv_heads, q_len, kv_len = (sizes[n] for n in ("batch", "heads", "kv_heads", "q_len", "kv_len"))

    def tensor(number: int, *shape: int) -> Any:
        data = bytearray((memory / str(number)).read_bytes())
        return torch.frombuffer(data, dtype=torch.float16).view(*shape, 128).double()

    q = tensor(0, batch, heads, q_len)
    k, v = (tensor(number, batch, kv_heads, kv_len).repeat_interleave(heads // kv_heads, 1) for number in (1, 2))
    assert q.abs().max() == k.abs().max() == v.abs().max() == 1 and q.std() > 0.4 and not torch.equal(k, v)
    logits = q @ k.mT / math.sqrt(128)
    hidden = torch.ones(q_len, kv_len, dtype=torch.bool).triu(kv_len - q_len + 1)
    logits.masked_fill_(hidden, -math.inf)
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


@pytest.mark.parametrize("wrong", ["", "out", "lse", "zeros"])
def test_its_reference_is_causal_attention(
    program: Path, folder: Path, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MEMORY", str(tmp_path))
    run(program, folder)
    out, lse = attention_of(tmp_path)
    if wrong == "out":
        out[-1, -1, -1, 3] += 0.01  # of the last row, which is a sample
    if wrong == "lse":
        lse[0, 0, 0] += 0.01
    if wrong == "zeros":
        out[:] = 0
    for number, tensor in ((3, out.half()), (4, lse.float())):
        (tmp_path / str(number)).write_bytes(bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()))
    done, _ = run(program, folder)
    assert (done.returncode, done.stdout.split(":")[0]) == ((1, "WRONG") if wrong else (0, "ok")), done


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ({"major": 8}, "device 0: has compute capability 8.0, the kernel is for 9.0"),
        ({"sm_count": 114}, "has 114 multiprocessors, the launch is for 132: export with --sm-count 114"),
    ],
)
def test_another_device_is_refused(program: Path, folder: Path, device: dict[str, int], message: str) -> None:
    done, lines = run(program, folder, **device)
    assert done.returncode == 2 and message in done.stderr and not lines


def test_other_folders_are_refused(program: Path, folder: Path) -> None:
    done, _ = run(program)
    assert done.returncode == 2 and "usage" in done.stderr
    empty = program.parent / "empty"
    shutil.copytree(folder, empty / folder.name, dirs_exist_ok=True)
    (empty / folder.name / "h100_causal.cubin").unlink()
    environment = {**os.environ, "FAKE_LAUNCHES": os.devnull, "FAKE_SM_COUNT": str(SMS), "FAKE_MAJOR": "9"}
    done = subprocess.run([program, empty / folder.name], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2 and "h100_causal.cubin: FAKE_ERROR" in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_makefile_exports_and_builds(program: Path, tmp_path: Path) -> None:
    shutil.copytree(driver_api.EXAMPLE, tmp_path / "example")
    command = tmp_path / "codegen"
    root = driver_api.EXAMPLE.parents[1]
    code = f"import sys\nsys.path.insert(0, {str(root)!r})\nfrom runtime.cli import main\nmain()\n"
    command.write_text(f"#!{sys.executable}\n{code}")
    command.chmod(0o755)
    headers = driver_api.cuda_headers()
    assert headers is not None
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "CODEGEN_CACHE_DIR": str(program.with_name("cache")),
    }
    done = subprocess.run(
        ["make", f"CUDA_HOME={headers.parent}", f"LIBCUDA={program.with_name('libcuda.so.1')}"],
        cwd=tmp_path / "example",
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "example" / "attention").is_file()
    assert read_export(tmp_path / "example" / "exported" / "h100_causal").record.launch is not None
