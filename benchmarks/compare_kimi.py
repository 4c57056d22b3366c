"""A Kimi in small, served by one rank and by two, beside `transformers`: `make bench-kimi`.

Ours has experts in INT4 and all else in bfloat16, as Kimi-K2.5 is published, on our own kernels. Theirs is
`DeepseekV3ForCausalLM` in this process with the very values that these stand for, unpacked: packed weights
need a library of their own there. It computes in bfloat16 and in float32, one behind the other, because both
do not fit beside each other. Rounds are interleaved and medians are compared. Invariant: all have the same
prompts and as many threads in all, and no prompt comes twice.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
import transformers
from msgspec.structs import replace
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from compare_transformers import CACHES, Measure, Ours, Theirs
from firstlight.base.errors import FirstlightError
from firstlight.base.resolve_config import parse_size
from firstlight.bench.measures import median
from firstlight.bench.report import plain_table, require_writable, save_json
from firstlight.bench.serving.server_process import ServerProcess
from firstlight.bench.serving.serving import fast_loop
from firstlight.facts.description import ModelDescription
from firstlight.facts.machine.machine import inspect_machine
from firstlight.models.packed_experts import PackedExperts
from firstlight.models.random_model import Packing, Unpacked, num_bytes, write_random_model
from firstlight.models.small_kimi import SMALLEST_HIDDEN, WRAPPER, kimi_of_hidden, kimi_of_size

VOCAB_SIZE = 4096
TYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
PROMPT, NEW, CROWD, LONG = 64, 32, 8, 512


def measures(num_new: int) -> tuple[Measure, ...]:
    """What is compared; answers have so many tokens."""
    return (
        Measure("decode, batch 1, tokens/s", 1, PROMPT, 1.0, num_new),
        Measure(f"concurrency {CROWD}, tokens/s", CROWD, PROMPT, 1.0, num_new),
        Measure(f"prefill of {LONG}, tokens/s", 1, LONG, 1.0, 1),
    )


class Unpacking(PackedExperts):
    """Writes what packed experts stand for, in the type of all else."""

    def config(self) -> dict[str, object]:
        return {}

    def written(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return Unpacked.written(self, name, shape)

    def pack(self, name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
        packed = super().pack(name, values)
        words, scales = (packed.get(f"{name}_{word}") for word in ("packed", "scale"))
        if words is None or scales is None:
            return packed
        codes = (words.unflatten(1, (-1, 4))[..., None] >> torch.arange(0, 32, 4)) & 15
        meant = (codes.flatten(2) - 8).float() * scales.float()[..., None]
        return Unpacked.pack(self, name, meant.flatten(1))


@dataclass
class Result:
    """`rounds[who][measure]`: of every round. `ours` stand in every session beside one of theirs."""

    model: dict[str, object]
    threads: int
    versions: dict[str, str]
    rounds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    pss_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, who: str, measure: Measure, value: float) -> None:
        self.rounds.setdefault(who, {}).setdefault(measure.name, []).append(value)


def write_tokenizer(folder: Path) -> None:
    """A token for each byte, and names that no text has for the rest."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "".join(2 * alphabet[:1])]
    names += [f"<{number}>" for number in range(VOCAB_SIZE - len(names))]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(alphabet[0], alphabet[0])]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))


def write_models(folder: Path, most_bytes: int, layers: int, experts: int) -> ModelDescription:
    """`folder`/packed for us and `folder`/unpacked for transformers; what both are."""
    smallest = kimi_of_hidden(SMALLEST_HIDDEN, vocab_size=VOCAB_SIZE, num_layers=layers, num_experts=experts)
    packed = PackedExperts(torch.bfloat16)
    description = kimi_of_size(most_bytes, packed, smallest)
    kinds: dict[str, tuple[ModelDescription, Packing, str | None]] = {
        "packed": (description, packed, WRAPPER),
        "unpacked": (replace(description, architecture="deepseek_v3"), Unpacking(torch.bfloat16), None),
    }
    for name, (described, packing, wrapper) in kinds.items():
        shutil.rmtree(folder / name, ignore_errors=True)
        write_random_model(folder / name, described, packing, wrapper=wrapper)
        write_tokenizer(folder / name)
    return description


