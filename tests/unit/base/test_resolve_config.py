"""From flags and a file to sections, with reasons and clear refusals."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.base.config import GIVES_WAY, EngineSection, ModelSection, ServerSection
from firstlight.base.errors import UsageError
from firstlight.base.resolve_config import Given, located, parse_size, read_toml, resolve
from firstlight.base.settings import ALL_SETTINGS, NOT_SETTINGS, SECTIONS


def flags(**values: object) -> Given:
    return Given({name.replace("_", "-"): value for name, value in values.items()}, "the flags")


def toml(tmp_path: Path, text: str) -> Given:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return read_toml(path)


def test_every_field_has_one_setting() -> None:
    fields = {(name, f.name) for name, kind in SECTIONS.items() for f in msgspec.structs.fields(kind)}
    settings_of = [(setting.section, setting.field) for setting in ALL_SETTINGS]
    assert len(settings_of) == len(set(settings_of))
    assert fields - set(settings_of) == NOT_SETTINGS
    assert len({setting.name for setting in ALL_SETTINGS}) == len(ALL_SETTINGS)


def test_nothing_given_is_the_defaults() -> None:
    resolved = resolve([], cores=4)
    assert resolved.server == ServerSection()
    assert resolved.engine == EngineSection(threads=4, shrinks=GIVES_WAY)
    assert [(r.name, r.value) for r in resolved.reasons] == [("threads", 4)]


def test_a_flag_beats_the_file_and_the_file_beats_the_default(tmp_path: Path) -> None:
    file = toml(tmp_path, 'port = 9000\nhost = "0.0.0.0"\n[engine]\nmax-num-seqs = 8\n')
    resolved = resolve([flags(port=9001), file], cores=1)
    assert (resolved.server.port, resolved.server.host, resolved.engine.max_num_seqs) == (9001, "0.0.0.0", 8)
    why = {reason.name: reason.why for reason in resolved.reasons}
    assert why["port"] == "given in the flags"
    assert why["host"].endswith("run.toml")


def test_false_in_a_flag_beats_true_in_the_file(tmp_path: Path) -> None:
    file = toml(tmp_path, "prefix-cache = true")
    assert resolve([flags(prefix_cache=False), file], cores=1).engine.prefix_cache is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "unknown key 'prot'"),
        ("[engine]\nport = 1", r"\[engine\].* unknown key 'port'"),
        ("[motor]\nport = 1", r"unknown table \[motor\]"),
        ("port = ", "not valid TOML"),
        ('port = "many"', "must be a whole number"),
        ("port = 1.5", "must be a whole number"),
        ("port = 70000", "at most 65535"),
        ("prefix-cache = 1", "must be true or false"),
        ("memory-fraction = nan", "at least 0.05"),
        ('device = "tpu"', "one of cpu, cuda"),
        ('kv-memory = "plenty"', "must be a size"),
        ('kv-memory = "-1G"', "must be a size"),
        ("kv-memory = -1", "at least 0"),
        ("served-name = 3", "must be text"),
        ('tls-cert = "a.pem"', "both --tls-cert and --tls-key"),
        ('uds = "/run/s"\nport = 1', "do not apply"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve([toml(tmp_path, text)], cores=1)


def test_a_near_miss_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        toml(tmp_path, "max_num_seqs = 3")
    assert caught.value.hint == "Did you mean 'max-num-seqs'?"


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_toml(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("ranks", "cores", "threads", "slow"),
    [(1, 8, 8, False), (2, 8, 4, False), (3, 8, 2, False), (4, 2, 1, True)],
)
def test_cores_are_divided_by_the_ranks(ranks: int, cores: int, threads: int, slow: bool) -> None:
    resolved = resolve([flags(tensor_parallel=ranks)], cores)
    assert resolved.engine.threads == threads
    assert ("slower" in resolved.reasons[-1].why) == slow


def test_threads_that_were_given_stay_but_are_commented_on() -> None:
    resolved = resolve([flags(threads=8)], cores=2)
    assert resolved.engine.threads == 8
    assert "more threads than cores" in resolved.reasons[-1].why
    assert [reason.name for reason in resolved.reasons] == ["threads"]


@pytest.mark.parametrize(
    ("asked", "path", "name"),
    [
        (None, "/cache/tiny.Q4_1.gguf", "tiny"),
        ("models/a.gguf", "/here/models/a.gguf", "a"),
        ("org/folder", "/here/org/folder", "folder"),
        ("./folder/", "/here/folder/", "folder"),
        ("org/model-1B", "/cache/hub/snapshots/abc", "org/model-1B"),
    ],
)
def test_the_served_name(asked: str | None, path: str, name: str) -> None:
    section = located(ModelSection(path="", served_names=()), asked, Path(path), "tiny")
    assert section.served_names == (name,)
    assert section.path == str(Path(path))


def test_a_given_name_is_kept() -> None:
    section = located(ModelSection(path="", served_names=("x", "y")), "a.gguf", Path("a.gguf"), "tiny")
    assert section.served_names == ("x", "y")


@pytest.mark.parametrize(
    ("text", "size"),
    [("512M", 2**29), ("2G", 2**31), ("2GiB", 2**31), ("1.5k", 1536), ("77", 77), (5, 5), ("0", 0)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@settings(max_examples=200)
@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_size(text) >= 0


def test_more_threads_than_cores_is_doubtful_and_an_empty_text_an_error() -> None:
    found = resolve([Given({"threads": 9}, "the flags")], cores=2)
    assert [reason.name for reason in found.reasons if reason.is_doubtful] == ["threads"]
    assert not any(reason.is_doubtful for reason in resolve([], cores=2).reasons)
    for name in ("served-name", "host", "chat-template"):
        with pytest.raises(UsageError, match="must not be empty"):
            resolve([Given({name: ""}, "the flags")], cores=2)
