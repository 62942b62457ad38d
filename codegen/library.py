"""Where the project's files are, and how specs are found and read.

In a source tree ``templates/``, ``specs/`` and ``generated/`` stand beside the package; in an installed wheel they are
inside it.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq, CommentedSet, TaggedScalar
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from codegen.errors import SpecError
from codegen.parse import parse_spec
from codegen.spec import Spec

_PACKAGE = Path(__file__).resolve().parent
IN_SOURCE_TREE = not (_PACKAGE / "data").is_dir()
"""Whether this is a source tree: what an installed package carries is not written to."""
ROOT = _PACKAGE.parent if IN_SOURCE_TREE else _PACKAGE / "data"
"""Folder that holds templates/, specs/ and generated/."""
TEMPLATES = ROOT / "templates"
SPECS = ROOT / "specs"
GENERATED = ROOT / "generated"


# A kernel's name is a symbol of its source: these have a meaning there. Names that only some sources have a use for are
# found by render.
_KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class co_await
co_return co_yield compl concept const const_cast consteval constexpr constinit continue decltype default delete do
double dynamic_cast else enum explicit export extern false float for friend goto if inline int long main mutable
namespace new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires
return short signed sizeof static static_assert static_cast struct switch template this thread_local throw true try
typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
"""
# What NVRTC knows without an include or by cuda_fp16.h, cuda_bf16.h and mma.h, and a word of PTX.
_CUDA_NAMES = """
CUuuid MAJOR_VERSION MINOR_VERSION NULL PATCH_LEVEL WARP_SZ abs assert blockDim blockIdx clock64 clock_t dim3 free
gridDim half half2 labs libraryPropertyType llabs llmax llmin malloc max min nv_bfloat16 nv_bfloat162 nv_half nv_half2
nvcuda printf ptrdiff_t size_t std threadIdx ullmax ullmin umax umin va_arg va_copy va_end va_list va_start warpSize
wmma
"""
_FUNCTIONS = """
acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh cospi cyl_bessel_i0 cyl_bessel_i1 erf erfc erfcinv
erfcx erfinv exp exp10 exp2 expm1 fabs fdim fdivide floor fma fmax fmin fmod frexp hypot ilogb j0 j1 jn ldexp lgamma
llrint llround log log10 log1p log2 logb lrint lround modf nan nearbyint nextafter norm norm3d norm4d normcdf normcdfinv
pow rcbrt remainder remquo rhypot rint rnorm rnorm3d rnorm4d round rsqrt scalbln scalbn sin sincos sincospi sinh sinpi
sqrt tan tanh tgamma trunc y0 y1 yn
"""
CPP_WORDS = frozenset(
    (_KEYWORDS + _CUDA_NAMES + _FUNCTIONS).split() + [f"{name}f" for name in _FUNCTIONS.split()]  # for floats
)
RESERVED = re.compile(r"k[A-Z].*|_([A-Z_].*)?|(cuda[A-Z]|CUDA|CU_|NV_).*")
"""Our constants, what C++ keeps for the compiler (``_`` alone is PTX's), and the names of CUDA's own headers."""
MOST_VALUES = 2000
"""Of a spec file, which has some dozens. More than the levels that Python descends: a cycle is told as one."""
INTEGER_BITS = 63


@dataclass(frozen=True)
class NamedSpec:
    """A spec with the name its generated file, kernel symbol and receipt carry.

    Attributes:
        stem: ``h100_topk32``; for a spec that came from no file, a name made of its fields and hash.
        spec: the spec itself.
        origin: ``specs/h100_topk32.yaml``, relative to the project; of a file elsewhere its name; "" for no file.
        path: the file, if there is one.
        lines: line of each field in the file, by dotted name.
    """

    stem: str
    spec: Spec
    origin: str = ""
    path: Path | None = None
    lines: Mapping[str, int] | None = field(default=None, compare=False, repr=False)

    @property
    def is_shipped(self) -> bool:
        """Whether it is one of the project's own."""
        return self.path is not None and self.path.resolve().is_relative_to(SPECS)

    @property
    def subfolder(self) -> Path:
        """Folder of a shipped spec below specs/, and of its source and receipt below generated/; else ``.``."""
        parent = SPECS if self.path is None else self.path.resolve().parent
        return parent.relative_to(SPECS) if parent.is_relative_to(SPECS) else Path()

    @property
    def source_file(self) -> str:
        """Where its source belongs, relative to the project."""
        return ("generated" / self.subfolder / f"{self.stem}.cu").as_posix()

    @property
    def argument(self) -> str:
        """How a command line names it: a shipped spec by its name, which an installed package knows too."""
        return self.stem if self.path is None or self.is_shipped else shlex.quote(str(self.path))

    def located(self, error: SpecError) -> SpecError:
        """Return ``error`` with the file and line of its field."""
        return error.at(location_of(self.place, self.lines or {}, error.field)) if self.place else error

    @property
    def place(self) -> str:
        """The file as messages name it: in the project its place there, elsewhere the path that was typed."""
        inside = self.path is None or self.path.resolve().is_relative_to(ROOT)
        return self.origin if inside else str(self.path)


