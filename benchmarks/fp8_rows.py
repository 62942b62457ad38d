"""The workloads of benchmarks/fp8.py, and the project's target for each; needs no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from records import OURS

QUANTIZING = "ours, quantizing"
CHOSEN = "ours, as chosen"
FP16 = "ours, fp16"
SDPA, SDPA_BSHD, SDPA_BF16 = "cuDNN SDPA", "cuDNN SDPA, heads inside", "cuDNN SDPA, bf16 result"
BSA = "cuDNN BSA, quantizing"
FLASHINFER = "FlashInfer fmha_v2"
EQUAL, CUBE, SLOW = "_scaled_mm, as many FLOPs", "_scaled_mm, 8192 cubed", ", fp32 sums"
ATTENTION = (OURS, QUANTIZING, CHOSEN, FP16, SDPA, SDPA_BSHD, SDPA_BF16, BSA, FLASHINFER)
PRODUCTS = (OURS, QUANTIZING, FP16, EQUAL, EQUAL + SLOW, CUBE, CUBE + SLOW)
DATA = ("std1", "std4")
RMSE = "rmse"
HEADS = 16


@dataclass(frozen=True)
class Target:
    """What one call of a row is to reach.

    Attributes:
        call: its label.
        least: how often the figure of the best of
        of: these calls; of none: TFLOPS.
        figure: ``tflops``, in both ways, or ``rmse``: less is better.
    """

    call: str
    least: float
    of: tuple[str, ...] = ()
    figure: Literal["tflops", "rmse"] = "tflops"


@dataclass(frozen=True)
class AttentionRow:
    """Attention on HEADS heads.

    Attributes:
        name: what --row takes.
        spec: our kernel of FP8, shipped; lists may have another number of blocks.
        batch, length, head_dim: of q, k and v.
        targets: its targets.
        causal: whether later keys are hidden.
        blocks: listed blocks of a block of queries; None: there are no lists.
        block: queries, and keys, of a listed block.
    """

    name: str
    spec: str
    batch: int
    length: int
    head_dim: int
    targets: tuple[Target, ...] = ()
    causal: bool = False
    blocks: int | None = None
    block: int = 128

    @property
    def pairs(self) -> int:
        """Queries times keys that each of them sees, of a head."""
        if self.causal:
            return self.length * (self.length + 1) // 2
        return self.length * (self.length if self.blocks is None else self.blocks * self.block)

    @property
    def work(self) -> float:
        """FLOPs."""
        return 4.0 * self.batch * HEADS * self.head_dim * self.pairs


@dataclass(frozen=True)
class ProductRow:
    """A BSR matrix with 16 blocks in each block row, times a dense one that is stored by columns.

    Attributes:
        name: what --row takes.
        written: the row of benchmarks/bsr.py.
        fp16: our kernel of fp16.
        targets: its targets.
    """

    name: str
    written: str
    fp16: str
    targets: tuple[Target, ...]


Row = AttentionRow | ProductRow
CUDNN = (SDPA, SDPA_BSHD, SDPA_BF16)
DENSE_TARGETS = (Target(OURS, 1.05, CUDNN), Target(OURS, 1.45, (FP16,)), Target(OURS, 1.0, CUDNN, RMSE))
OVER_BSA = Target(QUANTIZING, 1.3, (BSA,))


def share(least: float) -> tuple[Target, ...]:
    """A share of cuBLAS's product of as many FLOPs, and of the one of 8192 cubed, which has a longer K."""
    return Target(OURS, least, (EQUAL,)), Target(OURS, least, (CUBE,))


DENSE = AttentionRow("dense", "h100_e4m3_dense", 2, 16384, 128, DENSE_TARGETS)
LISTS = AttentionRow("topk32", "h100_e4m3_topk32", 1, 32768, 128, (Target(OURS, 950), OVER_BSA), blocks=32)
B128 = "h100_bsr_spmm_b128_column_major"
ROWS: tuple[Row, ...] = (
    DENSE,
    LISTS,
    dataclasses.replace(LISTS, name="topk128", blocks=128, targets=(Target(OURS, 1050), OVER_BSA)),
    dataclasses.replace(
        LISTS, name="topk32 of 64 x 64", spec="h100_e4m3_topk32_b64", block=64, targets=(Target(OURS, 800), OVER_BSA)
    ),
    dataclasses.replace(
        DENSE, name="dense, d 64", spec="h100_e4m3_dense_d64", head_dim=64, targets=(Target(OURS, 1.15, (FP16,)),)
    ),
    dataclasses.replace(DENSE, name="causal", spec="h100_e4m3_causal", causal=True, targets=()),
    ProductRow("BSR 128 x 128", "e4m3_spmm_b128", B128, share(0.85)),
    ProductRow("BSR 128 x 128, scales of blocks", "e4m3_spmm_b128_block_scales", B128, share(0.75)),
    ProductRow("BSR 64 x 64", "e4m3_spmm_b64", "h100_bsr_spmm_b64_column_major", (Target(OURS, 900),)),
)
