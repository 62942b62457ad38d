"""Train a small transformer with block-sparse attention, and the same model with torch's masked dense attention.

The text is this project's documents and sources, as bytes. Each query block of 128 sees its own block, the two before
it, the first block, and one earlier block that differs between heads. torch's attention gets the same pattern as a
dense mask. Both models start from the same weights and see the same batches, in bf16 autocast. A second seed shows the
variation between runs. Losses are written as JSON, and plotted if matplotlib is installed.

    python examples/train_transformer.py [--steps 400] [--seeds 2] [--json train_transformer.json] [--plot STEM]
    python examples/train_transformer.py --from train_transformer.json --plot train_transformer   # no GPU: draw it
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sparse_kernel_codegen import block_sparse_attention
from sparse_kernel_codegen.patterns import BlockLists

PROJECT = Path(__file__).resolve().parents[1]
BLOCK = 128
BEFORE = 2  # visible blocks before a query's own block
VALIDATION = 0.05  # share of the text, at its end


@dataclass(frozen=True)
class Config:
    """Sizes of the model and its training."""

    layers: int = 4
    heads: int = 8
    head_dim: int = 64
    length: int = 2048
    batch: int = 8
    steps: int = 400
    learning_rate: float = 1e-3
    device: str = "cuda"

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def read_text() -> torch.Tensor:
    """Bytes of the project's documents and sources, concatenated in a fixed order."""
    kinds = ("*.md", "docs/**/*.md", "codegen/**/*.py", "runtime/**/*.py", "examples/*.py")
    files = sorted({path for kind in kinds for path in PROJECT.glob(kind)})
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def make_lists(config: Config) -> BlockLists:
    """Lists of all heads: a query block's own block is partial (causal), earlier blocks are full."""
    blocks = config.length // BLOCK
    source = torch.Generator().manual_seed(0)
    full = torch.zeros((1, config.heads, blocks, BEFORE + 2), dtype=torch.int32)
    counts = torch.zeros((1, config.heads, blocks), dtype=torch.int32)
    for head in range(config.heads):
        for row in range(blocks):
            near = range(max(0, row - BEFORE), row)
            far = torch.randint(0, max(1, row - BEFORE), (1,), generator=source).tolist()
            seen = sorted({*near, *(block for block in (0, *far) if block < row)})
            full[0, head, row, : len(seen)] = torch.tensor(seen, dtype=torch.int32)
            counts[0, head, row] = len(seen)
    own = torch.arange(blocks, dtype=torch.int32).view(1, 1, blocks, 1)
    tensors = torch.ones((1, 1, blocks), dtype=torch.int32), own, counts, full
    return BlockLists(*(tensor.to(config.device) for tensor in tensors), block=(BLOCK, BLOCK), mask="causal")


def dense_mask(lists: BlockLists, config: Config) -> torch.Tensor:
    """The same pattern as bool (1, heads, length, length), True for visible pairs."""
    blocks = config.length // BLOCK
    entries = torch.arange(lists.full_kv_indices.shape[3], device=config.device) < lists.full_kv_num_blocks[..., None]
    full = torch.zeros((1, config.heads, blocks, blocks), dtype=torch.int32, device=config.device)
    full.scatter_add_(3, lists.full_kv_indices.long(), entries.to(torch.int32))
    whole = (full > 0).repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)
    place = torch.arange(config.length, device=config.device)
    own = (place[:, None] // BLOCK == place // BLOCK) & (place[:, None] >= place)
    return whole | own


class Block(nn.Module):
    """Attention and a two-layer MLP, each with a pre-norm and a residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.norms = nn.ModuleList(nn.LayerNorm(config.width) for _ in range(2))
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.projection = nn.Linear(config.width, config.width, bias=False)
        self.network = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: torch.Tensor, attention: Any) -> torch.Tensor:
        """The residual stream after the block."""
        q, k, v = (
            part.unflatten(2, (self.heads, self.head_dim)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, 2)
        )
        x = x + self.projection(attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.network(self.norms[1](x))


class Transformer(nn.Module):
    """A decoder over bytes."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, config.width)
        self.places = nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, 256, bias=False)

    def loss(self, text: torch.Tensor, attention: Any) -> torch.Tensor:
        """Mean cross-entropy of the next byte, in nats; text: (batch, length + 1)."""
        x = self.tokens(text[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x, attention)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), text[:, 1:].flatten())


def batch_of(text: torch.Tensor, config: Config, source: torch.Generator) -> torch.Tensor:
    """Random pieces of the text, (batch, length + 1)."""
    starts = torch.randint(0, len(text) - config.length, (config.batch, 1), generator=source)
    return text[starts + torch.arange(config.length + 1)].long().to(config.device)


