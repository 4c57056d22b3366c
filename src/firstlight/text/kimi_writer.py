"""The text files of a small model in the shape of Kimi: ranks, special tokens, chat template.

Invariant: names and order of the special tokens are the publisher's, the ids counted from the end of the
(few) ranks; the template is our own, in the publisher's markup.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from firstlight.facts.hf.hf_ends import TOKENIZER_CLASS
from firstlight.text.kimi import RANKS_FILE, SPLIT
from firstlight.text.tiktoken_ranks import write_ranks
from firstlight.text.vocabulary import byte_alphabet

NUM_RANKS = 512  # the bytes, and as many joined ones; with the reserved ids 768 in all
# By their place behind the ranks. Markup of tool calls and reasoning is not "special": it stays in the text.
_SPECIAL = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    254: "[UNK]",
    255: "[PAD]",
}
_MARKUP = {
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    22: "<think>",
    23: "</think>",
}
# What the joined ranks are learned from: a little of all that a chat is made of.
_SAMPLE = """
The quick brown fox jumps over the lazy dog. Why is the sky blue? Because the air scatters short waves more
than long ones, and that is what we see. I think that there is more to say about the weather in the city.
You are a helpful assistant. Please answer the question with the tools that you have, and then say what you
found. It isn't what they're after; we'll see what's there and I'd say that you've done it.
def add(first, second): return first + second  # the sum of two numbers
{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome", "unit": "celsius"}}}
天空为什么是蓝色的？因为空气散射短波比长波多。你好，世界！今天天气怎么样？我们一起去看看吧。
0 1 2 3 4 5 6 7 8 9 10 100 1000 2024 2025 2026
"""
_TEMPLATE = """\
{%- macro begin(message) -%}
{%- set kind = message.role if message.role in ('user', 'assistant') else 'system' -%}
<|im_{{ kind }}|>{{ message.name or message.role }}<|im_middle|>
{%- endmacro -%}
{%- macro calls(message) -%}
<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{%- set given = call.function.arguments -%}
{{ given if given is string else given | tojson }}<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endmacro -%}
{#- Reasoning is kept in the turns behind the last answer that called nothing. -#}
{%- set last = namespace(answer=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' and not message.tool_calls -%}
{%- set last.answer = loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- set thinks = thinking is not defined or thinking -%}
{%- if tools -%}
<|im_system|>tool_declare<|im_middle|>
{{- tools_ts_str if tools_ts_str else tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- if messages and messages[0].role != 'system' -%}
<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>
{%- endif -%}
{%- for message in messages -%}
{{ begin(message) }}
{%- if message.role == 'assistant' -%}
<think>{{ message.reasoning_content if thinks and loop.index0 > last.answer }}</think>{{ message.content }}
{%- if message.tool_calls -%}{{ calls(message) }}{%- endif -%}
{%- elif message.role == 'tool' -%}
{{ '## Return of ' ~ message.tool_call_id ~ '\\n' ~ message.content }}
{%- else -%}
{{ message.content }}
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|><think>{{ '' if thinks else '</think>' }}
{%- endif -%}
"""


def write_kimi_text(folder: Path) -> None:
    """Writes tiktoken.model, tokenizer_config.json and chat_template.jinja into the folder."""
    write_ranks(folder / RANKS_FILE, _ranks())
    config = json.dumps(_config(NUM_RANKS), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")


def _ranks() -> list[bytes]:
    """The bytes, and what byte-pair merging of the sample joins first; always the same."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(SPLIT)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = byte_alphabet()
    trainer = trainers.BpeTrainer(vocab_size=NUM_RANKS, initial_alphabet=list(alphabet), show_progress=False)
    tokenizer.train_from_iterator([_SAMPLE], trainer)
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [bytes(map(alphabet.__getitem__, text)) for text, _ in by_id]


def _config(num_ranks: int) -> dict[str, Any]:
    named = {place: (text, True) for place, text in _SPECIAL.items()}
    named |= {place: (text, False) for place, text in _MARKUP.items()}
    added = {
        str(num_ranks + place): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": special,
        }
        for place, (text, special) in sorted(named.items())
    }
    return {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": [f"tokenization_kimi.{TOKENIZER_CLASS}", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1000000000000000019884624838656,
        "tokenizer_class": TOKENIZER_CLASS,
    }
