"""The offline `LLM`: engine in process plus text, for scripts and batch jobs. No server, no sockets.

`firstlight run` uses it, and so may anyone: `from firstlight import LLM`. Requests of one call are batched
continuously, with a progress bar. Invariant: results come back in the order of the prompts.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

from firstlight.base.config import EngineSection
from firstlight.base.errors import EngineError, RequestError, UsageError
from firstlight.base.phases import GENERATE, SELF_TEST
from firstlight.base.resolve_config import engine_from
from firstlight.engine import messages
from firstlight.engine.core import EngineCore
from firstlight.engine.messages import Abort, SequenceOutput, Submit, TokenLogprobs
from firstlight.engine.params import SamplingParams
from firstlight.engine.speculation.shipped import with_shipped_drafter
from firstlight.engine.worker.drafter_trial import memory_for, try_drafter
from firstlight.engine.worker.not_numbers import WIDER, Inspection
from firstlight.engine.worker.startup import quiet, require_numbers, self_test, start
from firstlight.engine.worker.step_times import measure_step_times
from firstlight.facts.checkpoint.checkpoint import open_checkpoint
from firstlight.facts.sources import resolve_model
from firstlight.loading.fit import require_fit
from firstlight.ops.collectives import Group
from firstlight.text.detokenizer import StreamDecoder
from firstlight.text.model import TextModel
from firstlight.text.stops import StopMatcher

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
OnPhase = Callable[..., None]


@dataclass
class Completion:
    """What came of one prompt. `finish_reason` is "stop" or "length", or "error": `error` says which."""

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_drafted: int = 0  # guesses of its tokens that were verified
    num_accepted: int = 0  # of `token_ids`, how many had been guessed
    error: str | None = None


class LLM:
    """A model in this process.

    `model` is a GGUF file, a Hugging Face folder, a hub id, or None for the embedded default. `engine` takes
    the fields of `base.config.EngineSection`: max_model_len, kv_memory_bytes, threads, device, …; and
    `trust_remote_code`, which runs the folder's own code where its tokenizer cannot be read without.
    `on_phase(phase, done, total, unit, detail)` hears of every step, in place of the bars that `progress`
    draws. Raises `FirstlightError`s that say what to do.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        dtype: str = "auto",
        chat_template: str | None = None,
        progress: bool = True,
        on_phase: OnPhase | None = None,
        **engine: Any,
    ) -> None:
        self._show_progress = progress and on_phase is None
        self._on_phase = on_phase
        trusts = bool(engine.pop("trust_remote_code", False))
        path = str(resolve_model(model))
        asked = _engine_section(engine)
        checkpoint = open_checkpoint(path)
        section, note = with_shipped_drafter(asked, checkpoint)
        require_fit(checkpoint, section)
        self.text = TextModel.load(path, chat_template, trust_remote_code=trusts)
        with _progress("loading", "bytes", shown=self._show_progress) as bar:
            started = start(
                checkpoint,
                dtype,
                section,
                Group(),
                on_phase
                or (lambda phase, done=0, total=0, unit="", detail="": bar(done, total) if total else None),
            )
        self.report = started.report
        self._vocab_size = checkpoint.description.vocab_size  # the tokenizer may have more tokens, or fewer
        if note is not None:
            self.report["drafter_notes"] = [note, *self.report.get("drafter_notes", ())]
        self._core: EngineCore = started.core(started.runner.run)
        self._inspection, report = Inspection(started.checkpoint), on_phase or quiet
        report(SELF_TEST)
        self_test(self._core, self._inspection, report)
        if self._core.speculation is not None:
            times_s = measure_step_times(self._core, checkpoint.description.vocab_size)
            self._core.begin(times_s)
            first_token = checkpoint.description.bos_token_id
            self.report["drafter_trial"] = try_drafter(self._core, first_token, memory_for(started))
            require_numbers(self._core, self._inspection, report)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Continues each prompt (a text, or token ids). One `params` for all, or one each.

        Raises `RequestError` for a prompt that cannot be answered, before anything runs.
        """
        token_lists = [
            self.text.encode(prompt) if isinstance(prompt, str) else list(prompt)
            for prompt in _several(prompts)
        ]
        return self._run(token_lists, _params_for_each(params, len(token_lists)))

    def require_answers(self, completions: Sequence[Completion]) -> None:
        """Raises a `FirstlightError` where some ended with an error: about the weights, if they are bad."""
        errors = [one.error for one in completions if one.error is not None]
        if errors:
            said = f"{len(errors)} of {len(completions)} prompts got no whole answer: {errors[0]}"
            raise self._inspection.fault or EngineError(said, WIDER)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_kwargs: Any,
    ) -> list[Completion]:
        """Answers one conversation (a list of messages) or several, by the model's chat template."""
        single = len(conversations) > 0 and isinstance(conversations[0], Mapping)
        batch: list[Any] = [conversations] if single else list(conversations)
        texts = [self.text.render_chat(messages, kwargs=template_kwargs) for messages in batch]
        token_lists = [self.text.encode(text, add_special_tokens=False) for text in texts]
        return self._run(token_lists, _params_for_each(params, len(batch)))

    def _run(self, token_lists: list[list[int]], params: list[SamplingParams]) -> list[Completion]:
        jobs = {
            f"offline-{index}": _Job(self.text, tokens, one)
            for index, (tokens, one) in enumerate(zip(token_lists, params, strict=True))
        }
        self._check(jobs)
        for request_id, job in jobs.items():
            self._core.handle(Submit(request_id, job.completion.prompt_token_ids, job.params))
        num_done = 0
        try:
            with _progress("generating", "requests", shown=self._show_progress) as bar:
                while num_done < len(jobs):
                    outputs = self._core.step()
                    assert outputs is not None, "the engine has work while requests are open"
                    num_done += sum(self._take(jobs[output.request_id], output) for output in outputs.outputs)
                    bar(num_done, len(jobs))
                    if self._on_phase is not None:
                        self._on_phase(GENERATE, num_done, len(jobs), "requests")
        finally:
            # After an interrupt nothing may keep its pages.
            self._core.scheduler.abort_all()
            self._core.scheduler.take_finished()
        return [job.completion for job in jobs.values()]

    def _check(self, jobs: Mapping[str, _Job]) -> None:
        vocabulary = self._vocab_size
        for job in jobs.values():
            tokens = job.completion.prompt_token_ids
            if not tokens:
                raise RequestError("A prompt is empty; give it at least one token.", param="prompt")
            if min(tokens) < 0 or max(tokens) >= vocabulary:
                raise RequestError(f"Token ids must lie in [0, {vocabulary}).", param="prompt")
            limit = self.report["max_model_len"]
            if len(tokens) >= limit:
                raise RequestError(
                    f"A prompt has {len(tokens)} tokens, and at most {limit - 1} fit; shorten it or raise "
                    "max_model_len.",
                    param="prompt",
                    code="context_length_exceeded",
                )

    def _take(self, job: _Job, output: SequenceOutput) -> bool:
        """Adds an output to its job; True when the job is done."""
        if job.done:
            return False  # the echo of our own abort
        if output.error is not None:
            job.fail(self._inspection.explain(output.error))
            return True
        if job.take(output):
            self._core.handle(Abort([output.request_id]))
        return job.done


