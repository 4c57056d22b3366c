"""`firstlight profile` on real engines: kinds add up, a slow collective shows, answers stay the same."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from firstlight.cli.main import make_app
from firstlight.engine.messages import Profile, StartProfile, StopProfile
from support.engines import submit
from support.experts import kimi, write_experts
from support.rank_processes import RankProcesses
from support.serving import RunningServer, write_chat_model

pytestmark = pytest.mark.timeout(600)  # processes that import torch, on a machine that may be busy
INJECTED = Path(__file__).parents[1] / "patients" / "injected"
SLOW_S = 0.004  # each of 4 collectives a step and more, in which a tiny model has little else to do
runner = CliRunner()


def assert_adds_up(profile: Profile) -> None:
    """The kinds are the steps' whole time, on every rank."""
    assert profile.num_steps > 0
    for group in profile.groups:
        for wall_s, kinds_s in zip(group.wall_s, group.kinds_s, strict=True):
            assert sum(kinds_s.values()) == pytest.approx(wall_s, rel=0.02)
            assert min(kinds_s.values()) >= 0.0


def kinds_of(profile: Profile, rank: int) -> set[str]:
    """Those that took any time."""
    return {kind for group in profile.groups for kind, seconds in group.kinds_s[rank].items() if seconds}


def test_kinds_add_up_to_the_step(tmp_path: Path) -> None:
    """The reference in two ranks, with latent attention and experts."""
    folder = write_experts(tmp_path / "m", kimi(vocab_size=501))
    sizes = {"max_num_seqs": 8, "max_batched_tokens": 64, "max_model_len": 256}
    with RankProcesses(folder, 2, **sizes) as ranks:
        ranks.wait_until_ready()
        ranks.send(StopProfile())  # there is none: nothing comes of it
        ranks.send(submit("a", [5, 6, 7] * 4, max_tokens=80, ignore_eos=True))
        ranks.send(StartProfile(24))
        steps_s, profile, tokens = [], None, 0
        while tokens < 80:
            message = ranks.receive()
            if isinstance(message, Profile):
                profile = message
                continue
            for output in getattr(message, "outputs", []):
                tokens += len(output.token_ids)
                steps_s.append(message.stats.step_s)
        assert profile is not None
        assert ranks.drain() == [0, 0]
    assert_adds_up(profile)
    assert (profile.num_ranks, profile.num_steps) == (2, 24)
    wall_s = sum(group.wall_s[0] for group in profile.groups)
    assert 24 * min(steps_s) < wall_s < profile.window_s  # a turn has a step in it, as the engine times it
    both = {"matrix products", "attention", "experts", "collectives", "other operators", "Python"}
    assert kinds_of(profile, 0) == both | {"sampling"}
    assert kinds_of(profile, 1) == both | {"waiting"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Two ranks with slow collectives: the fault is put in from outside while their modules are imported."""
    order = {
        "process": ["firstlight.engine.rank"],
        "module": "firstlight.ops.collectives",
        "change": "slow_collective",
        "arguments": {"seconds": SLOW_S},
    }
    model = write_chat_model(tmp_path_factory.mktemp("slow") / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(INJECTED), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("XDG_SESSION_NOTES", json.dumps(order))
        patch.setenv("OMP_NUM_THREADS", "1")
        with RunningServer(model, "--tensor-parallel", "2") as running:
            yield running


def ask(server: RunningServer, **fields: Any) -> str:
    body = {"prompt": [5, 6, 7], "max_tokens": 64, "ignore_eos": True, "temperature": 0, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def run_profile(*arguments: str) -> tuple[int, str]:
    done = runner.invoke(make_app(), ["profile", *arguments])
    return done.exit_code, done.output


def test_a_slow_collective_is_most_of_the_step(server: RunningServer, tmp_path: Path) -> None:
    numbers, picture = tmp_path / "a.json", tmp_path / "a.png"
    stored = ["--json", str(numbers), "--png", str(picture), "--memory-rate", "10GB/s"]
    code, printed = run_profile("--url", server.url, "--load", "2", "--steps", "16", *stored)
    assert code == 0, printed
    report = json.loads(numbers.read_text())
    assert [rank["shares"]["collectives"] > 0.5 for rank in report["ranks"]] == [True, True]
    assert [sum(rank["shares"].values()) for rank in report["ranks"]] == pytest.approx([1, 1], abs=0.02)
    assert report["predicted"]["kinds_s"]["collectives"] < report["ranks"][0]["kinds_s"]["collectives"] / 10
    assert "times what the plan predicts" in printed
    assert "rank 1" in printed
    assert picture.exists()


def test_answers_are_the_same_while_it_is_made(server: RunningServer) -> None:
    expected = [ask(server, prompt=[5 + n, 6, 7]) for n in range(2)]
    answers: dict[int, str] = {}

    def ask_meanwhile(number: int) -> None:
        answers[number] = ask(server, prompt=[5 + number, 6, 7])

    clients = [threading.Thread(target=ask_meanwhile, args=(n,)) for n in range(2)]
    for client in clients:
        client.start()
    body = {"steps": 16, "timeout_s": 60}
    answer = httpx.post(f"{server.url}/v1/profile", json=body, timeout=120, trust_env=False)
    for client in clients:
        client.join()
    assert answer.json()["num_steps"] == 16
    assert [answers[n] for n in range(2)] == expected


def test_where_nothing_is_decoded_it_says_so(server: RunningServer) -> None:
    code, printed = run_profile("--url", server.url, "--timeout", "1.0")
    assert code == 6
    assert "nothing is decoding: send requests, or use --load N" in printed
    assert "no decode step was recorded" in printed
    assert "--load 1" in printed


def test_a_server_of_its_own_is_started_and_stopped(tmp_path: Path) -> None:
    """Our own kernels in one rank, with drafts: a program of operators times itself."""
    model, numbers = write_chat_model(tmp_path / "tiny"), tmp_path / "a.json"
    flags = "--drafter ngram --draft-tokens 2 --cpu-kernels native"
    arguments = ["--run", f"{model} {flags}", "--steps", "16", "--json", str(numbers), "--debug"]
    code, printed = run_profile(*arguments)
    assert code == 0, printed
    profile = msgspec.convert(json.loads(numbers.read_text())["profile"], Profile)
    assert_adds_up(profile)
    work = {"matrix products", "attention", "other operators", "Python"}
    assert kinds_of(profile, 0) == work | {"sampling", "drafting"}
    assert "measured here now" in printed
