"""Element types of aux tensors, as torch has them."""

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
"""By the name that a spec has."""
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""The other way round."""
