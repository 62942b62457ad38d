"""Writes docs/guide/cli.md and docs/guide/environment.md from the commands and the list of environment variables.

python benchmarks/command_pages.py            # writes the pages
python benchmarks/command_pages.py --check    # exits 1 if that would change one
"""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from enum import EnumType
from pathlib import Path
from typing import Any, get_args

from typer.main import get_command

from codegen.cli import PANELS, app
from codegen.files import holds, write_if_changed
from codegen.library import ROOT
from runtime import cli as _cli  # noqa: F401 - adds its commands
from runtime.variables import VARIABLES

GUIDE = ROOT / "docs" / "guide"
WIDTH = 120
EXAMPLES = "[bold]Examples[/bold]"
STALE = "is not what the code says today; run: python benchmarks/command_pages.py"
CLI_HEAD = """# Command line

The package installs the command `codegen`; `python -m sparse_kernel_codegen` is the same. Commands that need a GPU or a
compiler say so. `codegen --install-completion` installs completion of commands, options and names of specs.

- A `SPEC` is a YAML file, the name of a shipped spec (`codegen list`), or the fields of a spec as JSON
  ([list of fields](../reference/specs.md)).
- A problem (`--problem`, `PROBLEM`) has the fields of [AttentionProblem](../reference/api.md#attentionproblem), or with
  `op=bsr_spmm` and other products those of [BsrProblem](../reference/api.md#bsrproblem).
- With `--json`, a command prints one JSON document with `rows`, and with `complete`, which is false after an error.
- Errors go to standard error, one line for each mistake.

| exit code | meaning |
| ---: | --- |
| 0 | success |
| 1 | a problem or a difference was found, or a kernel failed |
| 2 | an error in the command line, a file or the environment |
| 3 | `codegen compile --check`: a receipt is of another compiler, so its cubin was not compared |
| 130 | interrupted by Ctrl-C |
"""
ENVIRONMENT_HEAD = """# Environment variables

Set these variables before you start the process. If a variable takes 0 or 1, any other value is an error. An empty
variable counts as unset.
"""


def filled(text: str, first: str = "", rest: str = "") -> str:
    """A paragraph in lines of at most ``WIDTH`` columns."""
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def leaves(group: Any, prefix: str = "codegen") -> Iterator[tuple[str, Any, Any]]:
    """Names of commands in full, the commands, and their contexts; those of groups among them."""
    context = group.make_context(prefix, [], resilient_parsing=True)
    for name in group.list_commands(context):
        command = group.commands[name]
        full = f"{prefix} {name}"
        if hasattr(command, "commands"):
            yield from ((each, found, inner) for each, found, inner in leaves(command, full))
        else:
            yield full, command, command.make_context(full, [], resilient_parsing=True)


def items(command: Any, context: Any) -> Iterator[str]:
    """Items of a list: arguments, then options, without --help."""
    params = sorted(command.params, key=lambda param: param.param_type_name != "argument")
    for param in params:
        if param.param_type_name == "argument":
            label = f"`{param.metavar or str(param.name).upper()}`"
        else:
            value = param.metavar if param.metavar is not None else "|".join(choices(param))
            *others, last = param.opts
            label = ", ".join(f"`{each}`" for each in (*others, f"{last} {value}".strip()))
        text = str(param.help)
        default = param.get_default(context)
        if getattr(param, "show_default", False) and default not in (None, False, ()):
            text += f" Default: {getattr(default, 'value', default)}."
        if param.required and param.param_type_name == "option":
            text += " Required."
        yield filled(f"{label}: {text}", "- ", "  ")


def choices(param: Any) -> list[str]:
    """Values of an option that has a few words to choose from."""
    annotation: Any = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    annotation = next(iter(get_args(annotation)), annotation)  # of a list
    words: Any = annotation if isinstance(annotation, EnumType) else ()
    return [str(each.value) for each in words]


def section(name: str, command: Any, context: Any) -> str:
    """The section of a command."""
    text, _, examples = inspect.cleandoc(command.help or "").partition(EXAMPLES)
    paragraphs = [filled(each.replace("\n", " ")) for each in text.strip().split("\n\n")]
    usage = " ".join([name, *(piece.strip("{}") for piece in command.collect_usage_pieces(context))])
    code = textwrap.dedent(examples.strip("\n"))
    parts = [f"### {name}", *paragraphs, f"```text\n{usage}\n```", "\n".join(items(command, context))]
    return "\n\n".join([*parts, f"```sh\n{code}\n```"])


def overview(commands: Sequence[tuple[str, Any, Any]]) -> str:
    """A table of commands: a link to the section of each, and its first sentence."""
    rows = []
    for name, command, _ in commands:
        first = " ".join(inspect.cleandoc(command.help or "").partition("\n\n")[0].split())
        rows.append(f"| [{name}](#{name.replace(' ', '-')}) | {first} |")
    return "\n".join(["| command | purpose |", "| --- | --- |", *rows])


def cli_page() -> str:
    """Text of docs/guide/cli.md."""
    group: Any = get_command(app)
    found = list(leaves(group))
    commands, sections = [], []
    for panel in PANELS:
        names = [name for name, command in group.commands.items() if command.rich_help_panel == panel]
        chosen = [each for each in found if each[0].split()[1] in names]
        commands += chosen
        sections += [f"## {panel}", *(section(*each) for each in chosen)]
    return "\n\n".join([CLI_HEAD.strip(), overview(commands), *sections]) + "\n"


def environment_page() -> str:
    """Text of docs/guide/environment.md."""
    rows = [f"| [`{each.name}`]({each.page}) | {each.meaning} | {each.default} |" for each in VARIABLES]
    return "\n".join([ENVIRONMENT_HEAD, "| variable | meaning | default |", "| --- | --- | --- |", *rows, ""])


def pages() -> dict[Path, str]:
    """The pages and their texts."""
    return {GUIDE / "cli.md": cli_page(), GUIDE / "environment.md": environment_page()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page would change")
    if not parser.parse_args(arguments).check:
        for path, text in pages().items():
            print(f"{path.name}: {'written' if write_if_changed(path, text) else 'up to date'}")
        return 0
    stale = [path.name for path, text in pages().items() if not holds(path, text)]
    for name in stale:
        print(f"{name}: {STALE}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
