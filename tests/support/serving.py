"""The real server over a tiny random model, for tests that talk to it as a client would.

`write_chat_model` makes a model of a few hundred kilobytes that has a tokenizer and a chat template;
`RunningServer` runs `firstlight serve` on it in a process of its own. Invariant: leaving the `with` block
stops the server, and a server that does not become ready fails with all that it printed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from support.checkpoints import random_weights, tiny_description, write_gguf, write_hf_folder

READY_DEADLINE_S = 90.0
STOP_DEADLINE_S = 30.0
_SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
_MERGE = ("Ġ", "Ġ")  # two spaces: a tokenizer without any merge is none to some readers
_ALPHABET = (*sorted(pre_tokenizers.ByteLevel.alphabet()), "".join(_MERGE))
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_chat_model(folder: Path, architecture: str = "llama", max_position: int = 512) -> Path:
    """A Hugging Face folder with random weights, a byte tokenizer and a chat template."""
    tokenizer = byte_tokenizer()
    description = tiny_description(
        architecture, vocab_size=tokenizer.get_vocab_size(), max_position=max_position, eos_token_ids=(2,)
    )
    write_hf_folder(folder, description, random_weights(description))
    write_tokenizer(folder, tokenizer)
    return folder


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """The tokenizer with its chat template, beside a model."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_chat_gguf(path: Path, architecture: str = "llama", max_position: int = 512) -> Path:
    """The same model as a GGUF file."""
    tokens = [*_SPECIAL, *_ALPHABET]
    description = tiny_description(
        architecture, vocab_size=len(tokens), max_position=max_position, eos_token_ids=(2,)
    )

    def give_tokens(writer: gguf.GGUFWriter) -> None:
        for key in ("tokens", "token_type", "merges"):
            del writer.kv_data[0][f"tokenizer.ggml.{key}"]
        del writer.kv_data[0]["tokenizer.chat_template"]
        writer.add_token_list(tokens)
        writer.add_token_types([3] * len(_SPECIAL) + [1] * len(_ALPHABET))
        writer.add_token_merges([" ".join(_MERGE)])
        writer.add_chat_template(_TEMPLATE)

    return write_gguf(path, description, random_weights(description), edit=give_tokens)


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, after the special ones: every text can be written."""
    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *_ALPHABET))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[_MERGE]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return tokenizer


class RunningServer:
    """`firstlight serve MODEL FLAGS` on a free port; without a model, the embedded one.

    `url` has no "/v1"; `lines` is what it has printed.
    """

    def __init__(self, model: Path | str | None, *flags: str) -> None:
        where = () if "--uds" in flags else ("--port", "0")
        named = () if model is None else (str(model),)
        command = [sys.executable, "-m", "firstlight", "serve", *named, *where, *flags]
        self.started_s = time.monotonic()
        self.ready_s = 0.0
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=dict(os.environ)
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.wait_for(r"listening on (\S+);").group(1)

    @property
    def pid(self) -> int:
        """The launcher's process id."""
        return self._process.pid

    def __enter__(self) -> Self:
        try:
            self.wait_for(r"^ready in")
        except BaseException:
            self.kill()
            raise
        self.ready_s = time.monotonic() - self.started_s
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.stop()
        self.kill()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first printed line that matches; fails when the server ends before, or at the deadline."""
        deadline_s = time.monotonic() + READY_DEADLINE_S
        seen = 0
        while True:
            has_ended = not self._reader.is_alive()
            for line in self.lines[seen:]:
                seen += 1
                if match := re.search(pattern, line):
                    return match
            if has_ended or time.monotonic() > deadline_s:
                output = "\n".join(self.lines)
                raise AssertionError(f"the server did not say {pattern!r}; it said:\n{output}")
            time.sleep(0.01)

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Ask it to stop; its exit code."""
        self._process.send_signal(signal_number)
        return self.wait()

    def wait(self) -> int:
        """Its exit code, once it has ended by itself."""
        code = self._process.wait(STOP_DEADLINE_S)
        self._reader.join(STOP_DEADLINE_S)
        return code

    def kill(self) -> None:
        """End it, if it still runs; its children go with it."""
        self._process.kill()
        self._process.wait()
        self._reader.join(STOP_DEADLINE_S)
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line.rstrip("\n"))
