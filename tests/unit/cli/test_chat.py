"""The chat client against a server that exists only as a transport, and the conversation on top."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import httpx
import pytest

from firstlight.base.errors import EngineError, ResourceError, UsageError
from firstlight.bench.serving.http_client import HttpClient
from firstlight.cli.chat import ChatOptions, Conversation, _from_pipe, _interactive
from firstlight.cli.chat_client import ChatClient
from firstlight.cli.chat_sampling import Known, choose_sampling

Handler = Callable[[httpx.Request], httpx.Response]


def client(
    handler: Handler, waits: list[tuple[str, float]] | None = None, key: str | None = None
) -> ChatClient:
    noted = waits if waits is not None else []
    return ChatClient(
        "http://server/v1/", key, lambda text, s: noted.append((text, s)), httpx.MockTransport(handler)
    )


def events(*payloads: object) -> bytes:
    return b"".join(f"data: {p if isinstance(p, str) else json.dumps(p)}\n\n".encode() for p in payloads)


def delta(text: str, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


def error(status: int, message: str, headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message}}, headers=headers)


class EchoServer:
    """Answers each request with the number of messages that it carried, in two pieces."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        usage = {"choices": [], "usage": {"completion_tokens": 2}}
        return httpx.Response(
            200,
            content=events(delta("got "), delta(str(len(body["messages"])), "stop"), usage, "[DONE]"),
            headers={"content-type": "text/event-stream"},
        )


def test_pieces_arrive_in_order_with_reason_and_count() -> None:
    with client(EchoServer()) as chat:
        pieces = list(chat.stream({"model": "m", "messages": [{}]}))
    assert "".join(piece.text for piece in pieces) == "got 1"
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]
    assert pieces[-1].num_tokens == 2


def test_reasoning_is_shown_on_a_terminal_only_and_not_sent_back() -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        thought = [{"choices": [{"delta": {name: "Hm."}}]} for name in ("reasoning_content", "reasoning")]
        return httpx.Response(200, content=events(*thought, delta("Hello.", "stop"), "[DONE]"))

    for output in (Terminal(), io.StringIO()):
        is_terminal = output.isatty()
        with client(answer) as chat:
            conversation = Conversation(chat, "m", ChatOptions(), output)
            conversation.ask("Hi")
            shown = output.getvalue()
            assert shown.count("Hm.") == (2 if is_terminal else 0)
            assert shown.rstrip().endswith("Hello.")
            assert ("\n\nHello." in shown) is is_terminal
            assert conversation._messages[-1] == {"role": "assistant", "content": "Hello."}


