"""Prefill of a long prompt by a model of transformers: this package's attention beside torch's SDPA.

    python benchmarks/transformers_prefill.py --json transformers_prefill.json
    python benchmarks/transformers_prefill.py --from transformers_prefill.json    # no GPU: print an earlier run

The model has Llama's layers at the size of one with 8 billion parameters, four of them by default, and random weights.
Each row is an attention: SDPA by torch's own choice and by cuDNN, this package's causal kernel (exact), and blocks
selected from q and k in each layer (``TopKSelection``, selection counted). Times are of the whole forward pass, and of
one layer's attention alone. Errors are those of the logits of the last positions beside SDPA's in the same type:
what a selection loses with random weights, whose attention is spread widely, is no measure of a trained model.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import OURS, WAYS, Fields, environment, free_memory, reason
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from codegen.json_rows import json_rows
from runtime.integrations import TopKSelection, register_transformers
from runtime.tools.bench.timing import ROUNDS, Call, back_to_back, single_calls

PACKAGES = ("torch", "transformers", "cuda-bindings")
SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
}
SINGLE, BACK_TO_BACK = "single", "back_to_back"  # milliseconds, medians
KEPT = 1024  # positions at the end whose logits are compared
HEADINGS = ("attention", "prefill ms", "x SDPA", "attention ms", "x SDPA", "logits: rms error", "largest", "same token")


@dataclass(frozen=True)
class Row:
    """An attention.

    Attributes:
        name: of the row.
        implementation: of transformers.
        topk: blocks of a list; None for all keys.
        cudnn: whether SDPA is computed by cuDNN.
    """

    name: str
    implementation: str
    topk: int | None = None
    cudnn: bool = False

    @contextlib.contextmanager
    def chosen(self, model: Any) -> Any:
        """Make a model compute with it."""
        if self.implementation == OURS:
            register_transformers(OURS, pattern_for=TopKSelection(self.topk) if self.topk else None)
        if model.config._attn_implementation != self.implementation:
            model.set_attn_implementation(self.implementation)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if self.cudnn else contextlib.nullcontext():
            yield


PEER = Row("SDPA", "sdpa")
ROWS = (
    PEER,
    Row("SDPA by cuDNN", "sdpa", cudnn=True),
    Row("ours, causal", OURS),
    Row("ours, top 32 of 128 x 128", OURS, topk=32),
    Row("ours, top 64 of 128 x 128", OURS, topk=64),
)


def make_model(layers: int, length: int, device: str, **changes: Any) -> Any:
    """A model with random weights in bf16, the same each time."""
    import transformers

    config = transformers.LlamaConfig(
        **{**SIZES, **changes}, num_hidden_layers=layers, max_position_embeddings=length, use_cache=False
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    return model.eval()


def attention_of(model: Any, length: int) -> Call:
    """A call of the attention of the first layer alone, without projections."""
    import transformers

    module, device = model.model.layers[0].self_attn, model.device
    config = model.config
    torch.manual_seed(1)
    shape = (1, length, config.num_attention_heads + 2 * config.num_key_value_heads, config.head_dim)
    heads = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
    tensors = [x.transpose(1, 2) for x in torch.randn(shape, device=device).bfloat16().split(heads, 2)]

    def call() -> Any:
        function = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
        return function(module, *tensors, None, dropout=0.0, scaling=module.scaling)[0]

    return call


def errors_of(found: torch.Tensor, right: torch.Tensor) -> Fields:
    """Return how far logits (positions, vocabulary) are from others: rms and largest, over their rms; same argmax."""
    off, scale = found.double() - right.double(), right.double().square().mean().sqrt()
    return {
        "rms_error": float(f"{float(off.square().mean().sqrt() / scale):.3e}"),
        "largest_error": float(f"{float(off.abs().max() / scale):.3e}"),
        "same_token": round(float((found.argmax(-1) == right.argmax(-1)).float().mean()), 4),
    }


def in_row(row: Row, model: Any, call: Callable[[], Any]) -> Call:
    """A call with the attention of a row."""

    def run() -> Any:
        with row.chosen(model):
            return call()

    return run


def timed(calls: dict[str, Call], quick: bool) -> dict[str, Fields]:
    """The milliseconds of calls, alone and back to back."""
    alone = single_calls(calls, repeats=5 if quick else 15)
    together = back_to_back(calls, rounds=1 if quick else ROUNDS)
    return {name: {SINGLE: round(alone[name], 3), BACK_TO_BACK: round(together[name], 3)} for name in calls}


@torch.no_grad()
def measure(options: argparse.Namespace) -> Fields:
    """Run all rows, in turns."""
    model = make_model(options.layers, options.length, "cuda")
    torch.manual_seed(2)
    ids = torch.randint(0, SIZES["vocab_size"], (1, options.length), device="cuda")
    report = environment(PACKAGES)
    report |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "length": options.length}
    report |= {"layers": options.layers, "sizes": SIZES, "dtype": "bfloat16", "kept": KEPT}
    attention = attention_of(model, options.length)

    def prefill() -> Any:
        return model(ids, logits_to_keep=KEPT).logits[0]

    results: dict[str, Fields] = {}
    failed: dict[str, str] = {}
    right = None
    for row in ROWS:
        try:
            logits = in_row(row, model, prefill)()
            in_row(row, model, attention)()
        except Exception as error:
            failed[row.name] = reason(error)
            continue
        right = logits if row is PEER else right
        results[row.name] = {} if right is None else errors_of(logits, right)
    for key, call in (("prefill_ms", prefill), ("attention_ms", attention)):
        calls = {row.name: in_row(row, model, call) for row in ROWS if row.name in results}
        for name, times in timed(calls, options.quick).items():
            results[name][key] = times
    report["rows"] = [
        {"name": row.name, "results": results.get(row.name), "failed": failed.get(row.name)} for row in ROWS
    ]
    free_memory()
    return report


def cells(record: Fields, peer: Fields) -> list[str]:
    """A row of the table: each time alone / back to back, and how many times as fast as SDPA."""
    found, told = record["results"], [record["name"]]
    for key in ("prefill_ms", "attention_ms"):
        told.append(" / ".join(f"{found[key][way]:.1f}" for way in (SINGLE, BACK_TO_BACK)))
        told.append(" / ".join(f"{peer[key][way] / found[key][way]:.2f}" for way in (SINGLE, BACK_TO_BACK)))
    return [*told, f"{found['rms_error']:.1e}", f"{found['largest_error']:.1e}", f"{found['same_token']:.1%}"]


def show(report: Fields) -> None:
    """Print the table, and below it what failed."""
    peer = next((record["results"] for record in report["rows"] if record["name"] == PEER.name), None)
    size = f"{report['length']} tokens, {report['layers']} layers, {report['dtype']}"
    table = Table(title=f"{report['device']}, driver {report['driver']}; {size}; {WAYS}")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "attention" else "right")
    for record in report["rows"]:
        if record["results"] and peer:
            table.add_row(*cells(record, peer))
    console = Console(width=None if Console().is_terminal else 140, highlight=False)
    console.print(table)
    for record in report["rows"]:
        if record["failed"]:
            console.print(f"{record['name']} has no time: {record['failed']}", markup=False, soft_wrap=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32768, help="tokens of the prompt (default: 32768)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (default: 4)")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the report")
    parser.add_argument("--from", dest="earlier", type=Path, metavar="FILE", help="show an earlier run's JSON")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.earlier:
        show(json.loads(options.earlier.read_text(encoding="utf-8")))
        return
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU; --from FILE shows an earlier run")
    report = measure(options)
    if options.json:
        options.json.write_text(json_rows(report), encoding="utf-8")
    show(report)
    if any(record["failed"] for record in report["rows"] if record["name"].startswith(OURS)):
        raise SystemExit("error: rows without a time of ours, see above")


if __name__ == "__main__":
    main()