def train(config: Config, text: torch.Tensor, attention: Any, seed: int) -> dict[str, Any]:
    """Train a model; return its losses, its validation loss, and the seconds of training."""
    torch.manual_seed(seed)
    model = Transformer(config).to(config.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95))
    warm = max(1, config.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))
    source, cut = torch.Generator().manual_seed(seed), int(len(text) * (1 - VALIDATION))
    losses, start = [], time.perf_counter()
    for _ in range(config.steps):
        with torch.autocast(config.device, torch.bfloat16):
            loss = model.loss(batch_of(text[:cut], config, source), attention)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    seconds = time.perf_counter() - start
    held = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.autocast(config.device, torch.bfloat16):
        unseen = [model.loss(batch_of(text[cut:], config, held), attention) for _ in range(4)]
    return {
        "losses": torch.stack(losses).tolist(),
        "validation": float(torch.stack(unseen).mean()),
        "seconds": round(seconds, 2),
    }


def compare(config: Config, seeds: int) -> dict[str, Any]:
    """Train with both kinds of attention, for each seed."""
    text, lists = read_text(), make_lists(config)
    mask = dense_mask(lists, config)
    kinds = {
        "block-sparse": lambda q, k, v: block_sparse_attention(q, k, v, lists),
        "torch, dense mask": lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask),
    }
    runs = []
    for seed in range(seeds):
        for name, attention in kinds.items():
            run = {"attention": name, "seed": seed, **train(config, text, attention, seed)}
            print(
                f"seed {seed}, {name:17} loss {run['losses'][0]:.3f} -> {last(run):.3f}, validation "
                f"{run['validation']:.3f}, {run['seconds']:.1f} s"
            )
            runs.append(run)
    device = torch.cuda.get_device_name() if config.device == "cuda" else config.device
    seen = float(mask.float().mean())
    report = {"device": device, "torch": torch.__version__, "config": asdict(config), "bytes": len(text)}
    return {**report, "seen_pairs": round(seen, 4), "runs": runs}


def last(run: dict[str, Any]) -> float:
    """Mean loss of the last tenth of the steps."""
    tail = run["losses"][-max(1, len(run["losses"]) // 10) :]
    return sum(tail) / len(tail)


def say_apart(report: dict[str, Any]) -> None:
    """Print the final difference between the two kinds of attention, and between the seeds."""
    ends: dict[str, list[float]] = {}
    for run in report["runs"]:
        ends.setdefault(run["attention"], []).append(last(run))
    ours, theirs = ends.values()
    print(f"mean loss of the last tenth of the steps, block-sparse minus dense, by seed: "
          f"{', '.join(f'{a - b:+.4f}' for a, b in zip(ours, theirs, strict=True))}")  # fmt: skip
    if len(theirs) > 1:
        print(f"dense, maximum minus minimum over the seeds: {max(theirs) - min(theirs):.4f}")


def plot(report: dict[str, Any], path: Path) -> None:
    """Plot the curves as PNG and SVG, or print a message if matplotlib is not installed."""
    try:
        import matplotlib as mpl  # noqa: PLC0415
    except ModuleNotFoundError:
        print("no plot: matplotlib is not installed; draw it elsewhere with --from FILE --plot STEM")
        return
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "train_transformer"  # reproducible bytes
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    styles = dict(zip(dict.fromkeys(run["attention"] for run in report["runs"]), ("-", "--"), strict=False))
    for run in report["runs"]:
        label = f"{run['attention']}, seed {run['seed']}"
        axes.plot(run["losses"], styles[run["attention"]], label=label, linewidth=1, color=f"C{run['seed']}")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy of the next byte (nats)")
    axes.set_title(f"{report['device']}, {report['seen_pairs']:.0%} of all pairs", fontsize=10)
    axes.legend()
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    print(f"wrote {path.with_suffix('.svg')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Config.steps)
    parser.add_argument("--length", type=int, default=Config.length, help="tokens of a sequence, a multiple of 128")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("train_transformer.json"), help="file to write")
    parser.add_argument("--plot", type=Path, metavar="STEM", help="stem of the PNG and SVG files")
    parser.add_argument("--from", dest="earlier", type=Path, metavar="FILE", help="draw an earlier run")
    options = parser.parse_args()
    if options.earlier:
        report = json.loads(options.earlier.read_text(encoding="utf-8"))
    else:
        if not torch.cuda.is_available():
            raise SystemExit("error: torch sees no GPU")
        if options.length % BLOCK or options.length < BLOCK:
            parser.error(f"--length: {options.length} is not a multiple of {BLOCK}")
        report = compare(Config(steps=options.steps, length=options.length), options.seeds)
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {options.json}")
    say_apart(report)
    if options.plot:
        plot(report, options.plot)


if __name__ == "__main__":
    sys.exit(main())
