"""Checks and times variants of BSR x dense in FP8; each in a child that is ended after 20 s without a line."""
import concurrent.futures as cf
import json
import select
import subprocess
import sys
import time
from dataclasses import replace

BASE = dict(op="bsr_spmm", arch="sm_90a", dtype="e4m3", b_layout="column_major", mma="wgmma", copy="tma", schedule="cooperative")


def spec(rows, cols, n, stages, **more):
    return {**BASE, "block": {"rows": rows, "cols": cols}, "tile": {"m": rows, "n": n, "k": cols}, "stages": stages, **more}


def sddmm(size, n, stages, **more):
    fields = {**BASE, "op": "bsr_sddmm", "block": {"rows": size, "cols": size}, "tile": {"m": size, "n": n, "k": 128}, "stages": stages, **more}
    del fields["b_layout"]
    return fields


VARIANTS = {
    "b128 every 0": spec(128, 128, 256, 4, accumulate_every=0),
    "b128 every 1": spec(128, 128, 256, 4, accumulate_every=1),
    "b128 every 2": spec(128, 128, 256, 4, accumulate_every=2),
    "b128 block scales": spec(128, 128, 256, 4, scales="block"),
    "b128 m64n256": "n256",
    "b128 tile128 every 1": spec(128, 128, 128, 6, accumulate_every=1),
    "b128 tile128 every 4": spec(128, 128, 128, 6, accumulate_every=4),
    "b128 fp32 every 1": spec(128, 128, 256, 4, output="fp32"),
    "b128 tile128 every 2": spec(128, 128, 128, 6, accumulate_every=2),
    "b128 fp16": "h100_bsr_spmm_b128",
    "b128 fp16 columns": "h100_bsr_spmm_b128_column_major",
    "b64 512 every 0": spec(64, 64, 512, 5, accumulate_every=0),
    "b64 512 every 1": spec(64, 64, 512, 5, accumulate_every=1),
    "b64 512 every 2": spec(64, 64, 512, 5, accumulate_every=2),
    "b64 256 every 0": spec(64, 64, 256, 8, accumulate_every=0),
    "b64x128 512 every 0": spec(64, 128, 512, 2, accumulate_every=0),
    "b64 256 every 2": spec(64, 64, 256, 8, accumulate_every=2),
    "b64x128 256 every 0": spec(64, 128, 256, 4, accumulate_every=0),
    "b128x64 256 every 0": spec(128, 64, 256, 8, accumulate_every=0),
    "b64x128 256 block": spec(64, 128, 256, 4, scales="block"),
    "b64 fp16": "h100_bsr_spmm_b64",
    "b32 1024 every 0": spec(32, 32, 1024, 5, accumulate_every=0),
    "b32 1024 every 4": spec(32, 32, 1024, 5, accumulate_every=4),
    "b32 512 every 0": spec(32, 32, 512, 8, accumulate_every=0),
    "b32 e5m2 fp16 every 1": spec(32, 32, 512, 8, dtype="e5m2", output="fp16"),
    "b32 fp16": "h100_bsr_spmm_b32",
    "b64 512 blocked every 0": spec(64, 64, 512, 5, accumulate_every=0, b_layout="blocked"),
    "b64 512 blocked every 2": spec(64, 64, 512, 5, accumulate_every=2, b_layout="blocked"),
    "b64 256 blocked every 0": spec(64, 64, 256, 8, accumulate_every=0, b_layout="blocked"),
    "b32 1024 blocked every 0": spec(32, 32, 1024, 5, accumulate_every=0, b_layout="blocked"),
    "b32 512 blocked every 0": spec(32, 32, 512, 8, accumulate_every=0, b_layout="blocked"),
    "b128x64 blocked every 0": spec(128, 64, 256, 8, accumulate_every=0, b_layout="blocked"),
    "b128 blocked every 0": spec(128, 128, 256, 4, accumulate_every=0, b_layout="blocked"),
    "b128 blocked block scales": spec(128, 128, 256, 4, scales="block", b_layout="blocked"),
    "probe 32": spec(32, 32, 128, 4, accumulate_every=0, output="fp32"),
    "scaled_mm": "torch",
    "sddmm b128 every 1": sddmm(128, 256, 4),
    "sddmm b128 every 0": sddmm(128, 256, 4, accumulate_every=0),
    "sddmm b64 every 1": sddmm(64, 256, 4),
    "sddmm b64 512 every 0": sddmm(64, 512, 2, accumulate_every=0),
    "sddmm b32 every 1": sddmm(32, 256, 5),
    "sddmm b128 fp16": "h100_bsr_sddmm_b128",
    **{f"verify {stem}": stem for stem in ("h100_e4m3_bsr_spmm_b128", "h100_e4m3_bsr_spmm_b128_block_scales", "h100_e4m3_bsr_spmm_b64", "h100_e4m3_bsr_spmm_b32", "h100_e4m3_bsr_sddmm_b128")},
}
SIZE = 8192
LAG = """  if (warpgroup == %s && %s > 2) %s;\n"""
ARRIVE = "asm volatile(\"bar.arrive 3, 256;\" ::: \"memory\")"
WAIT = "bar_sync(3, 256)"
BAR = ("// sums += the products of all", "__device__ __forceinline__ void bar_sync(int id, int threads);\n// sums += the products of all")
START = ("    // An empty block row has no step", "    if (warpgroup == 1 && tile.end - tile.first > 2) bar_sync(3, 256);\n    // An empty block row has no step")
FAST_LAG = [BAR, START, ("    if (step > 0 && warp_leader) mbarrier_arrive(running);\n    running", "    if (step == 1 && steps > 2 && threadIdx.x < 256) " + ARRIVE + ";\n    if (step > 0 && warp_leader) mbarrier_arrive(running);\n    running")]
PROMOTED_LAG = [BAR, START, ("    PipelineState at;\n", "    PipelineState at;\n    if (step == 1 && steps > 2 && threadIdx.x < 256) " + ARRIVE + ";\n")]
SCALED_LAG = [BAR, START, ("    const float a_scale = next_scale;", "    if (block == first_block + 1 && end - first_block > 2 && threadIdx.x < 256) " + ARRIVE + ";\n    const float a_scale = next_scale;"), ("  const bool warp_leader = threadIdx.x % 32 == 0;\n  float next_scale", "  const bool warp_leader = threadIdx.x % 32 == 0;\n  const int first_block = block;\n  float next_scale")]
PATCHES = {
    "b128 every 0, lag": ("b128 every 0", FAST_LAG, {}),
    "b128 every 1, lag": ("b128 every 1", PROMOTED_LAG, {}),
    "b128 block, lag": ("b128 block scales", SCALED_LAG, {}),
    "b128 every 0, pieces 64": ("b128 every 0", [], {"PIECE_ROWS": 64}),
    "b128 every 0, pieces 128": ("b128 every 0", [], {"PIECE_ROWS": 128}),
    "b128 every 1, pieces 64": ("b128 every 1", [], {"PIECE_ROWS": 64}),
    "b128 block, pieces 64": ("b128 block scales", [], {"PIECE_ROWS": 64}),
    "b128 every 0, lag, pieces 64": ("b128 every 0", FAST_LAG, {"PIECE_ROWS": 64}),
    "b128 every 1, lag, pieces 64": ("b128 every 1", PROMOTED_LAG, {"PIECE_ROWS": 64}),
}
VARIANTS.update({name: VARIANTS[of] for name, (of, *_) in PATCHES.items()})


