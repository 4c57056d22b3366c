"""What a process is, from its title, its arguments and its cut name; and what a command line promises."""

from __future__ import annotations

import pytest

from firstlight.doctor.case.redact import HIDDEN, hide_in_command, hide_in_text, is_secret_name
from firstlight.doctor.case.target import Engine, Role
from firstlight.doctor.servers.identity import identify, is_compiler, option
from firstlight.doctor.servers.options import address_of, model_of, sizes

PYTHON = "/usr/bin/python3"


@pytest.mark.parametrize(
    ("command", "engine", "role", "labels"),
    [
        (["VLLM::EngineCore"], Engine.VLLM, Role.ENGINE, {}),
        (["VLLM::EngineCore_DP1"], Engine.VLLM, Role.ENGINE, {"DP": 1}),
        (["VLLM::Worker_PP1_TP0"], Engine.VLLM, Role.RANK, {"PP": 1, "TP": 0}),
        (["VLLM::APIServer_0"], Engine.VLLM, Role.API, {}),
        (["sglang::scheduler_TP3"], Engine.SGLANG, Role.RANK, {"TP": 3}),
        (["sglang::scheduler_DP1_TP2_EP2"], Engine.SGLANG, Role.RANK, {"DP": 1, "TP": 2, "EP": 2}),
        (["sglang::scheduler"], Engine.SGLANG, Role.RANK, {}),
        (["sglang::detokenizer"], Engine.SGLANG, Role.DETOKENIZER, {}),
        (["sglang::data_parallel_controller"], Engine.SGLANG, Role.ENGINE, {}),
        ([PYTHON, "/opt/bin/vllm", "serve", "org/model"], Engine.VLLM, Role.API, {}),
        ([PYTHON, "-m", "vllm.entrypoints.openai.api_server"], Engine.VLLM, Role.API, {}),
        ([PYTHON, "-m", "sglang.launch_server", "--tp", "8"], Engine.SGLANG, Role.API, {}),
        (["sglang", "serve", "--model-path", "m"], Engine.SGLANG, Role.API, {}),
        (
            [PYTHON, "-m", "firstlight.engine.rank", "--rank", "2"],
            Engine.NATIVE,
            Role.RANK,
            {"RANK": 2},
        ),
        ([PYTHON, "-P", "-m", "firstlight.serve.api", "--fd", "3"], Engine.NATIVE, Role.API, {}),
        ([PYTHON, "-m", "firstlight", "serve"], Engine.NATIVE, Role.SUPERVISOR, {}),
        ([PYTHON, "/opt/bin/firstlight", "serve", "m.gguf"], Engine.NATIVE, Role.SUPERVISOR, {}),
        (["/opt/bin/firstlight", "serve"], Engine.NATIVE, Role.SUPERVISOR, {}),
        ([PYTHON, "-u", "-X", "dev", "/opt/bin/vllm", "serve", "m"], Engine.VLLM, Role.API, {}),
        (["python3.12", "-Im", "sglang.launch_server"], Engine.SGLANG, Role.API, {}),
        ([PYTHON, "-I", "-S", "/x/firstlight/launch/janitor.py", "5"], Engine.UNKNOWN, Role.JANITOR, {}),
        (["/usr/lib/gcc/12/cc1plus", "-quiet"], Engine.UNKNOWN, Role.COMPILER, {}),
    ],
)
def test_titles_and_arguments(command: list[str], engine: Engine, role: Role, labels: dict[str, int]) -> None:
    found = identify(command, "whatever")
    assert found is not None
    assert (found.engine, found.role, found.labels) == (engine, role, labels)


@pytest.mark.parametrize(
    ("comm", "role"),
    [
        ("sglang::schedul", Role.RANK),
        ("sglang::detoken", Role.DETOKENIZER),
        ("VLLM::Worker_TP", Role.RANK),
        ("VLLM::EngineCor", Role.ENGINE),
    ],
)
def test_a_zombie_keeps_fifteen_letters(comm: str, role: Role) -> None:
    found = identify((), comm)
    assert found is not None
    assert (found.role, found.labels) == (role, {})


