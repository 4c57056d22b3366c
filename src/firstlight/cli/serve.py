"""`firstlight serve`: flags and a TOML file become an order for the launcher.

Invariant: nothing slow is imported before the public socket listens; mostly it does already, as
`cli.first_answer` has opened it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from firstlight.base.resolve_config import Given
from firstlight.cli.keys import gather_keys, listed_keys
from firstlight.cli.locate import locate
from firstlight.cli.options import Debug


@dataclass
class ServeOptions:
    """What `serve` takes beside the settings of the run.

    Paths have a parser of their own, as the library's would `stat` a file that may not answer.
    """

    model: Annotated[
        str | None,
        typer.Argument(
            help="A GGUF file, a Hugging Face folder or a hub id such as org/name. "
            "Without it: the embedded default, SmolLM2-135M-Instruct.",
            metavar="MODEL",
            show_default=False,
        ),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with the names of these flags; flags win.", metavar="FILE", parser=Path),
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Key that requests must carry; repeatable. Others on this machine can see it in the process "
            "list: --api-key-file or FIRSTLIGHT_API_KEY keep it to yourself.",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with keys, one a line.", metavar="FILE", parser=Path)
    ] = None
    debug: Debug = False


def serve(options: ServeOptions, flags: Given) -> int:
    """Serve a model to any OpenAI client.

    Listens at once, answers 503 with its progress while the model loads, and prints a request that works
    when it is ready.

    Examples:
      firstlight serve
      firstlight serve model.gguf --port 9000
      firstlight serve org/name --tensor-parallel 2 --max-model-len 8192
      firstlight serve --config run.toml --api-key-file keys.txt
      firstlight serve --backend vllm org/name -- --enforce-eager
    """
    import msgspec

    from firstlight.base.proc_stat import launched_s
    from firstlight.base.resolve_config import read_toml, resolve
    from firstlight.cli.first_answer import early
    from firstlight.cli.passed_on import listed_arguments, passed_on, require_no_rest
    from firstlight.facts.machine.machine import inspect_machine
    from firstlight.launch.serve import Order, serve

    file = read_toml(options.config) if options.config else Given({}, "no file")
    machine = inspect_machine(with_gpus=False)
    model = options.model or file.values.get("model")
    texts = options.api_key or listed_keys(file.values.get("api-key", []), file.origin)
    keys = gather_keys(texts, options.api_key_file or file.values.get("api-key-file"))
    rest = (*listed_arguments(file.values.get("backend-args", []), file.origin), *passed_on())
    resolved = resolve([flags, file], machine.num_usable_cores)
    if resolved.launch.backend == "native":
        require_no_rest(rest)
    launch = msgspec.structs.replace(resolved.launch, backend_args=rest)
    order = Order(
        resolved=msgspec.structs.replace(resolved, launch=launch),
        model=model,
        api_keys=keys,
        cores=machine.physical_cores,
        debug=options.debug or file.values.get("debug") is True,
    )
    return serve(order, locate, sys.stderr, early(), start_s=launched_s())