def compiled_of(name):
    import codegen.plans.bsr_fp8 as bsr_fp8
    from codegen.plans import plan_of
    from codegen.render import Generated, render_plan
    from runtime.compile.compiler import compile_generated, compile_spec
    if name not in PATCHES:
        return compile_spec(named_of(name))
    _, pairs, values = PATCHES[name]
    kept = {key: getattr(bsr_fp8, key) for key in values}
    for key, value in values.items():
        setattr(bsr_fp8, key, value)
    named = named_of(name)
    plan = plan_of(named.spec, named.stem)
    s = render_plan(plan)
    for key, value in kept.items():
        setattr(bsr_fp8, key, value)
    for old, new in pairs:
        assert s.count(old) == 1, (name, old, s.count(old))
        s = s.replace(old, new)
    return compile_generated(Generated(named, plan, s))


def named_of(name):
    from codegen.library import find_spec
    return find_spec(VARIANTS[name])


def hacked():
    """The fp16 kernel with m64n256, its text changed to e4m3."""
    from codegen.library import find_spec
    from codegen.plan import TensorMap
    from codegen.render import Generated, generate
    g = generate(find_spec("h100_bsr_spmm_b128_column_major"))
    s = g.source
    s = s.replace("k16.f32.f16.f16", "k32.f32.e4m3.e4m3").replace("}, a, b, p, 1, 1, 0, 0;", "}, a, b, p, 1, 1;")
    s = s.replace("constexpr int kTileK = 64;", "constexpr int kTileK = 128;").replace("kTileK / 16", "kTileK / 32")
    s = s.replace("cvt.rn.f16x2.f32", "cvt.rn.bf16x2.f32")
    maps = {"a_map": TensorMap((128, 128, 1), 128, dtype="e4m3"), "b_map": TensorMap((128, 256), 128, dtype="e4m3"),
            "c_map": TensorMap((64, 64), 128, dtype="bf16")}
    return Generated(g.named, replace(g.plan, tensor_maps=maps), s)