@pytest.mark.parametrize(("reason", "remedy"), [("length", ": raise --max-tokens"), ("stop", "")])
def test_an_answer_that_is_all_reasoning_is_said(
    reason: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        thought = {"choices": [{"delta": {"reasoning_content": "Hm."}, "finish_reason": reason}]}
        return httpx.Response(200, content=events(thought, "[DONE]"))

    output = io.StringIO()
    with client(answer) as chat:
        Conversation(chat, "m", ChatOptions(), output).ask("Hi")
    assert output.getvalue() == "\n"
    assert capsys.readouterr().err == f"(the answer ended within its reasoning{remedy})\n"


def test_the_first_line_says_what_is_sampled_with(capsys: pytest.CaptureFixture[str]) -> None:
    server = EchoServer()
    sampling = choose_sampling(Known(("SmolLM2-135M-Instruct",)), {})
    typed = iter(["Hi", "/quit"])
    with client(server) as chat:
        conversation = Conversation(chat, "m", ChatOptions(), io.StringIO(), sampling)
        _interactive(conversation, lambda _: next(typed))
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("m, sampled with temperature 0.2, top_p 0.9 (as the model's card says). ")
    assert (server.bodies[0]["temperature"], server.bodies[0]["top_p"]) == (0.2, 0.9)


def test_a_server_that_starts_is_waited_for() -> None:
    answers = [
        error(503, "weights 10 of 30", {"Retry-After": "2"}),
        httpx.Response(200, json={"data": [{"id": "m"}]}),
    ]
    waits: list[tuple[str, float]] = []
    with client(lambda _: answers.pop(0), waits) as chat:
        assert chat.first_model() == "m"
    assert waits == [("weights 10 of 30", 2.0)]


def test_the_key_is_sent_and_a_wrong_one_explained() -> None:
    def check(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer k"
        return error(401, "wrong key")

    with client(check, key="k") as chat, pytest.raises(UsageError, match="wrong key") as caught:
        chat.first_model()
    assert "FIRSTLIGHT_API_KEY" in caught.value.hint


def test_no_server_says_how_to_start_one() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with client(refuse) as chat, pytest.raises(ResourceError, match="http://server: refused") as caught:
        chat.first_model()
    assert "firstlight serve" in caught.value.hint


@pytest.mark.parametrize(
    "answer", [httpx.Response(200, text="<html>"), httpx.Response(200, json={"data": []})]
)
def test_another_kind_of_server_is_recognised(answer: httpx.Response) -> None:
    with client(lambda _: answer) as chat, pytest.raises(UsageError, match="not like an OpenAI"):
        chat.first_model()


def test_a_refusal_before_and_an_error_within_the_stream() -> None:
    with (
        client(lambda _: error(400, "prompt too long")) as chat,
        pytest.raises(UsageError, match="prompt too long"),
    ):
        list(chat.stream({}))
    broken = httpx.Response(200, content=events(delta("a"), {"error": {"message": "rank 0 died"}}))
    with client(lambda _: broken) as chat, pytest.raises(EngineError, match="rank 0 died"):
        list(chat.stream({}))


def test_a_conversation_carries_its_messages_and_forgets_on_demand() -> None:
    server, output = EchoServer(), io.StringIO()
    with client(server) as chat:
        conversation = Conversation(chat, "m", ChatOptions(system="be brief", temperature=0.0), output)
        conversation.ask("one")
        conversation.ask("two")
        conversation.reset()
        conversation.ask("three")
    assert output.getvalue() == "got 2\ngot 4\ngot 2\n"
    assert server.bodies[1]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "got 2"},
        {"role": "user", "content": "two"},
    ]
    assert server.bodies[0]["temperature"] == 0.0
    assert "top_p" not in server.bodies[0]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_speed_is_counted_from_the_first_text_and_not_from_a_role(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([10.0, 12.0, 14.0])
    monkeypatch.setattr("firstlight.cli.chat.time.monotonic", lambda: next(clock))
    usage = {"choices": [], "usage": {"completion_tokens": 5}}
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    answer = httpx.Response(200, content=events(role, delta("a"), delta("b", "length"), usage))
    output = Terminal()
    with client(lambda _: answer) as chat:
        Conversation(chat, "m", ChatOptions(), output).ask("hello")
    note = "5 tokens, first after 2.00 s, then 2 tokens/s, cut at the token limit"
    assert output.getvalue() == f"ab\n\x1b[2m{note}\x1b[0m\n"


def test_the_prompt_loop(capsys: pytest.CaptureFixture[str]) -> None:
    server = EchoServer()
    typed = iter(["", "hello", "/system be brief", "/reset", "again", "/what", "/quit", "never read"])
    with client(server) as chat:
        _interactive(Conversation(chat, "m", ChatOptions(), io.StringIO()), lambda _: next(typed))
    assert [len(body["messages"]) for body in server.bodies] == [1, 2]  # type: ignore[arg-type]
    assert "(forgotten)" in capsys.readouterr().out
    assert next(typed) == "never read"


def test_an_error_ends_the_turn_and_not_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    typed = iter(["hello"])

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    with client(lambda _: error(400, "no")) as chat:
        _interactive(Conversation(chat, "m", ChatOptions(), io.StringIO()), read)
    assert "the server refused (400): no" in capsys.readouterr().err


def test_commands_work_from_a_pipe_and_are_not_answered(capsys: pytest.CaptureFixture[str]) -> None:
    server, output = EchoServer(), io.StringIO()
    lines = ["hello\n", "\n", "/system be brief\n", "/reset\n", "again\r\n", "/what\n", "/quit\n", "never\n"]
    with client(server) as chat:
        _from_pipe(Conversation(chat, "m", ChatOptions(), output), iter(lines))
    assert [body["messages"][-1] for body in server.bodies] == [  # type: ignore[index]
        {"role": "user", "content": "hello"},
        {"role": "user", "content": "again"},
    ]
    assert [len(body["messages"]) for body in server.bodies] == [1, 2]  # type: ignore[arg-type]
    assert output.getvalue() == "got 1\ngot 2\n"
    said = capsys.readouterr()
    assert said.out == ""
    assert "(instruction set)\n(forgotten)\n/reset forgets" in said.err


def test_a_path_is_no_command() -> None:
    server = EchoServer()
    with client(server) as chat:
        _from_pipe(Conversation(chat, "m", ChatOptions(), io.StringIO()), ["/etc/hosts is what?", "/ or \\?"])
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    "url", ["notaurl", "localhost:8000", "ftp://server", "http://", "http://[::", "http://x:y"]
)
def test_what_is_no_address_is_refused_before_anything_is_sent(url: str) -> None:
    for make in (lambda: ChatClient(url, None, lambda *_: None), lambda: HttpClient(url)):
        with pytest.raises(UsageError, match="not the address of a server") as caught:
            make()
        assert "http://" in caught.value.hint
