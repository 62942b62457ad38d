"""Dtypes of aux tensors in torch."""

from __future__ import annotations

import torch

TORCH_DTYPES = {
    "int32": torch.int32,
    "int64": torch.int64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "bool": torch.bool,
}
"""Dtypes by name in specs."""
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""Names in specs by dtype."""
