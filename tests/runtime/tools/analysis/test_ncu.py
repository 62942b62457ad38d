"""Counters of Nsight Compute: its tables read, and told in words.

The tables here were written by hand in the form that ncu's documentation has; the numbers in them are made up.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.errors import CodegenError, FileError
from runtime.tools.analysis import ncu
from runtime.tools.analysis.findings import REASONS, counted_findings
from runtime.tools.analysis.ncu import Counters, parse, read

LONG = """\
==PROF== Connected to process 4711 (/usr/bin/python3)
==PROF== Profiling "kernel" - 0: 0%....50%....100% - 8 passes
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value"
"0","4711","python3","127.0.0.1","kernel(Params)","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0","SpeedOfLight",\
"gpu__time_duration.sum","ns","1,234,500"
"0","4711","python3","127.0.0.1","kernel(Params)","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0","SpeedOfLight",\
"gpc__cycles_elapsed.avg.per_second","hz","1755000000"
"0","4711","python3","127.0.0.1","kernel(Params)","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0","Compute",\
"sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active","%","41.25"
"0","4711","python3","127.0.0.1","kernel(Params)","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0","Compute",\
"sm__inst_executed_pipe_fp64.avg.pct_of_peak_sustained_active","%","(!) n/a"
"1","4711","python3","127.0.0.1","other","1","7","(32, 1, 1)","(1, 1, 1)","0","9.0","SpeedOfLight",\
"gpu__time_duration.sum","ns","17"
==PROF== Disconnected from process 4711
"""
WIDE = """\
"ID","Process ID","Kernel Name","gpu__time_duration.sum",\
"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",\
"lts__throughput.avg.pct_of_peak_sustained_elapsed","lts__t_sector_hit_rate.pct",\
"gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",\
"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum","l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",\
"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_selected_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_sleeping_per_issue_active.ratio","launch__registers_per_thread"
"","","","ns","%","%","%","%","","","","","","","register/thread"
"0","4711","kernel","1000000","73.5","38","91.5","12.4","200","1000","0.75","2.5","1.0","0.01","168"
"1","4711","kernel","2000000","75.5","38","91.5","12.4","2","1000","0.75","2.5","1.0","0.01","168"
"""


def told(text: str, flops: float | None = None) -> dict[str, str]:
    return {each.about: each.text for each in counted_findings(parse(text, "kernel"), flops)}


def test_a_table_with_a_line_for_each_metric() -> None:
    counters = parse(LONG, "kernel")
    assert counters.values["gpu__time_duration.sum"] == 1234500
    assert counters.values["sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active"] == 41.25
    assert not [name for name in counters.values if "fp64" in name]  # not available is not 0
    assert parse(LONG, "other").values == {"gpu__time_duration.sum": 17}


def test_a_table_with_a_column_for_each_metric_tells_the_last_launch() -> None:
    counters = parse(WIDE, "kernel")
    assert counters.values["gpu__time_duration.sum"] == 2000000
    assert counters.values["launch__registers_per_thread"] == 168


def test_counters_in_words() -> None:
    assert told(LONG) == {
        "time": "1234.5 us",
        "clock": "1755 MHz of the SMs",
        "special functions": "41% of their peak (pipe xu, conversions too)",
    }
    found = told(WIDE, flops=1.2e12)
    assert found["time"] == "2000.0 us, 600 TFLOPS under the profiler"
    assert found["tensor pipe"].startswith("76% of its peak")
    assert found["L2"] == "38% of its peak, 92% of sectors were there" and found["DRAM"].startswith("12%")
    assert found["bank conflicts"].endswith(": few")
    stalls = [about for about in found if about.startswith("stall ")]
    assert stalls == ["stall gmma", "stall long_scoreboard"]  # the most frequent first; issuing is none
    assert found["stall gmma"] == f"2.50 warps on average at each issue: {REASONS['gmma']}"


def test_many_bank_conflicts_are_told() -> None:
    values = {
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": 50.0,
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum": 100.0,
    }
    (finding,) = counted_findings(Counters("kernel", values))
    assert finding.text.startswith("50.0% of the wavefronts of stores") and finding.counted


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is no table of ncu --csv"),
        ("hello\n", "is no table of ncu --csv"),
        ("==ERROR== Failed to find metric x\n", "is no table of ncu --csv: Failed to find metric x"),
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "NVreg_RestrictProfilingToAdminUsers=0"),
        (LONG, "has no launch of absent; there are kernel(Params), other"),
        ('"ID","Kernel Name"\n', "has no launch of absent; it has none at all"),
        ('"ID","Kernel Name","Metric Name"\n', "Metric Value is no column of it"),
        ('"Kernel Name","a"\n', "ID or Kernel Name is no column of it"),
        (WIDE[: WIDE.rindex(',"0.01"')], "ends within a line"),
        (WIDE.rstrip()[:-2], "is no table of ncu --csv: unexpected end of data"),
        (LONG[: LONG.index('"hz"')], "ends within a line"),
        (WIDE.replace('"168"', '"16"8'), "is no table of ncu --csv: "),
    ],
)
def test_what_is_no_table_is_one_line(text: str, says: str) -> None:
    with pytest.raises(CodegenError) as caught:
        parse(text, "absent")
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_is_read_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "counters.csv"
    path.write_bytes(WIDE.encode() + b"\xff")
    with pytest.raises(FileError, match=r"counters.csv: ends within a line"):
        read(path, "kernel")
    path.write_bytes(b" " * (ncu.MOST_BYTES + 1))
    with pytest.raises(FileError, match="is too large"):
        read(path, "kernel")
    with pytest.raises(FileError, match="No such file"):
        read(tmp_path / "none.csv", "kernel")


def test_one_launch_of_one_kernel_is_asked_for() -> None:
    asked = ncu.options("h100_topk32", Path("log"), 3)
    assert asked[asked.index("--kernel-name") + 1] == "regex:^h100_topk32$"
    assert asked[asked.index("--launch-skip") + 1] == "3" and asked[asked.index("--launch-count") + 1] == "1"
    assert asked.count("--section") == len(ncu.SECTIONS)
