"""Evidence bundles: nothing secret in them, the same verdict from them, no harm from a stranger's."""

from __future__ import annotations

import gzip
import json
import os
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.base.errors import FirstlightError, ModelFileError, UsageError
from firstlight.doctor.case import bundle
from firstlight.doctor.case.bundle import FORMAT, VERSION, read_bundle, redact_case, write_bundle
from firstlight.doctor.case.evidence import Case
from firstlight.doctor.case.redact import HIDDEN, hide_in_command, hide_in_text
from firstlight.doctor.case.target import RUN, Engine
from firstlight.doctor.case.values import Failed, Value
from firstlight.doctor.case.values_host import HttpProbe
from firstlight.doctor.case.values_process import (
    BlackBoxSeen,
    Environment,
    ExitRecord,
    Frame,
    Libraries,
    Library,
    LogTail,
    ProcessState,
    PythonStacks,
    StackThread,
    Threads,
    ThreadState,
)
from firstlight.doctor.verdict import judge
from support.doctor_scenes import box, case, encode_case, made_up, target

# Each holds the word below, in a form in which tools print what nobody should see.
WORD = "hunter2correcthorse"
SECRETS = (
    f"api_key='{WORD}'",
    f"non-default args: {{'api_key': ['{WORD}', '{WORD}2'], 'port': 1}}",
    f"Authorization: Bearer {WORD}",
    f"curl -H 'x-api-key: {WORD}' http://a/b",
    f"--api-key {WORD} --port 8000",
    f"--hf-token={WORD}",
    f"HF_TOKEN={WORD} vllm serve",
    f"AWS_SECRET_ACCESS_KEY={WORD}",
    f"https://user:{WORD}@example.org/x",
    f"https://{WORD}@example.org/x",
    f"redis://:{WORD}@example.org",
    f"https://a/b?token={WORD}&x=1",
    f"https://a/b?X-Amz-Signature={WORD}",
    f'{{"password": "{WORD} and {WORD}"}}',
    f"password: {WORD}",
    f"Set-Cookie: session={WORD}; path=/; other={WORD}",
    f"sk-{WORD}abcdef",
    f"hf_{WORD}abcdef",
    f"eyJ{WORD}.{WORD}.{WORD}",
    f"-----BEGIN RSA PRIVATE KEY-----{WORD}",
    f"client_secret => '{WORD}'",
    f"DB_PASSWD={WORD}",
)
HOMES = (
    "/".join(("", "home", "alice")),
    "/".join(("", "nfs", "home", "bob")),
    "/".join(("", "Users", "carol")),
)


def places(text: str) -> Case:
    """A case with the text in every kind of place."""
    process = msgspec.structs.replace(made_up("rank-0", 10, rank=0), command=("python", "-m", "x", text))
    frame = Frame(function=text, file=text, line=1)
    seen: list[tuple[int, str, Value]] = [
        (0, "rank-0", Environment(variables={"NCCL_X": text, "MY_TOKEN": WORD, "HOME": HOMES[0]})),
        (0, "rank-0", LogTail(path=text, size_bytes=1, modified_wall_s=1.0, lines=("a", text, "b"))),
        (0, "rank-0", ExitRecord(name="rank-0", code=1, message=text, hint=text)),
        (0, "rank-0", _stacks(text, frame)),
        (0, "rank-0", Libraries(libraries=(Library(name=text, path=text),))),
        (0, RUN, HttpProbe(url=text, address=text, outcome="answered", status=200, body=text)),
        (0, RUN, Failed(collector="x", reason=text)),
        (0, "rank-0", BlackBoxSeen(path=text, box=box(0, phase="weights"), is_alive=True)),
    ]
    made = case(target(process, model=text, run_dir=text, notes=(text,)), seen)
    evidence = tuple(msgspec.structs.replace(one, raw=text, source=text) for one in made.evidence)
    return msgspec.structs.replace(made, evidence=evidence, host={"machine": text, "password": WORD})


def _stacks(text: str, frame: Frame) -> PythonStacks:
    thread = StackThread(tid=1, name=text, is_active=True, owns_gil=False, frames=(frame,))
    return PythonStacks(threads=(thread,), tool=text)


@pytest.mark.parametrize("secret", SECRETS)
def test_no_secret_is_left_anywhere(secret: str, tmp_path: Path) -> None:
    path = tmp_path / "x.bundle"
    write_bundle(path, [redact_case(places(secret))])
    assert WORD.encode() not in gzip.decompress(path.read_bytes())
    assert HIDDEN.encode() in gzip.decompress(path.read_bytes())


@pytest.mark.parametrize("secret", SECRETS)
def test_what_was_redacted_stays_as_it_is(secret: str) -> None:
    once = redact_case(places(secret))
    assert redact_case(once) == once
    assert hide_in_text(hide_in_text(secret)) == hide_in_text(secret)


@pytest.mark.parametrize(
    "harmless",
    [
        "max_tokens=500, eos_token='<s>', token: 12",
        "Avg prompt throughput: 10.5 tokens/s, prompt tokens: 55",
        "stop_token_ids: [1, 2]",
        "api_key=None, ssl_keyfile=/etc/x.pem",
        "waits for the key: rank-0",
        "--max-num-batched-tokens 8192 --tokenizer /m",
        "AttributeError: 'NoneType' object has no attribute 'token'",
    ],
)
def test_what_is_no_secret_stays(harmless: str) -> None:
    assert hide_in_text(harmless) == harmless
    assert hide_in_command(harmless.split()) == tuple(harmless.split())


