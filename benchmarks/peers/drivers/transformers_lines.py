"""transformers' generate() in this process, driven by JSON lines: MODEL-FOLDER THREADS.

Started by `peers.subjects` with the interpreter of the test environment. Invariant: what runs together is one
static batch of prompts of equal length, and every request gets all the tokens that were asked for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import lines

ANSWERS = lines.open_answers()

import torch  # noqa: E402
import transformers  # noqa: E402


def open_model(folder: str) -> Any:
    """In bfloat16 only where the processor multiplies it."""
    has_bfloat16 = torch.cpu._is_avx512_bf16_supported()
    dtype = torch.bfloat16 if has_bfloat16 else torch.float32
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


class Watch(transformers.StoppingCriteria):
    """Is called after each token of the batch."""

    def __init__(self, on_token: Callable[[], None]) -> None:
        self._on_token = on_token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self._on_token()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def main() -> None:
    torch.set_num_threads(int(sys.argv[2]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
    model = open_model(sys.argv[1])
    end_ids, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def complete(prompts: list[list[int]], num_new: int, concurrency: int) -> tuple[float, list[lines.Timed]]:
        timed: list[lines.Timed] = []
        start_s = time.perf_counter()
        for first in range(0, len(prompts), concurrency):
            batch = torch.tensor(prompts[first : first + concurrency])
            times_s: list[float] = []
            batch_start_s = time.perf_counter()
            watch = Watch(lambda times_s=times_s: times_s.append(time.perf_counter()))
            model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=False,
                max_new_tokens=num_new,
                stopping_criteria=transformers.StoppingCriteriaList([watch]),
            )
            one = (times_s[0] - batch_start_s, times_s[-1] - batch_start_s, len(times_s))
            timed += [one] * len(batch)
        return time.perf_counter() - start_s, timed

    @torch.inference_mode()
    def chat(question: str, num_new: int) -> str:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        out = model.generate(ids, do_sample=False, max_new_tokens=num_new, eos_token_id=end_ids)
        return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    complete([[504, 3575, 282, 4649, 314]], 1, 1)
    lines.serve(ANSWERS, complete, chat)


main()
