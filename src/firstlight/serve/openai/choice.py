"""The text of one sequence as it grows: decoding, stop strings, and which tokens go out with which text.

One `Choice` a sequence, driven by `serve.openai.generation`. Invariant: a token's log-probabilities go out
with the first piece of its text, never before, and never for text that a stop string took back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from firstlight.engine.messages import FINISH_STOP, SequenceOutput, TokenLogprobs
from firstlight.engine.params import SamplingParams
from firstlight.serve.parsing.answer import AnswerParser, Parsed
from firstlight.serve.parsing.parser import ToolCallPiece
from firstlight.text.model import TextModel
from firstlight.text.stops import StopMatcher


@dataclass(frozen=True)
class TextOptions:
    """How a request wants its text."""

    skip_special_tokens: bool = True
    include_stop: bool = False
    after_text: bool = False  # the answer continues the prompt's text
    token_ids: bool = False  # give the tokens beside the text
    shown_ids: frozenset[int] = frozenset()  # special tokens that parsers have to see


@dataclass
class Delta:
    """What a choice gained. `finish_reason` comes once, with the last one."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCallPiece] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # where each token's text begins
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to send."""
        said = self.text or self.reasoning or self.calls
        return bool(said or self.token_ids or self.finish_reason)


class Choice:
    """One sequence. `num_tokens` counts what was generated up to its end or its stop string.

    Stop strings are found in all that the model writes; a `parser` splits what is left of it.
    """

    def __init__(
        self,
        text: TextModel,
        params: SamplingParams,
        options: TextOptions,
        end_ids: frozenset[int],
        parser: AnswerParser | None = None,
    ) -> None:
        self._decoder = text.stream(
            skip_special_tokens=options.skip_special_tokens,
            after_text=options.after_text,
            shown_ids=options.shown_ids,
        )
        self._parser = parser
        self._matcher = StopMatcher(params.stop, include=options.include_stop)
        self._include_stop = options.include_stop
        self._keeps_tokens = options.token_ids or params.logprobs is not None
        self._min_tokens = params.min_tokens
        self._end_ids = end_ids
        self._num_chars = 0
        self._kept: list[tuple[int, TokenLogprobs | None, int]] = []
        self.num_tokens = self.num_reasoning_tokens = 0
        self.num_cached_tokens = 0
        self.num_drafted = self.num_accepted = 0
        self.has_calls = False
        self.is_finished = False

    def push(self, output: SequenceOutput) -> Delta:
        """Takes new tokens of the engine. When a stop string ends the choice, the caller aborts it."""
        delta = Delta()
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        num_before = self.num_tokens
        self._take(output, delta)
        self.num_drafted += output.num_drafted
        self.num_accepted += min(output.num_accepted, self.num_tokens - num_before)
        if self._matcher.match is None and output.finish_reason is not None:
            self._add(self._end(), delta)
        match = self._matcher.match
        if match is not None:
            delta.finish_reason, delta.stop_reason = FINISH_STOP, match.stop
        elif self._is_complete:
            delta.finish_reason = FINISH_STOP
        elif output.finish_reason is not None:
            delta.finish_reason = output.finish_reason
            if output.stop_token_id not in self._end_ids:
                delta.stop_reason = output.stop_token_id
        self.is_finished = delta.finish_reason is not None
        if self.is_finished and self._parser is not None:
            self._add_parsed(self._parser.flush(), delta)
        if self._keeps_tokens:
            self._release(delta)
        return delta

    @property
    def _is_complete(self) -> bool:
        return self._parser is not None and self._parser.is_complete

    def _add(self, text: str, delta: Delta) -> None:
        if self._parser is None:
            delta.text += text
        elif text:
            self._add_parsed(self._parser.push(text), delta)

    def _add_parsed(self, parsed: Parsed, delta: Delta) -> None:
        delta.text += parsed.content
        delta.reasoning += parsed.reasoning
        delta.calls += parsed.calls
        self.has_calls = self.has_calls or bool(parsed.calls)

    def _take(self, output: SequenceOutput, delta: Delta) -> None:
        hidden = len(output.token_ids)  # the place of an end token whose text is not part of the answer
        if output.stop_token_id is not None and not self._include_stop:
            hidden -= 1
        for index, token in enumerate(output.token_ids):
            self.num_tokens += 1
            self.num_reasoning_tokens += self._parser is not None and self._parser.is_reasoning
            if self._keeps_tokens:
                logprobs = output.logprobs[index] if output.logprobs else None
                self._kept.append((token, logprobs, self._num_chars))
            if index >= hidden:
                continue
            piece = self._decoder.push_one(token)
            if not piece:
                continue
            self._add(self._search(piece), delta)
            if self._matcher.match is not None or self._is_complete:
                break

    def _search(self, piece: str) -> str:
        self._num_chars += len(piece)
        if self.num_tokens <= self._min_tokens:
            return self._matcher.skip(piece)
        return self._matcher.push(piece)

    def _end(self) -> str:
        rest = self._decoder.flush()
        text = self._search(rest) if rest else ""
        return text if self._matcher.match is not None else text + self._matcher.flush()

    def _release(self, delta: Delta) -> None:
        match = self._matcher.match
        limit = self._matcher.released
        if match is not None:
            limit = match.end if self._include_stop else match.start
        ready = len(self._kept)
        if match is not None or not self.is_finished:
            ready = next((i for i, (_, _, offset) in enumerate(self._kept) if offset >= limit), ready)
        for token, logprobs, offset in self._kept[:ready]:
            delta.token_ids.append(token)
            delta.offsets.append(offset)
            if logprobs is not None:
                delta.logprobs.append(logprobs)
        del self._kept[:ready]
