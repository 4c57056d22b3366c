"""The five variables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from firstlight.base import environment
from firstlight.base.errors import UsageError


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (environment.CACHE, environment.API_KEY, environment.XDG_CACHE, environment.XDG_RUNTIME)
    for name in (*names, environment.HUB_OFFLINE):
        monkeypatch.delenv(name, raising=False)


def test_the_cache_is_our_own_variable_then_the_desktop_standard_then_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert environment.cache_directory() == Path.home() / ".cache" / "firstlight"
    monkeypatch.setenv(environment.XDG_CACHE, "/xdg")
    assert environment.cache_directory() == Path("/xdg/firstlight")
    monkeypatch.setenv(environment.CACHE, "/own")
    assert environment.cache_directory() == Path("/own")


def test_a_relative_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.CACHE, "here")
    with pytest.raises(UsageError, match="FIRSTLIGHT_CACHE is 'here'"):
        environment.cache_directory()


def test_several_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.api_keys() == ()
    monkeypatch.setenv(environment.API_KEY, " one, two,,")
    assert environment.api_keys() == ("one", "two")


@pytest.mark.parametrize(("value", "offline"), [("", False), ("0", False), ("1", True), ("TRUE", True)])
def test_offline(monkeypatch: pytest.MonkeyPatch, value: str, offline: bool) -> None:
    monkeypatch.setenv(environment.HUB_OFFLINE, value)
    assert environment.hub_is_offline() is offline


def test_a_bad_value_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.HUB_OFFLINE, "perhaps")
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE"):
        environment.hub_is_offline()


def test_a_runtime_folder_that_does_not_exist_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(environment.XDG_RUNTIME, str(tmp_path / "gone"))
    assert environment.runtime_directory() is None
    monkeypatch.setenv(environment.XDG_RUNTIME, str(tmp_path))
    assert environment.runtime_directory() == tmp_path


def test_children_inherit_with_additions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANY", "old")
    child = environment.child_environment({"ANY": "new", "MORE": "1"})
    assert (child["ANY"], child["MORE"]) == ("new", "1")


def test_what_the_user_has_set_for_a_library_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRSTLIGHT_TEST_ONE", "theirs")
    monkeypatch.setenv("FIRSTLIGHT_TEST_TWO", "to be removed again")
    monkeypatch.delenv("FIRSTLIGHT_TEST_TWO")
    environment.set_for_libraries({"FIRSTLIGHT_TEST_ONE": "ours", "FIRSTLIGHT_TEST_TWO": "ours"})
    assert os.environ["FIRSTLIGHT_TEST_ONE"] == "theirs"
    assert os.environ["FIRSTLIGHT_TEST_TWO"] == "ours"
    del os.environ["FIRSTLIGHT_TEST_TWO"]


def test_systemd_is_told_only_if_it_has_started_us(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.SERVICE_MANAGER:
        monkeypatch.delenv(name, raising=False)
    assert environment.service_manager() is None
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/notify")
    monkeypatch.setenv("WATCHDOG_USEC", "2500000")
    assert environment.service_manager() == ("/run/notify", 2.5)
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert environment.service_manager() == ("/run/notify", 2.5)
    monkeypatch.setenv("WATCHDOG_PID", "1")
    monkeypatch.setenv("NOTIFY_SOCKET", "@abstract")
    assert environment.service_manager() == ("\0abstract", None)
    assert not set(environment.SERVICE_MANAGER) & set(environment.child_environment({}))
    monkeypatch.setenv("NOTIFY_SOCKET", "vsock:2:1")
    assert environment.service_manager() is None
    monkeypatch.delenv("WATCHDOG_PID")
    monkeypatch.setenv("WATCHDOG_USEC", "soon")
    with pytest.raises(UsageError, match="WATCHDOG_USEC is 'soon'"):
        environment.service_manager()


# --- what a container leaves out ---


def test_a_cache_that_cannot_be_written_to_is_read_and_another_place_is_written_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    (home / ".cache" / "firstlight" / "native").mkdir(parents=True)
    there = home / ".cache" / "firstlight" / "native" / "there.so"
    there.touch()
    other.mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(environment, "private_directory", lambda: other)
    monkeypatch.setattr(environment, "_can_be_made", lambda folder: not folder.is_relative_to(home))
    assert environment.cache_place("native", "there.so") == there
    assert environment.cache_place("native", "new.so") == other / ".cache/firstlight/native/new.so"
    monkeypatch.setenv(environment.CACHE, str(home / "named"))  # who names a place hears that it is none
    assert environment.cache_place("new") == home / "named" / "new"


def test_a_private_folder_is_ours_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "temporary_directories", lambda: (tmp_path,))
    folder = environment.private_directory()
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert environment.private_directory() == folder
    folder.chmod(0o777)
    assert environment.private_directory() is None
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert environment.private_directory() is None


def test_proxies_are_told_without_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", "socks5://me:secret@far:1080")
    monkeypatch.setenv("http_proxy", "far:3128")
    assert environment.proxies() == {"ALL_PROXY": "socks5", "http_proxy": "http"}