def compare(folder: Path, result: Result, arguments: argparse.Namespace, console: Console) -> None:
    """Both servers stay up; theirs come one after the other."""
    rounds = arguments.rounds
    threads = result.threads
    flags = ["--max-model-len", "1024", "--no-prefix-cache"]
    runs = {"1 rank": ["--threads", str(threads)]}
    runs["2 ranks"] = ["--tensor-parallel", "2", "--threads", str(max(1, threads // 2))]
    with asyncio.Runner(loop_factory=fast_loop) as runner, ExitStack() as stack:
        servers = {
            who: stack.enter_context(ServerProcess([str(folder / "packed"), *flags, *more]))
            for who, more in runs.items()
        }
        for server in servers.values():
            server.wait_until_ready()
        ours = {who: Ours(server.url, runner) for who, server in servers.items()}
        for one in ours.values():
            stack.callback(one.close)
        draw = torch.Generator().manual_seed(0)
        for dtype in arguments.dtypes.split(","):
            theirs = Theirs(folder / "unpacked", TYPES[dtype])
            for number in range(rounds + 1):  # the first one warms up
                for measure in measures(arguments.new):
                    shape = (measure.num_prompts, measure.prompt_tokens)
                    prompts = torch.randint(300, VOCAB_SIZE, shape, generator=draw).tolist()
                    values = {who: one.run(measure, prompts) for who, one in ours.items()}
                    values[f"transformers, {dtype}"] = theirs.run(measure, prompts, CACHES[0])
                    for who, value in values.items() if number else ():
                        result.add(who, measure, value)
                console.print(f"{dtype}: round {number} of {rounds}{'' if number else ' (warm-up)'}")
            del theirs
            gc.collect()
        result.pss_bytes = {who: server.pss_bytes() for who, server in servers.items()}


def rows_of(result: Result) -> list[tuple[str, ...]]:
    """A row for each measure, and one of memory."""
    named = next(iter(result.rounds.values()))
    rows = [(name, *(f"{median(values[name]):,.2f}" for values in result.rounds.values())) for name in named]
    memory = [result.pss_bytes.get(who) for who in result.rounds]
    rows.append(("memory (PSS), MB", *("" if num is None else f"{num / 1e6:,.0f}" for num in memory)))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", default="2G", help="bytes of the packed model, at most")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=NEW, help="tokens of an answer")
    parser.add_argument("--dtypes", default="bf16,f32", help="of transformers")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder")
    arguments = parser.parse_args()
    console = Console(width=160)
    file = arguments.output / "kimi.json"
    threads = inspect_machine(with_gpus=False).num_usable_cores
    torch.set_num_threads(threads)
    try:
        os.makedirs(arguments.output, exist_ok=True)
        require_writable(file)
        with tempfile.TemporaryDirectory(prefix="kimi-") as scratch:
            size = parse_size(arguments.size)
            described = write_models(Path(scratch), size, arguments.layers, arguments.experts)
            facts = {
                "hidden": described.hidden_size,
                "layers": arguments.layers,
                "experts": arguments.experts,
                "bytes": num_bytes(described, PackedExperts(torch.bfloat16)),
                "unpacked_bytes": num_bytes(described, Unpacked(torch.bfloat16)),
            }
            versions = {"torch": str(torch.__version__), "transformers": transformers.__version__}
            result = Result(facts, threads, versions)
            console.print(f"{facts}, {threads} threads", markup=False)
            compare(Path(scratch), result, arguments, console)
    except FirstlightError as error:
        console.print(f"error: {error.explain()}", markup=False)
        return error.exit_code
    rows = rows_of(result)
    console.print(plain_table(f"medians of {arguments.rounds} rounds", ("", *result.rounds), rows))
    save_json(file, "compare kimi", result)
    console.print(f"stored in {file}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
