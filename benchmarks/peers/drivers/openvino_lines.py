"""OpenVINO GenAI's continuous batching in this process, driven by JSON lines.

Started by `peers.subjects` with the interpreter of OpenVINO's own environment: MODEL TOKENIZER-FOLDER
PRECISION THREADS KV-TOKENS SEQUENCES. Invariant: prompts are token ids as they come, and every request gets
all the tokens that were asked for.
"""

from __future__ import annotations

import sys
import time

import lines

ANSWERS = lines.open_answers()

import numpy  # noqa: E402
import openvino  # noqa: E402
import openvino_genai as genai  # noqa: E402

KV_BLOCK = 32  # tokens in a block of the KV cache on a CPU
MODEL, FOLDER, PRECISION = sys.argv[1:4]
THREADS, KV_TOKENS, SEQUENCES = map(int, sys.argv[4:7])


def open_pipeline() -> genai.ContinuousBatchingPipeline:
    """With prefix caching off: no prompt comes twice."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 0
    scheduler.num_kv_blocks = KV_TOKENS // KV_BLOCK
    scheduler.max_num_seqs = SEQUENCES
    scheduler.max_num_batched_tokens = 512
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_PRECISION_HINT": PRECISION, "INFERENCE_NUM_THREADS": THREADS}
    return genai.ContinuousBatchingPipeline(MODEL, scheduler, "CPU", properties)


def greedy(num_new: int, *, full_length: bool) -> genai.GenerationConfig:
    """`full_length`: an end token ends nothing."""
    config = genai.GenerationConfig()
    config.do_sample = False
    config.max_new_tokens = num_new
    config.ignore_eos = full_length
    return config


def main() -> None:
    pipeline = open_pipeline()
    numbers = iter(range(1, 1_000_000_000))

    def complete(prompts: list[list[int]], num_new: int, concurrency: int) -> tuple[float, list[lines.Timed]]:
        waiting, running, timed = list(prompts), [], []
        start_s = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < concurrency:
                ids = openvino.Tensor(numpy.array([waiting.pop(0)], dtype=numpy.int64))
                handle = pipeline.add_request(next(numbers), ids, greedy(num_new, full_length=True))
                running.append([handle, time.perf_counter(), None, 0])
            pipeline.step()
            now_s = time.perf_counter()
            for request in list(running):
                handle = request[0]
                while handle.can_read():
                    request[3] += sum(len(output.generated_ids) for output in handle.read().values())
                    request[2] = request[2] or now_s
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    running.remove(request)
                    timed.append((request[2] - request[1], now_s - request[1], request[3]))
        return time.perf_counter() - start_s, timed

    def chat(question: str, num_new: int) -> str:
        history = genai.ChatHistory([{"role": "user", "content": question}])
        text = pipeline.get_tokenizer().apply_chat_template(history, add_generation_prompt=True)
        return str(pipeline.generate(text, greedy(num_new, full_length=False))[0].m_generation_ids[0])

    complete([[504, 3575, 282, 4649, 314]], 1, 1)
    lines.serve(ANSWERS, complete, chat)


main()
