"""`firstlight chat`: a conversation in the terminal with a server that runs already.

Invariant: Ctrl-C during an answer stops that answer and nothing else; what was not answered is not kept in
the conversation.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from firstlight.base.errors import FirstlightError, UsageError, is_text
from firstlight.cli.options import Debug

if TYPE_CHECKING:
    from firstlight.cli.chat_client import ChatClient, Piece
    from firstlight.cli.chat_sampling import Sampling

_HELP = "/reset forgets the conversation, /system TEXT sets the instruction, /quit or Ctrl-D leaves."
_LEAVE = ("/quit", "/exit")
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass
class ChatOptions:
    """What `chat` takes."""

    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, typer.Option(help="Its name on the server. Default: the first one.")] = None
    system: Annotated[str | None, typer.Option(help="Instruction before the conversation.")] = None
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: the model's, or 0.8.")] = (
        None
    )
    top_p: Annotated[
        float | None, typer.Option(help="Nucleus of the sampling. Default: the model's, or 0.95.")
    ] = None
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None
    seed: Annotated[int | None, typer.Option(help="Makes sampled answers repeatable.")] = None
    api_key: Annotated[
        str | None, typer.Option(help="The server's key. Default: the first in FIRSTLIGHT_API_KEY.")
    ] = None
    debug: Debug = False


def chat(options: ChatOptions) -> None:
    """Talk to a running server in this terminal; the answer appears as it is generated.

    With its input from a pipe, each line is a message or a command, and only answers go to
    standard output.

    Sampling that is not given is what the model's generation_config or card says, and otherwise what local
    tools do; the first line says which.

    Examples:
      firstlight chat
      firstlight chat --system "Answer in one sentence." --temperature 0
      firstlight chat --url http://example.org:9000 --model my-model
      echo "What is 2+2?" | firstlight chat
    """
    from firstlight.base import environment
    from firstlight.cli.chat_client import ChatClient
    from firstlight.cli.chat_sampling import choose_sampling

    key = options.api_key or next(iter(environment.api_keys()), None)

    def wait(message: str, seconds: float) -> None:
        print(message, file=sys.stderr)
        time.sleep(seconds)

    with ChatClient(options.url, key, wait) as client:
        model = options.model or client.first_model()
        sampling = choose_sampling(client.about(model), _given(options))
        conversation = Conversation(client, model, options, sys.stdout, sampling)
        if isinstance(sys.stdin, io.TextIOWrapper):  # what is no UTF-8 is refused line by line
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        if sys.stdin.isatty():
            _interactive(conversation)
        else:
            print(conversation.title, file=sys.stderr)
            _from_pipe(conversation, sys.stdin)


def _given(options: ChatOptions) -> dict[str, Any]:
    """What the user asks for, without what was left out."""
    names = ("temperature", "top_p", "max_tokens", "seed")
    return {name: value for name in names if (value := getattr(options, name)) is not None}


class Conversation:
    """The messages so far, and how the next answer is asked for and shown."""

    def __init__(
        self,
        client: ChatClient,
        model: str,
        options: ChatOptions,
        output: TextIO,
        sampling: Sampling | None = None,
    ) -> None:
        self.model = model
        self.system = options.system
        self._client = client
        self._output = output
        self._is_terminal = output.isatty()
        self._messages: list[dict[str, str]] = []
        self._sampling = {**(sampling.fields if sampling is not None else {}), **_given(options)}
        self.title = f"{model}." if sampling is None else f"{model}, sampled {sampling.words}."
        self._thinks = False  # whether what was shown last is reasoning

    def reset(self) -> None:
        """Forget what was said; the instruction stays."""
        self._messages.clear()

    def ask(self, text: str) -> None:
        """Send `text` and show the answer as it comes; both are kept if it arrived."""
        if not is_text(text):
            raise UsageError(
                "this line is not valid UTF-8, so it was not sent.", "Type or pipe text in UTF-8."
            )
        messages = [*self._messages, {"role": "user", "content": text}]
        answer, note = self._stream(messages)
        self._output.write("\n")
        if self._is_terminal and note:
            self._output.write(f"{_DIM}{note}{_PLAIN}\n")
        self._output.flush()
        self._messages = [*messages, {"role": "assistant", "content": answer}]

    def _show(self, piece: Piece) -> None:
        """What the model says; and on a terminal, dimmed, what it thinks before."""
        if piece.reasoning and self._is_terminal:
            self._output.write(f"{_DIM}{piece.reasoning}{_PLAIN}")
            self._thinks = True
        elif piece.text and self._thinks:
            self._output.write("\n\n")
            self._thinks = False
        self._output.write(piece.text)
        self._output.flush()

    def _stream(self, messages: list[dict[str, str]]) -> tuple[str, str]:
        """The answer, and a note on its speed and end."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {"model": self.model, "messages": head + messages, **self._sampling}
        start_s = time.monotonic()
        first_s: float | None = None
        num_tokens, reason, has_thought = 0, "", False
        self._thinks = False
        answer: list[str] = []
        for piece in self._client.stream(body):
            said = piece.text or piece.reasoning
            if said and first_s is None:  # the first piece of many servers carries a role only
                first_s = time.monotonic()
            answer.append(piece.text)
            has_thought = has_thought or bool(piece.reasoning)
            self._show(piece)
            num_tokens = piece.num_tokens or num_tokens
            reason = piece.finish_reason or reason
        if has_thought and not "".join(answer):
            _say_only_thought(is_cut=reason == "length")
        if first_s is None or not num_tokens:
            return "".join(answer), ""
        spent_s = time.monotonic() - first_s
        note = f"{num_tokens} tokens, first after {first_s - start_s:.2f} s"
        if num_tokens > 1 and spent_s > 0:
            note += f", then {(num_tokens - 1) / spent_s:.0f} tokens/s"
        if reason == "length":
            note += ", cut at the token limit"
        return "".join(answer), note


