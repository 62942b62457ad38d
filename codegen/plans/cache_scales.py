"""Parameters of the scales of an e4m3 cache."""

from __future__ import annotations

from codegen.plan import Param, i32, i64, pointer


def scale_params() -> tuple[Param, ...]:
    """Parameters of the factors of e4m3 caches."""
    return (
        pointer("k_scale", "float", "factors of K: of each KV head, or of each token and KV head; or null"),
        pointer("v_scale", "float", "factors of V, likewise"),
        i32("k_scale_stride", "stride of the factors of K by KV head, 0 if all heads share one"),
        i32("v_scale_stride", "the same of V"),
        i32("scale_by_token", "1 if each token has its own factors"),
        i64("scale_page_stride", "page stride of such factors of K and of V"),
        i64("scale_token_stride", "token stride, likewise"),
        i64("scale_head_stride", "head stride, likewise"),
    )
