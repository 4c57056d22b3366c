"""`firstlight run`: one prompt, or a file of them, through a model in this process.

Invariant: everything a person can get wrong in flags and files is found before the model is loaded, and
nothing but answers goes to standard output.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TextIO

import msgspec
import typer

from firstlight.base.errors import ResourceError, UsageError, why_unreadable
from firstlight.base.phases import READY
from firstlight.base.resolve_config import Given
from firstlight.base.settings import ENGINE_SETTINGS, MODEL_SETTINGS
from firstlight.cli.locate import locate
from firstlight.cli.options import Debug
from firstlight.cli.prompts_file import Prompt, answer_line, read_prompts

if TYPE_CHECKING:
    from firstlight.base.resolve_config import Resolved
    from firstlight.engine.params import SamplingParams
    from firstlight.llm import LLM, Completion

# What makes sense for one process without a server.
RUN_SETTINGS = tuple(
    setting
    for setting in MODEL_SETTINGS + ENGINE_SETTINGS
    if setting.name
    not in (
        "served-name",
        "tensor-parallel",
        "max-queue",
        "collective-deadline",
        "collectives",
        "expert-parallel",
    )
)


@dataclass
class RunOptions:
    """What `run` takes beside the settings of model and engine."""

    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; or use --input.", show_default=False)
    ] = None
    model: Annotated[
        str | None,
        typer.Option(help="A GGUF file, a Hugging Face folder or a hub id. Without it: the default model."),
    ] = None
    input: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='JSON lines: {"prompt": "..."} or {"messages": [...]}, and an "id" if you like.',
        ),
    ] = None
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the answers here, as JSON lines.")
    ] = None
    raw: Annotated[
        bool,
        typer.Option("--raw", metavar="", help="Continue the prompt as it is, without the chat template."),
    ] = False
    system: Annotated[str | None, typer.Option(help="Instruction before each prompt.")] = None
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    top_p: Annotated[float, typer.Option(help="Nucleus of the sampling.")] = 1.0
    seed: Annotated[int | None, typer.Option(help="Makes sampled answers repeatable.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an answer; repeatable.")] = None
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML file with the names of these flags.")
    ] = None
    debug: Debug = False


def run(options: RunOptions, flags: Given) -> None:
    """Answer one prompt, or a file of prompts in one batch, without a server.

    Examples:
      firstlight run "What is 2+2?"
      firstlight run --raw "Once upon a time" --temperature 0.8 --max-tokens 60
      firstlight run --input prompts.jsonl --output answers.jsonl
      firstlight run --model model.gguf "Hello" --threads 1
    """
    from firstlight.base.resolve_config import read_toml, resolve
    from firstlight.facts.machine.machine import inspect_machine
    from firstlight.launch.runs.files import check_template

    file = read_toml(options.config) if options.config else Given({}, "no file")
    prompts = _prompts(options)
    params = _sampling(options)
    cores = inspect_machine(with_gpus=False).num_usable_cores
    resolved = resolve([flags, file], cores)
    if resolved.model.chat_template is not None:
        check_template(resolved.model.chat_template)
    with _output(options.output) as output:
        path = locate(options.model or file.values.get("model"))
        with _Watch(sys.stderr) as watch:
            llm = _load(path, resolved, len(prompts), watch)
            answers = _answers(llm, prompts, params, options)
        for prompt, answer in zip(prompts, answers, strict=True):
            output.write(
                _shown(prompt, answer, as_json=options.input is not None or options.output is not None)
            )
        llm.require_answers(answers)


def _prompts(options: RunOptions) -> list[Prompt]:
    if (options.prompt is None) == (options.input is None):
        raise UsageError("give either a prompt or --input FILE.", "See firstlight run --help.")
    if options.prompt is not None:
        return [Prompt(1, options.prompt)]
    assert options.input is not None
    try:
        with options.input.open(encoding="utf-8") as file:
            return read_prompts(file, str(options.input))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read {options.input}: {why_unreadable(error)}",
            "Give a file of JSON lines in UTF-8 with --input.",
        ) from error


def _sampling(options: RunOptions) -> SamplingParams:
    from firstlight.engine.params import SamplingParams

    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        stop=tuple(options.stop or ()),
        max_tokens=options.max_tokens,
    )


class _Watch:
    """Shows where the run is, in the lines of `serve`: each call is a report of progress."""

    def __init__(self, stream: TextIO) -> None:
        from firstlight.launch.terminal.console import Console

        self._console = Console(stream, time.monotonic(), num_ranks=1, has_keys=False)
        self._phase, self._phase_start_s = "", 0.0

    def __call__(self, phase: str, done: int = 0, total: int = 0, unit: str = "", detail: str = "") -> None:
        now_s = time.monotonic()
        if phase != self._phase:
            self._phase, self._phase_start_s = phase, now_s
        from firstlight.launch.timeline.progress import ProgressLine

        self._console.progress(
            ProgressLine(
                time_s=now_s,
                name="rank-0",
                rank=0,
                phase=phase,
                start_s=self._phase_start_s,
                done=done,
                total=total,
                unit=unit,
                detail=detail,
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self(READY)  # closes the line of the last phase


def _load(path: Path, resolved: Resolved, num_prompts: int, watch: _Watch) -> LLM:
    from firstlight.base.environment import set_for_libraries
    from firstlight.launch.processes.commands import operator_variables

    watch("imports", detail="torch")
    set_for_libraries(operator_variables(resolved.engine.threads))
    from firstlight.llm import LLM

    engine = msgspec.structs.asdict(resolved.engine)
    for name in (
        "tensor_parallel",
        "shrinks",
        *resolved.engine.shrinks,
    ):  # not given
        del engine[name]
    engine["max_queue"] = max(engine["max_queue"], num_prompts)
    return LLM(
        str(path),
        dtype=resolved.model.dtype,
        chat_template=resolved.model.chat_template,
        on_phase=watch,
        trust_remote_code=resolved.model.trust_remote_code,
        **engine,
    )


def _answers(
    llm: LLM, prompts: list[Prompt], params: SamplingParams, options: RunOptions
) -> list[Completion]:
    """One answer for each prompt, in their order; all of them run in one batch."""
    token_lists = [_tokens(llm, prompt, options) for prompt in prompts]
    return llm.generate(token_lists, params)


def _tokens(llm: LLM, prompt: Prompt, options: RunOptions) -> list[int]:
    plain = prompt.text is not None and (options.raw or not llm.text.has_chat_template)
    if plain:
        return llm.text.encode(prompt.text or "", add_special_tokens=True)
    head: list[dict[str, Any]] = [{"role": "system", "content": options.system}] if options.system else []
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    return llm.text.encode(llm.text.render_chat(head + messages, kwargs={}), add_special_tokens=False)


def _shown(prompt: Prompt, answer: Completion, *, as_json: bool) -> str:
    if not as_json:
        return f"{answer.text}\n"
    fields = {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "num_prompt_tokens": len(answer.prompt_token_ids),
        "num_tokens": len(answer.token_ids),
    }
    return answer_line(prompt, fields if answer.error is None else fields | {"error": answer.error})


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[TextIO]:
    """Where answers go. Opened before the model is loaded: a folder that is not there is no late surprise."""
    if path is None:
        yield sys.stdout
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror}.", "Choose another --output.") from error
    with file:
        yield file
