"""firstlight beside `transformers`, on the same model, machine and minutes: `make bench-compare`.

Ours is served over HTTP; theirs runs in this process. The goals are against `generate` as it comes (a dynamic
cache); the ratio to its static cache, which a user must ask for, stands beside it. Both get the same prompts
and threads. Rounds are interleaved (ours, theirs, ours, ...) and medians are compared, as the machine may be
shared. Invariant: no prompt comes twice, so that the prefix cache helps nobody.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from rich.console import Console

from firstlight.base.errors import EngineError, FirstlightError
from firstlight.bench.measures import RequestRecord, median
from firstlight.bench.plots import Bars, save_panels
from firstlight.bench.report import plain_table, require_writable, save_json
from firstlight.bench.serving.completions import PATHS
from firstlight.bench.serving.http_client import HttpClient
from firstlight.bench.serving.load import closed_loop
from firstlight.bench.serving.server_process import ServerProcess
from firstlight.bench.serving.serving import Sender, fast_loop, first_model
from firstlight.bench.serving.startup import bench_startup
from firstlight.facts.machine.machine import inspect_machine
from firstlight.facts.sources import resolve_model
from firstlight.loading.convert import convert_gguf
from firstlight.text.model import TextModel

PROMPT, NEW, CROWD, LONG = 64, 128, 32, 512
QUESTION = "What is the capital of France?"
CACHES = ("dynamic", "static")
Prompts = list[list[int]]


@dataclass(frozen=True)
class Measure:
    """A figure in which ours must be at least `goal` times theirs. One new token: the prompt's speed."""

    name: str
    num_prompts: int
    prompt_tokens: int
    goal: float
    num_new: int = NEW


MEASURES = (
    Measure("decode, batch 1, tokens/s", 1, PROMPT, 3.0),
    Measure(f"concurrency {CROWD}, tokens/s", CROWD, PROMPT, 1.5),
    Measure(f"prefill of {LONG}, tokens/s", 1, LONG, 1.0, 1),
)
MOST_READY_S, MOST_PSS_BYTES = 6.0, 1.2e9


@dataclass(frozen=True)
class Figure:
    """The outcome of a measure: every round by who ran it, and the ratios of the medians."""

    name: str
    goal: float
    rounds: dict[str, list[float]]

    @property
    def medians(self) -> dict[str, float]:
        return {who: median(values) for who, values in self.rounds.items()}

    def ratio(self, cache: str = CACHES[0]) -> float:
        """How many times theirs ours is."""
        return self.medians["firstlight"] / self.medians[cache]


@dataclass
class Comparison:
    """All figures. `answers` to one question show that both sides run the same model."""

    model: str
    threads: int
    versions: dict[str, str]
    figures: list[Figure]
    ready_s: list[float]
    pss_bytes: list[int]
    answers: dict[str, str] = field(default_factory=dict)