def _say_only_thought(*, is_cut: bool) -> None:
    """Without it an empty line would be all there is to see."""
    remedy = ": raise --max-tokens" if is_cut else ""
    print(f"(the answer ended within its reasoning{remedy})", file=sys.stderr)


def _from_pipe(conversation: Conversation, lines: Iterable[str]) -> None:
    """Each line is a message or a command; an error ends it all, as nobody is there to go on."""
    for line in map(str.strip, lines):
        if line in _LEAVE:
            return
        if _is_command(line):
            print(_command(conversation, line), file=sys.stderr)
        elif line:
            conversation.ask(line)


def _interactive(conversation: Conversation, read: Callable[[str], str] | None = None) -> None:
    if read is None:
        import readline  # noqa: F401  gives `input` line editing and a history

        read = input
    print(f"{conversation.title} {_HELP}")
    while True:
        try:
            text = read("\nyou: ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(" (Ctrl-D leaves)")
            continue
        if text in _LEAVE:
            return
        if text:
            _answer(conversation, text)


def _answer(conversation: Conversation, text: str) -> None:
    """One turn at the terminal: an error or an interrupt ends the turn, not the conversation."""
    if _is_command(text):
        print(_command(conversation, text))
        return
    try:
        conversation.ask(text)
    except KeyboardInterrupt:
        print("\n(stopped)")
    except FirstlightError as error:
        print(f"error: {error.explain()}", file=sys.stderr)


def _is_command(text: str) -> bool:
    """Whether the first word is a slash and letters: /reset, but not /etc/hosts."""
    word = text.split(maxsplit=1)[0] if text else ""
    return word.startswith("/") and word[1:].isalpha()


def _command(conversation: Conversation, text: str) -> str:
    name, *rest = text.split(maxsplit=1)
    if name == "/reset":
        conversation.reset()
        return "(forgotten)"
    if name == "/system":
        conversation.system = rest[0].strip() if rest else None
        return "(instruction set)" if conversation.system else "(instruction removed)"
    return _HELP
