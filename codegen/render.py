"""Renders a plan to one self-contained CUDA source, deterministically."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.bccache import Bucket
from jinja2.environment import TemplateModule

from codegen.layout import lay_out, mark
from codegen.library import TEMPLATES, NamedSpec
from codegen.names import check_name, taken
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.prune import prune
from codegen.wording import in_comment, in_shell

_MACRO = re.compile(r"\{%-? macro (\w+)")

SEAL = "// seal: sha256 "
"""Start of the line with the SHA-256 of all other lines."""
_SEAL_LINE = re.compile(rf"^{re.escape(SEAL)}([0-9a-f]{{64}})\n", re.MULTILINE)

OVERVIEW = ("Roles", "Barriers", "Pipeline")
"""First words of the paragraphs in the overview of a kernel."""

BANNER = """\
// Generated from {origin}. Do not edit:
// change the spec or a template, then run
//     {command}
// spec: {json}
// spec hash: {hash}
"""


class _RecordingLoader(jinja2.FileSystemLoader):
    """Loads templates and records those that a rendering used."""

    def __init__(self) -> None:
        super().__init__(TEMPLATES)
        self.used: set[str] = set()
        self.hooks: dict[str, frozenset[str]] = {}

    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, Callable[[], bool]]:
        self.used.add(template)
        source, filename, uptodate = super().get_source(environment, template)
        self.hooks[template] = frozenset(_MACRO.findall(source))
        # Jinja encodes it, and a path may have bytes that are not valid text in this locale.
        return source, filename.encode("utf-8", "backslashreplace").decode(), uptodate


class _Environment(jinja2.Environment):
    """Allows conditional macros in templates: a macro that is not defined under its conditions prints nothing.

    A name that no branch of an imported file defines remains an error.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        try:
            return getattr(obj, attribute)
        except AttributeError:
            pass
        if isinstance(obj, TemplateModule):
            assert isinstance(self.loader, _RecordingLoader)
            if attribute in self.loader.hooks[str(obj.__name__)]:
                return _print_nothing
        return super().getattr(obj, attribute)


def _print_nothing(*_: object) -> str:
    return ""


class _CompiledTemplates(jinja2.BytecodeCache):
    """Cache of compiled templates, for other environments of this process: code objects, not marshaled."""

    def __init__(self) -> None:
        self._code: dict[tuple[str, str], Any] = {}  # by place and checksum of the template

    def load_bytecode(self, bucket: Bucket) -> None:
        bucket.code = self._code.get((bucket.key, bucket.checksum))

    def dump_bytecode(self, bucket: Bucket) -> None:
        self._code[bucket.key, bucket.checksum] = bucket.code


_compiled_templates = _CompiledTemplates()


def environment() -> jinja2.Environment:
    """Jinja environment with the project's settings (undefined names are errors)."""
    return _Environment(
        loader=_RecordingLoader(),
        bytecode_cache=_compiled_templates,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        finalize=mark,
    )


@dataclass(frozen=True)
class Generated:
    """A rendered spec.

    Attributes:
        named: the spec and its name.
        plan: its plan.
        source: its CUDA source, with banner and seal; ends with one newline.
        templates: names of the templates that it was rendered from, sorted.
        overview: paragraphs of its opening comment on roles, barriers and the pipeline, without comment markers.
    """

    named: NamedSpec
    plan: Plan
    source: str
    templates: tuple[str, ...] = ()
    overview: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Rendered:
    """A source, its templates, and the overview in its opening comment."""

    source: str
    templates: tuple[str, ...]
    overview: tuple[str, ...]


@lru_cache(maxsize=2048)  # the shipped ones, and as many new ones of a long-running process: 55 KiB each
def generate(named: NamedSpec) -> Generated:
    """Plan and render a spec; results are cached.

    Raises:
        SpecError: if the spec cannot work on its architecture, or the kernel's name conflicts with the source.
    """
    plan = plan_for(named)
    made = _rendered(plan, named.origin)
    code = re.sub(r"//[^\n]*", "", made.source)
    # Besides its definition; labels of inline PTX count. Most sources do not have it again, not even inside a name.
    if code.count(named.stem) > 1 and len(re.findall(rf"\b{named.stem}\b", code)) > 1:
        raise named.located(taken(named.stem))
    return Generated(named, plan, made.source, made.templates, made.overview)


def render(named: NamedSpec) -> str:
    """Source of a spec, by ``generate``."""
    return generate(named).source


def render_plan(plan: Plan, origin: str = "") -> str:
    """Source of a plan; ``origin`` is the name of the spec's file in the banner.

    Raises:
        SpecError: for an invalid name of a kernel.
    """
    return _rendered(plan, origin).source


def _rendered(plan: Plan, origin: str) -> _Rendered:
    check_name(plan.stem)
    env = environment()
    body = prune(render_template(plan, plan.template, env))
    body = "\n".join([line.rstrip(" \t") for line in body.split("\n")])
    body = re.sub(r"\n\n\n+", "\n\n", body).strip("\n") + "\n"
    assert isinstance(env.loader, _RecordingLoader)
    templates = tuple(sorted(env.loader.used))
    told = {
        "origin": origin or "a spec without a file",
        "command": f"codegen render {in_shell(origin) if origin else 'SPEC'}",
        "json": plan.spec.canonical_json(),
        "hash": plan.spec.hash,
    }
    banner = BANNER.format(**{name: in_comment(text) for name, text in told.items()})
    return _Rendered(seal(banner + "\n" + body), templates, _overview(body))


def _overview(body: str) -> tuple[str, ...]:
    """Paragraphs on roles, barriers and the pipeline in the opening comment of a body, without comment markers."""
    opening = body.partition("\n\n")[0]
    text = "\n".join(line.removeprefix("//").removeprefix(" ") for line in opening.splitlines())
    return tuple(part.strip("\n") for part in text.split("\n\n") if part.strip("\n").startswith(OVERVIEW))


def render_template(plan: Plan, name: str, env: jinja2.Environment | None = None) -> str:
    """Render one of a plan's templates; ``env`` records the templates that it uses."""
    template = (env or environment()).get_template(name)
    return lay_out(template.render(plan=plan, spec=plan.spec, dtype=plan.dtype, **plan.flags.named()))


def spec_json_of(source: str) -> str | None:
    """Canonical JSON of a source's spec, from its banner; None if it has none."""
    match = re.search(r"^// spec: (\{.*\})$", source, re.MULTILINE)
    return match.group(1) if match else None


def seal(text: str) -> str:
    """Source with the seal line after the banner's last line."""
    head, blank, body = text.partition("\n\n")
    return f"{head}\n{SEAL}{hashlib.sha256(text.encode()).hexdigest()}{blank}{body}"


def without_seal(text: str) -> str:
    """A source without its seal line; unchanged if it has none."""
    return _SEAL_LINE.sub("", text, count=1)


def seal_is_intact(text: str) -> bool:
    """Whether a source equals the one that ``seal`` returned, and was not edited."""
    match = _SEAL_LINE.search(text)
    return match is not None and hashlib.sha256(without_seal(text).encode()).hexdigest() == match.group(1)