def shipped_files() -> dict[str, Path]:
    """Return the shipped specs, in whichever folder of specs/ they are, by stem, sorted."""
    return _files(SPECS)


def _files(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.rglob("*.yaml"), key=lambda path: path.stem)}


def shipped_names() -> list[str]:
    """Return the stems of the shipped specs, sorted."""
    return list(shipped_files())


def shipped_specs() -> list[NamedSpec]:
    """Return every shipped spec, as a process first read it, in a list of the caller's own."""
    return list(_specs(SPECS))


@cache  # YAML takes 2 ms a file, and each advice for another architecture looks through all of them
def _specs(folder: Path) -> tuple[NamedSpec, ...]:
    return tuple(read_spec(path) for path in _files(folder).values())


def find_spec(source: str | Path | Mapping[str, Any] | Spec | NamedSpec) -> NamedSpec:
    """Turn whatever a user may call a spec into a named spec.

    Args:
        source: a path of a YAML file, the name of a shipped spec, a mapping of fields or a spec model.

    Raises:
        SpecError: for an unknown name (with near matches), an unreadable file or an illegal spec.
    """
    if isinstance(source, NamedSpec):
        return source
    if isinstance(source, str | Path):
        path = Path(source)
        if path.suffix in (".yaml", ".yml") or path.is_file():
            return read_spec(path)
        name = str(source)
        shipped = shipped_files()
        if name in shipped:
            return read_spec(shipped[name])
        near = difflib.get_close_matches(name, shipped, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else f"shipped specs: {', '.join(shipped)}"
        raise SpecError("", f"no spec is called {name!r}, and there is no such file; {hint}")
    spec = parse_spec(source)
    return NamedSpec(stem=unnamed_stem(spec), spec=spec)


def unnamed_stem(spec: Spec) -> str:
    """Return a readable, unique name for a spec that came from no file."""
    what: list[str] = [spec.op, spec.arch, spec.dtype]
    if spec.op == "attention":
        what += [f"d{spec.head_dim}", spec.pattern.stem()]
    elif spec.op == "tile_copy":
        what += [f"{spec.tile.m}x{spec.tile.n}"]
    else:
        what += [f"b{spec.block.rows}x{spec.block.cols}"]
    return "_".join([*what, spec.hash[:8]])


def read_spec(path: Path, text: str | None = None) -> NamedSpec:
    """Read one YAML spec file strictly.

    Args:
        path: the file.
        text: what it will hold, if that is not what it holds.

    Raises:
        SpecError: for a file that cannot be read, is not UTF-8, is not YAML, repeats a key, or is not a legal spec;
            with file and line.
    """
    origin = shown_place(path)
    if not (path.stem.isidentifier() and path.stem.isascii()):
        raise SpecError("", f"{path.stem!r} names the kernel, so it must be a C identifier", origin)
    if path.stem in CPP_WORDS or RESERVED.fullmatch(path.stem):
        raise taken(path.stem).at(origin)
    tree = yaml_tree(read_text(path) if text is None else text, origin)
    copy = PlainCopy()
    try:
        spec = parse_spec(copy.of(tree), shlex.quote(origin))
    except RecursionError:
        raise SpecError("", "is nested too deeply", origin) from None
    except SpecError as error:
        raise error.at(location_of(origin, copy.lines, error.field)) from None
    return NamedSpec(stem=path.stem, spec=spec, origin=_origin(path), path=path, lines=copy.lines)


def read_text(path: Path) -> str:
    """Return what a spec file holds.

    Raises:
        SpecError: for a file that cannot be read or is not UTF-8.
    """
    origin = shown_place(path)
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise SpecError("", f"cannot be read: {error.strerror or error}", origin) from None
    except UnicodeDecodeError as error:
        raise SpecError("", f"is not UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x})", origin) from None


def shown_place(path: Path) -> str:
    """Return a spec file as messages name it: in the project its place there, elsewhere the path that was typed."""
    return _origin(path) if path.resolve().is_relative_to(ROOT) else str(path)


def taken(stem: str) -> SpecError:
    """Return the error of a kernel's name that its source cannot have."""
    return SpecError("", f"{stem!r} names the kernel, but has a meaning in CUDA C++ or in the source")


def _origin(path: Path) -> str:
    """Return the path as a generated file has it: that in the project, or the name of a file that is elsewhere."""
    try:
        return path.resolve().relative_to(ROOT).as_posix()
    except ValueError:
        return path.name  # however it was typed


def yaml_tree(text: str, origin: str) -> Any:
    """Return what a YAML parser makes of a spec file.

    Raises:
        SpecError: for a text that is not YAML.
    """
    try:
        return YAML(typ="rt", pure=True).load(text)
    except MarkedYAMLError as error:
        line = f"{origin}:{error.problem_mark.line + 1}" if error.problem_mark else origin
        problem = str(error.problem or "is not YAML")
        reason = f"{error.context} {problem}" if problem.startswith("but ") else problem
        raise SpecError("", reason.splitlines()[0], line) from None
    except RecursionError:
        raise SpecError("", "is nested too deeply", origin) from None
    except TypeError:  # a mapping or a list within a name: there is no hash of it
        raise SpecError("", "has a mapping or a list in the name of a field, which is a word", origin) from None
    except (YAMLError, ValueError) as error:
        raise SpecError("", f"is not YAML: {str(error).splitlines()[0]}", origin) from None


class PlainCopy:
    """Copies a YAML tree as plain Python.

    Attributes:
        lines: line of each field, by dotted name.
    """

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self._values = 0

    def of(self, node: Any, name: str = "") -> Any:
        """Return the copy of a node; ``name`` is its field's.

        Raises:
            SpecError: for more values than a spec has (an alias is copied wherever it is used, so a few lines can be
                gigabytes), a number that no field could hold, or a name that is none.
        """
        self._values += 1
        if self._values > MOST_VALUES:
            raise SpecError("", f"has more than {MOST_VALUES} values, where those of an alias count at each use")
        if isinstance(node, CommentedMap):
            return self._mapping(node, name)
        if isinstance(node, CommentedSeq | CommentedSet):
            return [self.of(value, _joined(name, i)) for i, value in enumerate(node)]
        plain = _scalar(node)
        if isinstance(plain, int) and plain.bit_length() > INTEGER_BITS:
            raise SpecError(name, f"is an integer of {plain.bit_length()} bits; at most {INTEGER_BITS} are allowed")
        return plain

    def _mapping(self, node: CommentedMap, name: str) -> dict[Any, Any]:
        out = {}
        for key, value in node.items():
            plain = _scalar(key)
            field = _joined(name, plain)
            if node.lc.data and key in node.lc.data:  # a merged key has no place of its own
                self.lines[field] = node.lc.key(key)[0] + 1
            if isinstance(plain, list | dict):
                raise SpecError(field, "is a mapping or a list; the name of a field is a word")
            out[plain] = self.of(value, field)
        return out


def _joined(name: str, part: object) -> str:
    """Return the dotted name of a part of a field."""
    return f"{name}.{part}" if name else str(part)


def _scalar(node: Any) -> Any:
    """Return a YAML scalar, or a name that is none, as plain Python."""
    if isinstance(node, TaggedScalar):
        return str(node.value)  # !!str 128; tags of other types were read as those
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    if isinstance(node, tuple):
        return [_scalar(part) for part in node]
    if isinstance(node, Mapping):
        return {_scalar(key): _scalar(value) for key, value in node.items()}
    return node


def location_of(origin: str, lines: Mapping[str, int], field: str) -> str:
    """Return file:line of a field, or of the nearest enclosing field that is in the file."""
    while field and field not in lines:
        field = field.rpartition(".")[0]
    return f"{origin}:{lines[field]}" if field else origin
