"""`firstlight plan`: what a deployment of a model on some GPUs will need and do, from headers alone.

The arithmetic is `facts.planning.deployment`'s, the tables are `plan_output`'s. Invariant: nothing is loaded
and nothing is fetched; torch is not imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from firstlight.base.errors import UsageError
from firstlight.base.resolve_config import Given, engine_from
from firstlight.base.settings import ENGINE_SETTINGS
from firstlight.cli import plan_values
from firstlight.cli.options import Debug

if TYPE_CHECKING:
    from firstlight.facts.planning.all_reduce import AllReduceTimes
    from firstlight.facts.planning.rank_memory import Device, Load

_SETTINGS = (
    "max-num-seqs",
    "max-batched-tokens",
    "page-size",
    "max-model-len",
    "kv-dtype",
    "memory-fraction",
)
PLAN_SETTINGS = tuple(setting for setting in ENGINE_SETTINGS if setting.name in _SETTINGS)
_GPU_MEMORY = "Memory of each GPU, as its maker counts: 96G and 96GB both mean 96 GiB, of 2^30 bytes."
_WIRE, _HOST, _DRAFTS = "Between the ranks", "Device and host", "Drafts"


@dataclass
class PlanOptions:
    """What `plan` takes beside some settings of the engine."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model known by name (kimi-k2.5), a GGUF file, or a folder with config.json; "
            "of safetensors files in it only headers are read.",
        ),
    ]
    gpus: Annotated[
        int,
        typer.Option(
            "--gpus", "--tensor-parallel", metavar="N", min=1, max=64, help="Ranks, one on each GPU."
        ),
    ] = 1
    gpu_memory: Annotated[str, typer.Option(metavar="SIZE", help=_GPU_MEMORY)] = "80G"
    expert_parallel: Annotated[
        bool,
        typer.Option("--expert-parallel", metavar="", help="Whole experts on each rank, not slices of all."),
    ] = False
    split_embedding: Annotated[
        bool,
        typer.Option(
            "--split-embedding",
            metavar="",
            help="Split the embedding too, as vLLM and SGLang do.",
        ),
    ] = False
    context: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            min=1,
            help="Length of each sequence so far, for decode times. Default: 4096, or the longest there is.",
        ),
    ] = None
    link: Annotated[
        str, typer.Option(metavar="pcie|nvlink", help="What connects the GPUs.", rich_help_panel=_WIRE)
    ] = "pcie"
    link_rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Of the link, one way. Default: 25GB/s (pcie), 450GB/s (nvlink).",
            rich_help_panel=_WIRE,
        ),
    ] = None
    all_reduce: Annotated[
        str,
        typer.Option(metavar="ring|one-shot|two-shot", help="How the ranks sum.", rich_help_panel=_WIRE),
    ] = "ring"
    all_reduce_times: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE:US,...",
            help="Measured microseconds of all-reduces by message size, as 4K:45,64K:344, in place of the "
            "model; one pair sets its latency.",
            rich_help_panel=_WIRE,
        ),
    ] = None
    wire_bytes: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=4,
            help="Bytes of a value in an all-reduce: 4 as firstlight sends it, 2 as vLLM and SGLang do.",
            rich_help_panel=_WIRE,
        ),
    ] = 2
    memory_rate: Annotated[
        str, typer.Option(metavar="RATE", help="Of each GPU's memory.", rich_help_panel=_HOST)
    ] = "1.8TB/s"
    layer_time: Annotated[
        float,
        typer.Option(
            metavar="US",
            min=0.0,
            help="Microseconds that a layer takes beside reading and all-reduces: launches, small kernels.",
            rich_help_panel=_HOST,
        ),
    ] = 30.0
    storage_rate: Annotated[
        str, typer.Option(metavar="RATE", help="Of the host's storage.", rich_help_panel=_HOST)
    ] = "12GB/s"
    graphs: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="What captured CUDA graphs take. Default: by the layers.",
            rich_help_panel=_HOST,
        ),
    ] = None
    runtime: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="What the CUDA context and collectives' buffers take.", rich_help_panel=_HOST
        ),
    ] = "1G"
    drafts: Annotated[
        int, typer.Option(metavar="N", min=1, max=16, help="Longest draft.", rich_help_panel=_DRAFTS)
    ] = 5
    sequences: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Sequences in a step with drafts.", rich_help_panel=_DRAFTS),
    ] = 1
    draft_vocabulary: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens that the drafter knows.", rich_help_panel=_DRAFTS)
    ] = 32000
    draft_chance: Annotated[
        float,
        typer.Option(
            metavar="P",
            min=0.0,
            max=1.0,
            help="Chance of a draft to be accepted after those before it, for the column of gains.",
            rich_help_panel=_DRAFTS,
        ),
    ] = 0.6
    observed: Annotated[
        str | None,
        typer.Option(
            metavar="K:ACCEPTANCE:GAIN",
            help="What was measured with K drafts, as 3:0.15:0.66: which acceptance would have paid there.",
            rich_help_panel=_DRAFTS,
        ),
    ] = None
    json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print one JSON object, in bytes and seconds.")
    ] = False
    debug: Debug = False


