"""A kernel's SASS with the stages of its source, its main loop and its resources."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from codegen.library import NamedSpec
from codegen.render import generate
from codegen.tools.outline import Outline, Stage
from runtime.compile import toolchain
from runtime.compile.compiler import Compiled, compile_generated, run_nvrtc
from runtime.compile.inspection import Usage, printed, resources
from runtime.tools.analysis.loops import Loop, main_loop
from runtime.tools.analysis.sass import Function, Instruction, parse

LINE_INFO = "--generate-line-info"


@dataclass(frozen=True)
class Disassembly:
    """The SASS of a kernel.

    Attributes:
        compiled: the compiled kernel.
        functions: kernels of the cubin, the spec's own first.
        has_stages: whether instructions have source lines. The cubin has none; lines come from a second compilation
            with line information, if it generates the same instructions.
    """

    compiled: Compiled
    functions: tuple[Function, ...]
    has_stages: bool

    @property
    def own(self) -> Function:
        """The kernel with the spec's name."""
        return self.functions[0]

    @cached_property
    def outline(self) -> Outline:
        """The functions of the source."""
        return Outline(self.compiled.source)

    @cached_property
    def main(self) -> Loop | None:
        """The main loop; None for a kernel without loops."""
        return main_loop(self.own.instructions)

    @cached_property
    def usage(self) -> Usage:
        """Registers, spills, shared memory."""
        return resources(self.compiled)

    @property
    def named_barriers(self) -> int:
        """Hardware barriers per thread block, from ptxas: all 16 if a barrier index is computed at run time."""
        told = re.search(r"used (\d+) barriers", self.compiled.log)
        return int(told[1]) if told else 0

    @property
    def mbarriers(self) -> int:
        """Number of mbarriers in shared memory, from the plan."""
        return sum(region.bytes // 8 for region in self.compiled.plan.shared if region.name == "Barriers")

    @property
    def register_moves(self) -> tuple[int, ...]:
        """Registers per thread set by setmaxnreg, in the order of the code."""
        moves = (each.operands for each in self.own.instructions if each.mnemonic == "USETMAXREG")
        return tuple(dict.fromkeys(int(found[0], 16) for each in moves if (found := re.findall(r"0x[0-9a-f]+", each))))

    def stage(self, instruction: Instruction) -> Stage | None:
        """The stage of an instruction."""
        return self.outline.stage(instruction.lines)


def disassemble(named: NamedSpec) -> Disassembly:
    """Compile a spec, or load it from the cache, and disassemble it. Needs no GPU.

    Raises:
        ToolchainError: when NVRTC or nvdisasm is missing or fails.
        NoJitError: when CODEGEN_NO_JIT=1 forbids the second compilation.
    """
    tool = toolchain.nvdisasm()
    compiled = compile_generated(generate(named))
    plain = parse(printed(tool, ("-c",), compiled.code))
    options = (*compiled.options, LINE_INFO)
    with_lines, _ = run_nvrtc(compiled.source, named.source_file, "cubin", options, compiled.plan.headers)
    lined = parse(printed(tool, ("-gi", "-c"), with_lines), named.source_file)
    same = [each.code for each in plain] == [each.code for each in lined]
    return Disassembly(compiled, _own_first(lined if same else plain, named.stem), same)


def _own_first(functions: tuple[Function, ...], stem: str) -> tuple[Function, ...]:
    return tuple(sorted(functions, key=lambda each: each.name != stem))
