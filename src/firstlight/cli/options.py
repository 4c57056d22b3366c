"""From a dataclass and a table of settings to a typer command, with the error boundary around it.

A command is a function of one options dataclass (and, if it takes settings, of the `Given` flags), so that
its signature stays short however many flags it has. Invariant: this is the only place where an exception
becomes a message and an exit code; a traceback is shown with --debug only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from firstlight.base.errors import FirstlightError, RequestError, ResourceError, UsageError, is_text
from firstlight.base.resolve_config import Given
from firstlight.base.settings import Setting

INTERRUPTED = 130
READER_GONE = 141  # as a shell shows SIGPIPE: who waits for our code must not take half of it for all
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EBADF, errno.EIO, errno.EFBIG)
_PANELS = {"model": "Model", "engine": "Engine", "server": "Server and its limits", "launch": "Supervision"}

Debug = Annotated[
    bool, typer.Option("--debug", metavar="", help="Show tracebacks, and all that the ranks print.")
]


def add_command(
    app: typer.Typer,
    function: Callable[..., int | None],
    settings: Sequence[Setting] = (),
    name: str | None = None,
    kind_of_command: type[TyperCommand] | None = None,
) -> None:
    """Make `function` a command of `app`; its docstring is the help text, its return value the exit code."""
    kind = next(iter(get_type_hints(function).values()))
    fields = dataclasses.fields(kind)
    hints = get_type_hints(kind, include_extras=True)

    def command(**values: Any) -> None:
        guard_texts(values)
        options = kind(**{field.name: values[field.name] for field in fields})
        if settings:
            given = {setting.name: values[_parameter(setting)] for setting in settings}
            flags = Given(
                {key: value for key, value in given.items() if value not in (None, [])}, "the flags"
            )
            raise typer.Exit(guarded(lambda: function(options, flags), debug=options.debug))
        raise typer.Exit(guarded(lambda: function(options), debug=options.debug))

    parameters = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=hints[field.name]
        )
        for field in fields
    ] + [_flag(setting) for setting in settings]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    help_text, _, examples = inspect.cleandoc(function.__doc__ or "").partition("\n\nExamples:\n")
    app.command(
        name or function.__name__.replace("_", "-"),
        cls=kind_of_command,
        help=help_text,
        epilog=_epilog(examples) if examples else None,
    )(command)


def guard_texts(values: Mapping[str, Any]) -> None:
    """Ends with a message when a value is no text: bytes of another encoding reach us as lone surrogates."""
    for name, value in values.items():
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str | Path) and not is_text(str(text)):
                shown = name.replace("_", "-")
                _say(f"error: the value of {shown} is not valid UTF-8.\n  what to do: Give text in UTF-8.")
                raise typer.Exit(UsageError.exit_code)


def _epilog(examples: str) -> str:
    rows = [row.strip().replace("[", r"\[") for row in examples.splitlines() if row.strip()]
    return "[bold]Examples[/]\n\n" + "\n\n".join(f"[cyan]{row}[/]" for row in rows)


def guarded(run: Callable[[], int | None], *, debug: bool) -> int:
    """The exit code of `run`; its errors end here."""
    try:
        code = run() or 0
        sys.stdout.flush()  # here, where what is wrong with it can still be said
        return code
    except FirstlightError as error:
        _report(error.explain(), debug)
        return 2 if isinstance(error, RequestError) else error.exit_code
    except KeyboardInterrupt:
        _say("interrupted.")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone: `firstlight env | head`
        _drop_output()
        return READER_GONE
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            return _unexpected(error, debug)
        _drop_output()
        lost = ResourceError(
            f"the output could not be written: {error.strerror}.", "Free some space, or send it elsewhere."
        )
        _report(lost.explain(), debug)
        return lost.exit_code
    except Exception as error:  # noqa: BLE001  the top of the process: nothing may leave as a traceback
        return _unexpected(error, debug)


def _unexpected(error: Exception, debug: bool) -> int:
    hint = "" if debug else "\n  what to do: this is a bug; run again with --debug to see where it happened."
    _report(f"{type(error).__name__}: {error}{hint}", debug)
    return FirstlightError.exit_code


def _drop_output() -> None:
    """What cannot be written goes nowhere, so that the interpreter's end does not stumble over it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _report(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    _say(f"error: {message}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it, but the exit code is still ours
        print(text, file=sys.stderr, flush=True)


def _default(field: dataclasses.Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def _parameter(setting: Setting) -> str:
    return setting.name.replace("-", "_")


def _flag(setting: Setting) -> inspect.Parameter:
    """A flag whose absence is None, so that a TOML file can tell that it was not given."""
    kind: Any = str
    names = [f"--{setting.name}"]
    if setting.type is bool:
        kind = bool
        names = [f"--{setting.name}/--no-{setting.name}"]
    elif setting.type in (int, float) and not setting.is_size:
        kind = setting.type
    elif setting.repeats:
        kind = list[str]
    option = typer.Option(
        *names,
        help=f"{setting.help}{_default_text(setting)}",
        rich_help_panel=_PANELS[setting.section],
        show_default=False,
        metavar=_metavar(setting),
    )
    return inspect.Parameter(
        _parameter(setting),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _metavar(setting: Setting) -> str:
    if setting.choices:
        return "|".join(setting.choices)
    if setting.is_size:
        return "SIZE"
    if setting.type is bool:
        return ""
    return {int: "N", float: "NUMBER"}.get(setting.type, "TEXT")


def _default_text(setting: Setting) -> str:
    value = setting.default
    if value in (None, ()):
        return ""
    if setting.is_size and value:
        return f" Default: {value // 2**20}M."
    if isinstance(value, bool):
        return f" Default: {'on' if value else 'off'}."
    return f" Default: {value:g}." if isinstance(value, float) else f" Default: {value}."