@pytest.mark.parametrize(
    "command",
    [
        ["bash", "-c", "vllm serve org/model"],
        ["grep", "sglang::scheduler_TP0"],
        ["tail", "-f", "vllm.log"],
        [PYTHON, "train.py"],
        [PYTHON, "-m", "firstlight", "bench", "serve-load"],
        # Who starts a server, or speaks to one elsewhere.
        ["tmux", "new", "-d", "firstlight", "serve", "--backend", "vllm"],
        ["SCREEN", "-dm", "firstlight", "serve"],
        ["timeout", "60", "firstlight", "serve"],
        ["timeout", "-s", "KILL", "60", PYTHON, "-m", "firstlight", "serve"],
        ["uv", "run", "vllm", "serve", "m"],
        ["tini", "--", "vllm", "serve", "m"],
        ["ssh", "box", "vllm", "serve", "m"],
        ["ssh", "-t", "box", "python", "-m", "sglang.launch_server"],
        ["docker", "run", "-m", "vllm.entrypoints", "image", "vllm", "serve"],
        [PYTHON, "launcher.py", "firstlight", "serve"],
        [PYTHON, "-m", "launcher", "firstlight", "serve"],
        [PYTHON, "-c", "run('/opt/bin/vllm')", "vllm", "serve"],
        ["vi", "firstlight/launch/janitor.py"],
    ],
)
def test_what_only_mentions_a_server_is_none(command: list[str]) -> None:
    assert identify(command, "python3") is None


def test_compilers_with_versions() -> None:
    assert is_compiler("g++-12")
    assert is_compiler("x86_64-linux-gnu-ld.bfd")
    assert not is_compiler("python3.11")


def test_options_in_all_spellings() -> None:
    command = ["x", "--tp-size=4", "--port", "1", "--port", "2", "--data_parallel_size", "3"]
    assert option(command, ("--tp-size",)) == "4"
    assert option(command, ("--port",)) == "2"
    assert option(command, ("--data-parallel-size",)) == "3"
    assert option(command, ("--absent",)) is None


def test_groups_multiply_except_where_they_share_ranks() -> None:
    vllm = sizes(Engine.VLLM, ["-tp", "4", "--pipeline-parallel-size", "2"])
    assert (vllm.ranks_here, vllm.rank_of({"PP": 1, "TP": 3})) == (8, 7)
    assert sizes(Engine.SGLANG, ["--tp", "8", "--dp", "8", "--enable-dp-attention"]).ranks_here == 8
    assert sizes(Engine.SGLANG, ["--tp", "16", "--nnodes", "2"]).ranks_here == 8
    assert vllm.rank_of({"EP": 1}) is None


def test_model_and_address() -> None:
    assert model_of(Engine.VLLM, ["vllm", "serve", "org/model", "--port", "9"]) == "org/model"
    assert model_of(Engine.SGLANG, ["x", "--model-path", "m"]) == "m"
    assert address_of(Engine.SGLANG, ["x", "--host", "0.0.0.0"]) == ("127.0.0.1", 30000)
    assert address_of(Engine.UNKNOWN, ["x"]) is None


def test_secrets_are_hidden_by_their_names() -> None:
    command = ["vllm", "serve", "--api-key", "one", "two", "--hf-token=three", "--max-tokens", "8"]
    shown = hide_in_command(command)
    assert shown[2:] == (
        "--api-key",
        HIDDEN,
        HIDDEN,
        f"--hf-token={HIDDEN}",
        "--max-tokens",
        "8",
    )
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "FIRSTLIGHT_API_KEY"):
        assert is_secret_name(name), name
    for name in ("TOKENIZERS_PARALLELISM", "max-num-batched-tokens", "ssl-keyfile", "KEYBOARD"):
        assert not is_secret_name(name), name


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer abcdefghijklmnop",
        "http://user:s3cretvalue@proxy:3128",
        "api_key=s3cretvalue",
        'namespace(api_key="s3cretvalue")',
        "token is hf_abcdefghijklmnopqrstuvwxyz",
    ],
)
def test_secrets_in_free_text(text: str) -> None:
    shown = hide_in_text(text)
    assert HIDDEN in shown
    for secret in ("abcdefghijklmnop", "s3cretvalue"):
        assert secret not in shown