class _Job:
    """One request on its way: detokenises and looks for stop strings."""

    def __init__(self, text: TextModel, tokens: list[int], params: SamplingParams) -> None:
        self.completion = Completion(tokens)
        # The engine needs a seed; two unseeded requests must differ.
        seed = secrets.randbits(62) if params.seed is None else params.seed
        self.params = msgspec.structs.replace(params, seed=seed)
        self.done = False
        self._decoder: StreamDecoder = text.stream()
        self._stops = StopMatcher(params.stop)

    def take(self, output: SequenceOutput) -> bool:
        """Adds tokens; True if a stop string ended the text, so that the engine must be told."""
        completion = self.completion
        completion.num_cached_tokens = output.num_cached_tokens
        completion.num_drafted += output.num_drafted
        for place, token in enumerate(output.token_ids):
            completion.token_ids.append(token)
            completion.logprobs += output.logprobs[place : place + 1] if output.logprobs else []
            completion.num_accepted += place < output.num_accepted
            is_end = output.stop_token_id is not None and place + 1 == len(output.token_ids)
            completion.text += "" if is_end else self._stops.push(self._decoder.push([token]))
            if self._stops.match is not None:
                completion.finish_reason = messages.FINISH_STOP
                self.done = True
                return output.finish_reason is None
        if output.finish_reason is not None:
            completion.finish_reason = output.finish_reason
            completion.text += self._end()
            self.done = True
        return False

    def fail(self, error: str) -> None:
        """It ended with an error, and keeps what it had."""
        self.completion.finish_reason, self.completion.error = messages.FINISH_ERROR, error
        self.completion.text += self._end()
        self.done = True

    def _end(self) -> str:
        tail = self._stops.push(self._decoder.flush())
        return tail + (self._stops.flush() if self._stops.match is None else "")


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    tokens = [item for item in prompts if isinstance(item, int)]
    return [tokens] if tokens else [item for item in prompts if not isinstance(item, int)]


def _params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num
    if len(params) != num:
        raise UsageError(
            f"{len(params)} sampling parameters for {num} prompts", "Give one for all, or one each."
        )
    return list(params)


def _engine_section(options: Mapping[str, Any]) -> EngineSection:
    if "tensor_parallel" in options:
        raise UsageError(
            "LLM runs in one process: it takes no option 'tensor_parallel'.", "Use `firstlight serve`."
        )
    return engine_from(options, "LLM")


@contextmanager
def _progress(what: str, unit: str, *, shown: bool) -> Iterator[Any]:
    """Yields `update(done, total)`, which draws a bar on stderr if `shown` and stderr is a terminal."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