def compile_one(name):
    from runtime.compile.compiler import compile_generated, compile_spec
    what = VARIANTS[name]
    if what == "torch":
        return
    compile_generated(hacked()) if what == "n256" else compiled_of(name)


def inputs(torch, rows, cols, block_rows, block_columns, count, n, dtype, dev, seed):
    g = torch.Generator(device=dev).manual_seed(seed)
    counts = [count] * block_rows if count else [int(c) for c in torch.randint(0, block_columns + 1, (block_rows,), generator=g, device=dev)]
    col = torch.cat([torch.randperm(block_columns, generator=g, device=dev)[:c] for c in counts])
    crow = torch.tensor([0, *counts], device=dev).cumsum(0)
    nnz = int(crow[-1])
    values = torch.randn((nnz, rows, cols), generator=g, device=dev)
    b = torch.randn((n, block_columns * cols), generator=g, device=dev)
    half = dtype in (torch.float16, torch.bfloat16)
    values, b = ((values, b) if half else (values * 32, b * 32))
    values, b = values.to(dtype), b.to(dtype)
    a = torch.sparse_bsr_tensor(crow, col, values, size=(block_rows * rows, block_columns * cols), check_invariants=False)
    return a, b, crow, col, values


def scales_of(torch, kernel_spec, nnz, n, depth, dev, seed):
    if kernel_spec.dtype not in ("e4m3", "e5m2"):
        return {}, None, None
    g = torch.Generator(device=dev).manual_seed(seed + 1)
    if kernel_spec.scales == "block":
        sa = torch.rand(nnz, generator=g, device=dev) + 0.5
        ld = -(-n // 4) * 4
        sb = (torch.rand((depth // 128, ld), generator=g, device=dev) + 0.5).mT[:n]
        return {"scale_a": sa / 1024, "scale_b": sb}, sa / 1024, sb
    sa, sb = torch.tensor(1 / 1024, device=dev), torch.full((1,), 1.25, device=dev)
    return {"scale_a": sa, "scale_b": sb}, sa, sb


def reference(torch, crow, col, values, b, sa, sb, rows, cols, which):
    """float64 rows of C of the given block rows."""
    out = []
    bd = b.double()
    if sb is not None:
        bd = bd * (sb.double().repeat_interleave(128, 1) if sb.numel() > 1 else sb.double())
    for r in which:
        acc = torch.zeros((rows, b.shape[0]), dtype=torch.float64, device=b.device)
        for i in range(int(crow[r]), int(crow[r + 1])):
            v = values[i].double() * (1 if sa is None else (sa.double() if sa.numel() == 1 else sa[i].double()))
            c = int(col[i]) * cols
            acc += v @ bd[:, c : c + cols].T
        out.append(acc)
    return torch.cat(out)


def make_call(torch, name, dev):
    """Return (spec, function of (a, b, scales) that multiplies)."""
    from runtime.compile.compiler import compile_generated, compile_spec
    from runtime.kernel import _loaded
    if VARIANTS[name] == "n256":
        from runtime.driver.context import entered
        from runtime.driver.enqueue import enqueue
        from runtime.driver.launch import LoadedKernel
        from runtime.driver.workspace import Memory
        compiled = compile_generated(hacked())
        with entered(0):
            loaded = LoadedKernel(compiled)
        signatures = {}
        from codegen.problem import SpmmShape

        def call(a, b, scales):
            m, n = a.shape[0], b.shape[0]
            out = torch.empty((m, n), dtype=torch.bfloat16, device=dev)
            key = (m, n, a.values().shape)
            if key not in signatures:
                args = loaded.plan.problem(SpmmShape(m, a.shape[1], n, a.values().shape[0], 1))
                numbers = {**args.numbers, "index_words": 2}
                v = a.values()
                signatures[key] = loaded.signature(0, args.tiles, numbers, {
                    "a": (tuple(v.shape), v.stride()), "b": (tuple(b.shape), b.stride()), "c": ((m, n), (n, 1))}), Memory.of(args)
            signature, memory = signatures[key]
            at = {"a": a.values().data_ptr(), "crow_indices": a.crow_indices().data_ptr(), "col_indices": a.col_indices().data_ptr(), "b": b.data_ptr(), "c": out.data_ptr()}
            enqueue(loaded, signature, at, b.device, memory)
            return out
        return None, call
    kernel = _loaded(compiled_of(name), torch.device("cuda", 0))

    def call(a, b, scales):
        if kernel.spec.b_layout == "blocked":
            return kernel(a, given_blocks(b), **scales)
        return kernel(a, b.mT if kernel.spec.b_layout == "column_major" else b, **scales)

    blocks = {}

    def given_blocks(b):
        key = (b.data_ptr(), b.shape)
        if key not in blocks:
            blocks.clear()
            blocks[key] = (b, b.unflatten(1, (-1, kernel.spec.block.cols)).transpose(0, 1).contiguous())
        return blocks[key][1]
    return kernel.spec, call


def errors(torch, got, ref):
    d = (got.double() - ref)
    rms = ref.square().mean().sqrt()
    return {"rmse": float(d.square().mean().sqrt() / rms), "max": float(d.abs().max() / rms)}


def run(name):
    import torch

    from runtime.bench.timing import back_to_back, single_calls
    from runtime.kernels.arguments import TORCH_DTYPES
    dev = torch.device("cuda", 0)
    row = {"variant": name}

    def times(calls, flops):
        s, l = single_calls(calls, repeats=9, warm_up=2), back_to_back(calls, seconds=0.15, rounds=2)
        return {k: (round(flops / s[k] / 1e9), round(flops / l[k] / 1e9)) for k in calls}
    if name.startswith("verify"):
        return verify(torch, name, dev, row)
    if name.startswith("probe"):
        return probe(torch, name, dev, row)
    if name.startswith("sddmm"):
        return run_sddmm(torch, name, dev, row, times)
    if VARIANTS[name] == "torch":
        one = torch.ones((), device=dev)
        for k in (2048, 8192):
            a, b = (torch.randn((SIZE, k), device=dev).mul(32).to(torch.float8_e4m3fn) for _ in range(2))
            calls = {f"fast {f}": (lambda f=f: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=f)) for f in (True, False)}
            row[f"K {k}"] = times(calls, 2 * SIZE * SIZE * k)
            ref = a[:256].double() @ b.double().T
            for f, c in calls.items():
                row[f"K {k} error {f}"] = errors(torch, c()[:256], ref)
            try:
                sa = torch.ones((SIZE, k // 128), device=dev).mT.contiguous().mT
                sb = torch.ones((SIZE // 128, k // 128), device=dev).contiguous()
                c = lambda: torch._scaled_mm(a, b.t(), sa, sb.t(), out_dtype=torch.bfloat16)
                c()
                row[f"K {k} 1x128"] = times({"1x128 x 128x128": c}, 2 * SIZE * SIZE * k)
            except Exception as e:
                row[f"K {k} 1x128"] = str(e)[:200]
        return row
    s, call = make_call(torch, name, dev)
    rows, cols = (128, 128) if s is None else (s.block.rows, s.block.cols)
    dtype = torch.float8_e4m3fn if s is None else TORCH_DTYPES[s.dtype]
    by_columns = s is None or s.b_layout != "row_major"

    def given(seed, *shape):
        a, b, crow, col, values = inputs(torch, rows, cols, *shape, dtype, dev, seed)
        scales, sa, sb = ({}, None, None) if s is None else scales_of(torch, s, values.shape[0], b.shape[0], a.shape[1], dev, seed)
        return a, b, crow, col, values, scales, sa, sb
    for case, shape in {"ragged": (9, 11, 0, 1000), "narrow": (3, 4, 2, 8), "long": (5, 70, 65, 520)}.items():
        a, b, crow, col, values, scales, sa, sb = given(1, *shape)
        got = call(a, b if by_columns else b.T.contiguous(), scales)
        again = call(a, b if by_columns else b.T.contiguous(), scales)
        ref = reference(torch, crow, col, values, b, sa, sb, rows, cols, range(shape[0]))
        row[case] = errors(torch, got, ref)
        if not torch.equal(got, again):
            row[case]["differs"] = True
    count = max(1, SIZE // 4 // cols)  # a quarter: K 2048
    count = 16
    a, b, crow, col, values, scales, sa, sb = given(2, SIZE // rows, SIZE // cols, count, SIZE)
    b = b if by_columns else b.T.contiguous()
    got = call(a, b, scales)
    ref = reference(torch, crow, col, values, b if by_columns else b.T, sa, sb, rows, cols, [0, SIZE // rows - 1])
    row["big"] = errors(torch, torch.cat([got[:rows], got[-rows:]]), ref)
    row["tflops"] = times({"us": lambda: call(a, b, scales)}, 2 * values.numel() * SIZE)["us"]
    return row


def verify(torch, name, dev, row):
    from runtime.compile.compiler import compile_spec
    from runtime.kernel import _loaded
    from runtime.verify import bsr_sddmm, bsr_spmm
    kernel = _loaded(compile_spec(named_of(name)), dev)
    cases = bsr_sddmm.CASES if "sddmm" in name else bsr_spmm.cases_of(kernel.compiled.plan)
    module = bsr_sddmm if "sddmm" in name else bsr_spmm
    found = [module.run_case(kernel, case, dev) for case in cases]
    row["passed"] = f"{sum(o.passed for o in found)} of {len(found)}"
    row["cases"] = "; ".join(f"{o.name} {o.max_error:.1e}/{o.torch_error or 0:.1e}/{o.tolerance:.1e}{'' if o.passed else ' FAILED ' + o.problem}" for o in found)
    return row


def run_sddmm(torch, name, dev, row, times):
    from runtime.compile.compiler import compile_spec
    from runtime.kernel import _loaded
    from runtime.kernels.arguments import TORCH_DTYPES
    kernel = _loaded(compile_spec(named_of(name)), dev)
    s = kernel.spec
    size, k, dtype = s.block.rows, SIZE, TORCH_DTYPES[s.dtype]
    _, _, crow, col, _ = inputs(torch, 1, 1, SIZE // size, SIZE // size, 16, 8, torch.float16, dev, 3)
    pattern = torch.sparse_bsr_tensor(crow, col, torch.zeros((len(col), size, size), device=dev, dtype=torch.bfloat16), size=(SIZE, SIZE), check_invariants=False)
    a, b = (torch.randn((SIZE, k), device=dev).mul(1 if dtype == torch.float16 else 32).to(dtype) for _ in range(2))
    scales = {} if dtype == torch.float16 else {"scale_a": torch.tensor(1 / 1024, device=dev), "scale_b": torch.ones(1, device=dev)}
    c = kernel(a, b, pattern, **scales).values()
    unit = 1 if dtype == torch.float16 else 1 / 1024
    ref = torch.stack([a[:size].double() @ b[int(j) * size : (int(j) + 1) * size].double().T * unit for j in col[:16]])
    row["big"] = errors(torch, c[:16], ref)
    row["tflops"] = times({"us": lambda: kernel(a, b, pattern, **scales)}, 2 * c.numel() * k)["us"]
    return row


def probe(torch, name, dev, row):
    """C[r, n] is B[n, k] where A has a 1 in (r, k): which (n, k) of B each element of C is, for A the identity."""
    from runtime.kernel import _loaded
    kernel = _loaded(compiled_of(name), dev)
    one = torch.ones((), device=dev)
    crow, col = torch.tensor([0, 1], device=dev), torch.tensor([0], device=dev)
    n, k = torch.meshgrid(torch.arange(64, device=dev), torch.arange(32, device=dev), indexing="ij")
    eye = torch.eye(32, device=dev).to(torch.float8_e4m3fn)[None]
    a = torch.sparse_bsr_tensor(crow, col, eye, size=(32, 32), check_invariants=False)
    found = []
    for values in (k % 8, k // 8, n % 8, n // 8):
        b = values.float().to(torch.float8_e4m3fn)
        found.append(kernel(a, b.mT, scale_a=one, scale_b=one))
    at_k, at_n = found[0] + 8 * found[1], found[2] + 8 * found[3]
    want_k, want_n = torch.arange(32, device=dev)[:, None].expand(32, 64), torch.arange(64, device=dev)[None].expand(32, 64)
    bad = (at_k != want_k) | (at_n != want_n)
    row["wrong"] = int(bad.sum())
    row["first"] = [(r, c, round(float(at_k[r, c]), 2), round(float(at_n[r, c]), 2)) for r, c in bad.nonzero()[::97].tolist()[:24]]
    row["rows wrong"] = bad.any(1).nonzero().flatten().tolist()
    row["columns wrong"] = bad.any(0).nonzero().flatten().tolist()
    # One 1 in A at a time: which (r, k) of A an element of C with B all ones sees.
    ones = torch.ones((64, 32), device=dev).to(torch.float8_e4m3fn)
    seen = []
    for r, kk in ((0, 0), (0, 16), (3, 5), (4, 0), (4, 16), (8, 0), (12, 20), (31, 31)):
        v = torch.zeros((1, 32, 32), device=dev)
        v[0, r, kk] = 1
        c = kernel(torch.sparse_bsr_tensor(crow, col, v.to(torch.float8_e4m3fn), size=(32, 32), check_invariants=False), ones.mT, scale_a=one, scale_b=one)
        seen.append(((r, kk), c.nonzero()[:, 0].unique().tolist(), c.sum().item()))
    row["seen"] = seen
    return row


def child(names):
    for name in names:
        try:
            row = run(name)
        except Exception as e:
            row = {"variant": name, "failed": f"{type(e).__name__}: {str(e)[:300]}"}
        print("ROW " + json.dumps(row), flush=True)


def show(v):
    if isinstance(v, dict) and "rmse" in v:
        return f"{v['rmse']:.2e}/{v['max']:.1e}" + (" DIFFERS" if v.get("differs") else "")
    return str(v)


def main(names):
    began = time.time()
    with cf.ProcessPoolExecutor(12) as pool:
        for name, job in {n: pool.submit(compile_one, n) for n in names}.items():
            try:
                job.result()
            except Exception as e:
                print("COMPILE", name, str(e)[:300])
    print(f"compiled after {time.time() - began:.0f} s", flush=True)
    left = list(names)
    while left:
        p = subprocess.Popen([sys.executable, __file__, "--child", *left], stdout=subprocess.PIPE, text=True)
        wait = 40  # the first one imports torch
        while left:
            ready, _, _ = select.select([p.stdout], [], [], wait)
            line = p.stdout.readline() if ready else ""
            if not line:
                print(f"{left[0]}: {'ended' if ready else 'TIMEOUT'}", flush=True)
                p.kill()
                left = left[1:]
                break
            if line.startswith("ROW "):
                row = json.loads(line[4:])
                left, wait = left[1:], 20
                print(f"{row.pop('variant'):24}", "  ".join(f"{k} {show(v)}" for k, v in row.items()), f"[{time.time() - began:.0f} s]", flush=True)
        p.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    else:
        main(sys.argv[1:] or sorted(VARIANTS, key=lambda name: name.startswith('verify')))