class Ours:
    """Our server over HTTP. The client's cost is inside the figures."""

    def __init__(self, url: str, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._client = HttpClient(url)
        self._sender = Sender(self._client, PATHS["completions"], 600.0)
        self._model = runner.run(first_model(self._client, None, 60.0))

    def close(self) -> None:
        self._runner.run(self._client.close())

    def run(self, measure: Measure, prompts: Prompts) -> float:
        if measure.num_new == 1:
            return measure.prompt_tokens / self._complete(prompts, 1)[0].ttft_s
        start_s = time.perf_counter()
        records = self._complete(prompts, measure.num_new)
        if measure.num_prompts > 1:
            return sum(record.num_output_tokens for record in records) / (time.perf_counter() - start_s)
        tpot_s = records[0].tpot_s
        assert tpot_s is not None
        return 1 / tpot_s

    def answer(self) -> str:
        message = {"role": "user", "content": QUESTION}
        body = {"model": self._model, "messages": [message], "temperature": 0, "max_tokens": 24}
        reply = self._runner.run(self._client.request("POST", PATHS["chat"], msgspec.json.encode(body)))
        return str(msgspec.json.decode(reply.body)["choices"][0]["message"]["content"])

    def _complete(self, prompts: Prompts, num_new: int) -> list[RequestRecord]:
        common = {"model": self._model, "max_tokens": num_new, "temperature": 0, "ignore_eos": True}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        bodies = [msgspec.json.encode({**common, **streamed, "prompt": prompt}) for prompt in prompts]
        records = self._runner.run(closed_loop(bodies, len(bodies), self._sender.send, lambda record: None))
        for record in records:
            if record.error is not None or record.num_output_tokens != num_new:
                raise EngineError(f"our server gave {record.num_output_tokens} tokens: {record.error}")
        return records


class Theirs:
    """`transformers` in this process."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        config = self._model.generation_config
        self._end_ids, config.eos_token_id = config.eos_token_id, None  # every answer has its full length
        config.pad_token_id = 0

    @torch.inference_mode()
    def run(self, measure: Measure, prompts: Prompts, cache: str) -> float:
        ids = torch.tensor(prompts)
        start_s = time.perf_counter()
        if measure.num_new == 1:
            # A prompt needs no generation; `cache` makes no difference but for what is allocated.
            self._model(ids, logits_to_keep=1, use_cache=True)
            return measure.prompt_tokens / (time.perf_counter() - start_s)
        times_s: list[float] = []
        self._generate(ids, measure.num_new, cache, lambda: times_s.append(time.perf_counter()))
        if measure.num_prompts > 1:
            return len(prompts) * measure.num_new / (time.perf_counter() - start_s)
        return (measure.num_new - 1) / (times_s[-1] - times_s[0])

    @torch.inference_mode()
    def answer(self) -> str:
        message = {"role": "user", "content": QUESTION}
        ids = self._tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        out = self._model.generate(ids, do_sample=False, max_new_tokens=24, eos_token_id=self._end_ids)
        return str(self._tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    def _generate(self, ids: torch.Tensor, num_new: int, cache: str, on_token: Callable[[], None]) -> None:
        class Watch(transformers.StoppingCriteria):  # called after each token of the batch
            def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
                on_token()
                return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_new,
            cache_implementation=cache,
            disable_compile=True,
            stopping_criteria=transformers.StoppingCriteriaList([Watch()]),
        )
        assert out.shape[1] == ids.shape[1] + num_new


def compare(model: Path, rounds: int, launches: int, console: Console) -> Comparison:
    """Everything, in one run."""
    threads = inspect_machine(with_gpus=False).num_usable_cores
    torch.set_num_threads(threads)
    console.print(f"launching {launches} times")
    ready = bench_startup(model, [], launches, cold=False, on_run=lambda done, total: None)
    with (
        tempfile.TemporaryDirectory(prefix="compare-") as scratch,
        asyncio.Runner(loop_factory=fast_loop) as runner,
        ServerProcess([str(model)]) as server,
    ):
        text = TextModel.load(model)
        folder = Path(scratch) / "model"
        convert_gguf(model, folder, text.tokenizer_json(), dtype="bf16")
        theirs = Theirs(folder)
        server.wait_until_ready()
        ours = Ours(server.url, runner)
        try:
            answers = {"firstlight": ours.answer(), "transformers": theirs.answer()}
            figures, pss_bytes = _rounds(ours, theirs, server, rounds, text.vocab_size, console)
        finally:
            ours.close()
    return Comparison(
        model=str(model),
        threads=threads,
        versions={"torch": str(torch.__version__), "transformers": transformers.__version__},
        figures=figures,
        ready_s=[run.ready_s for run in ready.runs],
        pss_bytes=pss_bytes,
        answers=answers,
    )


def _rounds(
    ours: Ours, theirs: Theirs, server: ServerProcess, rounds: int, vocab_size: int, console: Console
) -> tuple[list[Figure], list[int]]:
    """Round 0 warms up. In each round every measure is taken by all, one right after the other."""
    draw = torch.Generator().manual_seed(0)
    figures = [Figure(m.name, m.goal, {who: [] for who in ("firstlight", *CACHES)}) for m in MEASURES]
    pss_bytes = []
    for number in range(rounds + 1):
        for measure, figure in zip(MEASURES, figures, strict=True):
            shape = (measure.num_prompts, measure.prompt_tokens)
            prompts = torch.randint(100, vocab_size, shape, generator=draw).tolist()
            values = {"firstlight": ours.run(measure, prompts)}
            values |= {cache: theirs.run(measure, prompts, cache) for cache in CACHES}
            if number:
                for who, value in values.items():
                    figure.rounds[who].append(value)
        pss_bytes.append(server.pss_bytes())
        console.print(f"round {number} of {rounds}{'' if number else ' (warm-up)'}")
    return figures, pss_bytes


def rows_of(result: Comparison) -> list[tuple[str, ...]]:
    """For the table: name, ours, theirs, ratio, goal, verdict."""
    rows = []
    for figure in result.figures:
        medians = figure.medians
        cells = (f"{medians[who]:,.1f}" for who in ("firstlight", *CACHES))
        ratios = (f"{figure.ratio(cache):.2f}x" for cache in CACHES)
        verdict = _verdict(figure.ratio() >= figure.goal)
        rows.append((figure.name, *cells, *ratios, f">= {figure.goal:.1f}x", verdict))
    ready_s, pss = median(result.ready_s), max(result.pss_bytes) / 1e6
    met_ready, met_pss = ready_s <= MOST_READY_S, max(result.pss_bytes) < MOST_PSS_BYTES
    rows.append(("ready, s", f"{ready_s:.2f}", "", "", "", "", f"<= {MOST_READY_S:g}", _verdict(met_ready)))
    limit = f"< {MOST_PSS_BYTES / 1e6:,.0f}"
    rows.append(("memory (PSS), MB", f"{pss:,.0f}", "", "", "", "", limit, _verdict(met_pss)))
    return rows


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "NOT met"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a GGUF file; default: the embedded model")
    parser.add_argument("--rounds", type=int, default=5, help="at least 5 for a result that counts")
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder")
    arguments = parser.parse_args()
    console = Console(width=160)
    json_file, picture = (arguments.output / f"transformers.{kind}" for kind in ("json", "png"))
    try:
        os.makedirs(arguments.output, exist_ok=True)
        require_writable(json_file, picture)
        result = compare(resolve_model(arguments.model), arguments.rounds, arguments.launches, console)
    except FirstlightError as error:
        console.print(f"error: {error.explain()}", markup=False)
        return error.exit_code
    columns = ("", "firstlight", *(f"{cache} cache" for cache in CACHES), "ratio", "to static", "goal", "")
    rows = rows_of(result)
    console.print(plain_table(f"{result.threads} threads, medians of {arguments.rounds}", columns, rows))
    for who, text in result.answers.items():
        console.print(f"{who}: {text!r}", markup=False)
    ratios = {f.name: {cache: round(f.ratio(cache), 3) for cache in CACHES} for f in result.figures}
    save_json(json_file, "compare transformers", {"ratios": ratios, **msgspec.to_builtins(result)})
    panels = [
        Bars(f"{f.name}: {f.ratio():.2f}x", "line: goal", f.medians, f.goal * f.medians[CACHES[0]])
        for f in result.figures
    ]
    save_panels(picture, f"firstlight and transformers {result.versions['transformers']}", panels)
    console.print(f"stored in {json_file} and {picture}", markup=False)
    return 0 if all(row[-1] == "met" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