def test_user_names_in_paths_become_tildes_and_folders_stay_apart() -> None:
    lines = tuple(f"reading {home}/models/x and {home}" for home in HOMES)
    log = LogTail(path="/tmp/alice/x.log", size_bytes=1, modified_wall_s=0, lines=lines)
    found = redact_case(case(target(made_up("rank-0", 10, rank=0)), [(0, "rank-0", log)]))
    assert found.all(LogTail)[0].value.lines == (
        "reading ~/models/x and ~",
        "reading ~2/models/x and ~2",
        "reading ~3/models/x and ~3",
    )
    assert found.all(LogTail)[0].value.path == "/tmp/~/x.log"


def test_a_process_root_is_no_home() -> None:
    failed = Failed(collector="x", reason="/".join(("/proc/7", "root", "x")))
    found = redact_case(case(target(), [(0, RUN, failed)]))
    assert found.all(Failed)[0].value.reason == failed.reason


def sleeping(key: str, pid: int, look: int, cpu_s: float, state: str = "S") -> list[tuple[int, str, Value]]:
    thread = ThreadState(tid=pid, name="x", state=state, cpu_s=cpu_s, major_faults=0, wchan="futex_wait")
    return [
        (look, key, ProcessState(state=state, cpu_s=cpu_s, num_threads=1)),
        (look, key, Threads(threads=(thread,), cpu_source="schedstat")),
    ]


STATES = st.lists(st.sampled_from("SRTZD"), min_size=1, max_size=4)


@settings(deadline=None)  # the first verdict compiles a few hundred patterns
@given(
    states=STATES,
    moved=st.floats(0, 2),
    engine=st.sampled_from(Engine),
    line=st.sampled_from((*SECRETS, "MemoryError", f"cannot open {HOMES[1]}/x", "Load weight end.")),
)
def test_a_bundle_gives_the_verdict_that_was_given(
    states: list[str], moved: float, engine: Engine, line: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    seen: list[tuple[int, str, Value]] = []
    for rank, state in enumerate(states):
        for look in (0, 1):
            seen += sleeping(f"rank-{rank}", 10 + rank, look, 1.0 + look * moved, state)
    log = LogTail(path=f"{HOMES[0]}/log", size_bytes=1, modified_wall_s=900.0, lines=("a", line))
    seen.append((1, RUN, log))
    ranks = [made_up(f"rank-{rank}", 10 + rank, rank=rank) for rank in range(len(states))]
    whole = case(target(*ranks, engine=engine, expected_ranks=len(ranks)), seen)
    given_away = redact_case(whole)
    path = tmp_path_factory.mktemp("bundles") / "x"
    write_bundle(path, [given_away])
    assert read_bundle(path) == (given_away,)
    told, again = judge(given_away), judge(read_bundle(path)[0])
    assert told == again
    before = judge(whole)
    same = ("condition", "cause", "grade", "subject", "decisive", "not_measured")
    assert [getattr(told, name) for name in same] == [getattr(before, name) for name in same]


def test_the_file_is_private_and_nothing_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "x"
    previous = os.umask(0)
    try:
        write_bundle(path, [case(target(), [])])
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        write_bundle(path, [])
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="exists already"):
        write_bundle(link, [])
    with pytest.raises(UsageError, match="cannot write"):
        write_bundle(tmp_path / "no" / "folder", [])
    assert path.read_bytes() == before
    assert not (tmp_path / "elsewhere").exists()


def whole(**changes: object) -> bytes:
    made = json.loads(encode_case(case(target(made_up("rank-0", 10)), [])))
    return json.dumps({"format": FORMAT, "version": VERSION, "cases": [made], **changes}).encode()


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (b"", UsageError, "is no evidence bundle"),
        (b"{}", UsageError, "is no evidence bundle"),
        (gzip.compress(b"{}"), ModelFileError, "holds no case"),
        (gzip.compress(b"\xff\xfe"), ModelFileError, "holds no case"),
        (gzip.compress(b"[" * 100_000), ModelFileError, "holds no case"),
        (gzip.compress(whole(format="x")), UsageError, "is no evidence bundle"),
        (gzip.compress(whole(version=2)), UsageError, "version 2"),
        (gzip.compress(whole(cases=[])), ModelFileError, "0 cases"),
        (gzip.compress(whole(cases=[{"target": 1}])), ModelFileError, "holds no case"),
        (gzip.compress(whole())[:-12], ModelFileError, "is damaged"),
        (gzip.compress(whole())[:10] + b"\xff" * 50, ModelFileError, "is damaged"),
    ],
    # What is packed carries the time: as names of the tests it would differ between processes.
    ids=(
        "empty",
        "not packed",
        "no cases",
        "no text",
        "nested",
        "another format",
        "a later version",
        "an empty list",
        "another shape",
        "cut off",
        "broken",
    ),
)
def test_what_a_stranger_sends_ends_in_a_message(
    data: bytes, kind: type[FirstlightError], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(kind, match=words) as caught:
        read_bundle(path)
    assert caught.value.hint
    assert caught.value.exit_code in (2, 3)


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_JSON_BYTES", 1 << 20)
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(b"0" * (64 << 20)))
    with pytest.raises(ModelFileError, match="unpacks to more than 1 MiB"):
        read_bundle(path)
    monkeypatch.setattr(bundle, "MAX_FILE_BYTES", 1000)
    with pytest.raises(ModelFileError, match="is larger than"):
        read_bundle(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_bundle(tmp_path)