def plan(options: PlanOptions, flags: Given) -> None:
    """Compute what a deployment will need and do, without loading anything.

    It tells, from configuration and headers alone:
    memory of each rank, and what fits in it;
    what each rank must read, and what the usual loaders make of that;
    the time of a decode step, and the share of all-reduces;
    the acceptance from which drafts pay.

    Exit code 5: it does not fit.

    Examples:
      firstlight plan kimi-k2.5 --gpus 8 --gpu-memory 96GB
      firstlight plan kimi-k2.5 --gpus 8 --gpu-memory 96GB --all-reduce-times 14K:47 --observed 3:0.15:0.66
      firstlight plan kimi-k2.5 --gpus 8 --gpu-memory 141GB --link nvlink --memory-rate 4.8TB/s
      firstlight plan path/to/folder --gpus 2 --gpu-memory 24GB --max-model-len 32768 --kv-dtype int8
      firstlight plan model.gguf --json
    """
    from firstlight.facts.planning.deployment import make_plan, too_small
    from firstlight.facts.planning.outline import open_outline
    from firstlight.facts.planning.sharding import Ranks

    ranks = Ranks(options.gpus, options.expert_parallel, options.split_embedding)
    device, load, times = _device(options, flags), _load(options, flags), _all_reduce(options)
    outline = open_outline(options.model)
    load = _within(load, outline.description.max_position, options.context)
    made = make_plan(outline, ranks, device, load, times)
    if options.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(made), indent=2).decode())
    else:
        from firstlight.cli.plan_output import show_plan

        show_plan(made, load, device)
    if made.missing_bytes:
        raise too_small(made)


def _device(options: PlanOptions, flags: Given) -> Device:
    from firstlight.facts.planning.decode_time import Rates
    from firstlight.facts.planning.rank_memory import Device

    section = engine_from(_fields(flags), flags.origin)
    return Device(
        memory_bytes=plan_values.size("--gpu-memory", options.gpu_memory),
        fraction=section.memory_fraction,
        graph_bytes=None if options.graphs is None else plan_values.size("--graphs", options.graphs, least=0),
        runtime_bytes=plan_values.size("--runtime", options.runtime, least=0),
        rates=Rates(
            plan_values.rate("--memory-rate", options.memory_rate),
            options.layer_time * 1e-6,
            options.wire_bytes,
        ),
        storage_bytes_per_s=plan_values.rate("--storage-rate", options.storage_rate),
    )


def _load(options: PlanOptions, flags: Given) -> Load:
    from firstlight.facts.planning.rank_memory import Load

    section = engine_from(_fields(flags), flags.origin)
    return Load(
        max_model_len=section.max_model_len,
        max_num_seqs=section.max_num_seqs,
        max_batched_tokens=section.max_batched_tokens,
        page_size_tokens=section.page_size_tokens,
        kv_dtype="bfloat16" if section.kv_dtype == "auto" else section.kv_dtype,
        max_drafts=options.drafts,
        draft_vocabulary=options.draft_vocabulary,
        chance=options.draft_chance,
        num_sequences=options.sequences,
        observed=None if options.observed is None else plan_values.observed("--observed", options.observed),
    )


def _within(load: Load, model_tokens: int, context: int | None) -> Load:
    """The load with its context. Raises `UsageError` for lengths that the model cannot have."""
    from dataclasses import replace

    longest = load.max_model_len or model_tokens
    for flag, length in (("--max-model-len", longest), ("--context", context or 1)):
        if length > model_tokens:
            raise UsageError(
                f"{flag} {length} is longer than the model's sequences, which end at {model_tokens} tokens.",
                f"Use {flag} {model_tokens} or less.",
            )
    if context is not None and context > longest:
        raise UsageError(
            f"--context {context} is longer than --max-model-len {longest} allows.",
            "Lower --context, or raise --max-model-len.",
        )
    return replace(load, context=min(load.context, longest) if context is None else context)


def _all_reduce(options: PlanOptions) -> AllReduceTimes:
    from dataclasses import replace

    from firstlight.facts.planning.all_reduce import ALGORITHMS, LINKS, measured, modelled

    link = LINKS.get(options.link)
    if link is None:
        raise UsageError(f"--link {options.link} is not known.", f"Use {' or '.join(LINKS)}.")
    if options.all_reduce not in ALGORITHMS:
        raise UsageError(f"--all-reduce {options.all_reduce} is not known.", f"Use {', '.join(ALGORITHMS)}.")
    if options.link_rate is not None:
        link = replace(link, bytes_per_s=plan_values.rate("--link-rate", options.link_rate))
    model = modelled(options.all_reduce, link, options.gpus)
    if options.all_reduce_times is None:
        return model
    return measured(plan_values.points("--all-reduce-times", options.all_reduce_times), model)


def _fields(flags: Given) -> dict[str, object]:
    """The flags by the names of their fields."""
    names = {setting.name: setting.field for setting in PLAN_SETTINGS}
    return {names[name]: value for name, value in flags.values.items()}
