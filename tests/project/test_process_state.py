"""What a module keeps for the whole process is bounded, and few places change what belongs to the process."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
# What modules keep without a number of entries at most, and what bounds it.
KEPT = {
    "codegen/select/calibration.py:_known": "rows of the table of measurements",
    "codegen/installation.py:_packages": "extras of the package",
    "runtime/ops/bsr_launches.py:_prepared": "weak: prepared matrices that callers hold",
    "runtime/patterns.py:_CLASSES": "classes of patterns",
    "codegen/library.py:_specs": "folders of specs, those of the package",
    "codegen/library.py:_by_hash": "folders of specs, those of the package",
    "codegen/select/shipped.py:_by_semantics": "no argument",
    "codegen/select/shipped.py:_by_key": "no argument",
    "codegen/select/table.py:_tuning": "names in the table of measurements",
    "codegen/select/table.py:measurements": "no argument",
    "runtime/expressions/trace.py:_undisturbed": "no argument",
    "runtime/driver/api.py:driver": "no argument",
    "runtime/receipts/mode.py:by_environment": "no argument",
    "runtime/tools/report/site.py:environment": "no argument",
    "runtime/tools/report/patterns.py:_positional": "specs of a report, made by a command that ends",
    "runtime/tools/report/patterns.py:_listed": "specs of a report, made by a command that ends",
    "runtime/tools/report/patterns.py:_stored": "specs of a report, made by a command that ends",
    "runtime/tools/report/patterns.py:product_example": "specs of a report, made by a command that ends",
    "runtime/tools/report/highlight.py:_paragraph": "texts of a report, made by a command that ends",
    "runtime/tools/report/highlight.py:_lexer": "the languages of a report",
    "runtime/compile/cache_trust.py:_is_private": "groups and users that own a folder of the cache",
    "runtime/compile/cache_trust.py:_unknown_outside": "no argument",
    "runtime/compile/toolchain.py:nvrtc": "no argument",
    "runtime/compile/toolchain.py:include_folders": "sets of headers that plans name",
    "runtime/compile/toolchain.py:headers_digest": "sets of headers that plans name",
    "runtime/compile/toolchain.py:cuobjdump": "no argument",
    "runtime/compile/toolchain.py:nvdisasm": "no argument",
    "runtime/driver/streams.py:_lasting": "streams of torch's pool",
    "runtime/driver/launch.py:_launching": "devices",
    "runtime/driver/library.py:_loaded": "weak: libraries that kernels hold",
    "runtime/driver/library.py:_kept": "a copy of each cubin that was launched in a captured graph",
    "runtime/driver/library.py:_retired": "emptied once launches have ended",
    "runtime/driver/library.py:_waiting": "emptied once launches have ended",
    "runtime/driver/workspace.py:_counters": "streams of torch's pool",
    "runtime/driver/context.py:_primary": "devices",
    "runtime/integrations/diffusers_attention.py:_ours": "names of diffusers' enumeration",
    "runtime/integrations/sglang/diffusion_registration.py:_added": "one member of SGLang's enumeration",
    "runtime/distributed/agreement.py:_states": "names of process groups",
    "runtime/verify/guard.py:_real": "functions of torch that the guard replaces",
    "runtime/compile/cache_eviction.py:_seen": "folders that were the cache's",
}
# Calls and assignments that change the state of the process, and why they may.
CHANGES = {
    "runtime/prepare/row_clusters.py:torch.set_num_threads": "one search at a time, restored after it",
    "runtime/verify/common.py:torch.use_deterministic_algorithms": "of the command that verifies, restored after it",
    "runtime/tools/tune/search.py:warnings.catch_warnings": "of the command that tunes, before it starts threads",
    "runtime/tools/tune/search.py:warnings.simplefilter": "of the command that tunes, before it starts threads",
}
CHANGING = re.compile(
    r"os\.(environ(\.(update|setdefault|pop|clear))?|putenv|unsetenv|umask|chdir)|sys\.path(\.\w+)?|"
    r"(torch\.)?(set_num_threads|set_num_interop_threads|set_default_\w+|use_deterministic_algorithms)|"
    r"(torch\.)?(compiler\.)?set_stance|torch\.backends\..+|(warnings\.)?(catch_warnings|filterwarnings|simplefilter)|"
    r"locale\.setlocale|signal\.signal"
)
CONTAINERS = {"dict", "list", "set", "deque", "defaultdict", "OrderedDict", "Counter"}
MUTATORS = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popleft"} | {
    "remove",
    "setdefault",
    "update",
}


def _name_of(call: ast.expr) -> str:
    return ast.unparse(call.func if isinstance(call, ast.Call) else call).rpartition(".")[2]


def _is_unbounded(decorator: ast.expr) -> bool:
    """Whether a decorator keeps every result."""
    name = _name_of(decorator)
    if name != "lru_cache" or not isinstance(decorator, ast.Call):
        return name == "cache"
    sizes = [*decorator.args[:1], *(word.value for word in decorator.keywords if word.arg == "maxsize")]
    return any(isinstance(size, ast.Constant) and size.value is None for size in sizes)


def _is_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        name = _name_of(value)
        return name in CONTAINERS or name.startswith("Weak")
    return isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)


def _mutated(function: ast.AST) -> Iterator[str]:
    """Names whose value a function changes in place, or that it declares as global."""
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name):
            yield node.value.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            if isinstance(node.func.value, ast.Name):
                yield node.func.value.id
        elif isinstance(node, ast.Global):
            yield from node.names


def kept(tree: ast.Module) -> set[str]:
    """Functions whose results, and containers whose entries, a module keeps without a bound that can be read."""
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    found = {each.name for each in functions if any(map(_is_unbounded, each.decorator_list))}
    containers = set()
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        if targets and _is_container(getattr(statement, "value", None)):
            containers |= {target.id for target in targets if isinstance(target, ast.Name)}
    if containers:  # few modules have one, and a walk through all functions takes long
        found |= containers & {name for each in functions for name in _mutated(each)}
    return found


def changes(tree: ast.Module) -> set[str]:
    """What a module calls, assigns or deletes of the process."""
    found = set()
    for node in ast.walk(tree):
        places: list[ast.expr] = []
        if isinstance(node, ast.Call):
            places = [node.func]
        elif isinstance(node, ast.Assign | ast.Delete):
            places = node.targets
        elif isinstance(node, ast.AugAssign):
            places = [node.target]
        for place in places:
            text = ast.unparse(place.value if isinstance(place, ast.Subscript) else place)
            is_call = isinstance(node, ast.Call)
            reads = is_call and text.startswith("sys.path.") and text.rpartition(".")[2] not in MUTATORS
            if CHANGING.fullmatch(text) and not reads:
                found.add(text)
    return found


def test_what_is_kept_and_changed_for_the_process_is_known() -> None:
    found_kept, found_changes = set(), set()
    for path in sorted([*(PROJECT / "codegen").rglob("*.py"), *(PROJECT / "runtime").rglob("*.py")]):
        name, tree = path.relative_to(PROJECT).as_posix(), ast.parse(path.read_text())
        found_kept |= {f"{name}:{each}" for each in kept(tree)}
        found_changes |= {f"{name}:{each}" for each in changes(tree)}
    assert found_kept == KEPT.keys(), "bound it by lru_cache(maxsize=...), or name here what bounds it"
    assert found_changes == CHANGES.keys(), "state of the process: leave it alone, or name here why it may change"


def test_each_kind_is_found() -> None:
    source = """
a, b = {}, 1
known: dict[int, int] = {}
fixed = {1: 2}
names = set()
@functools.cache
def f(x):
    known[x] = 1
    names.add(fixed[x])
@lru_cache(maxsize=None)
def g(x): ...
@lru_cache(None)
def h(x): ...
@lru_cache(maxsize=8)
def bounded(x): ...
@lru_cache
def by_default(x): ...
"""
    assert kept(ast.parse(source)) == {"known", "names", "f", "g", "h"}
    source = """
os.environ["A"] = "1"
del os.environ["B"]
os.environ.get("C")
sys.path.insert(0, "")
sys.path.index("")
torch.backends.cuda.matmul.allow_tf32 = True
torch.compiler.set_stance("force_eager")
with warnings.catch_warnings(): os.umask(0)
"""
    assert changes(ast.parse(source)) == {
        "os.environ",
        "sys.path.insert",
        "torch.backends.cuda.matmul.allow_tf32",
        "torch.compiler.set_stance",
        "warnings.catch_warnings",
        "os.umask",
    }
