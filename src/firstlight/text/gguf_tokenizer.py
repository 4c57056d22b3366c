"""The tokenizer inside a GGUF file, as a `tokenizers.Tokenizer`.

Two families: byte-level BPE (tokenizer.ggml.model "gpt2") and SentencePiece BPE with scores ("llama").
Invariant: token ids are the positions in tokenizer.ggml.tokens, so that they are rows of the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from firstlight.base.errors import ModelFileError, UnsupportedError

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"
_DAMAGED = "Download or convert the file again; it may be damaged."
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What llama.cpp does with a file that states no split or "default": four splits, one after the other.
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


def build_tokenizer(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer that `metadata` of the file `where` describes.

    Raises `UnsupportedError` for families and splits that are not known, `ModelFileError` for contradictions.
    """
    family = metadata.get("tokenizer.ggml.model")
    if family is None:
        raise ModelFileError(
            f"{where} holds no tokenizer (tokenizer.ggml.model is missing).",
            "Use a GGUF file of the whole model, not of a part such as a projector or an adapter.",
        )
    if family == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, where)
    elif family == "llama":
        tokenizer, adds_bos = _sentence_piece(metadata, where)
    else:
        raise UnsupportedError(
            f"{where}: the tokenizer family {family!r} (tokenizer.ggml.model) is not supported.",
            "Supported are gpt2 (byte-level BPE) and llama (SentencePiece).",
        )
    _add_tokens(tokenizer, metadata, where)
    _add_ends(tokenizer, metadata, adds_bos, where)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], where: str) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    split = SPLITS.get(name)
    if split is None:
        raise UnsupportedError(
            f"{where}: the pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported.",
            f"Supported are {', '.join(sorted(SPLITS))}.",
        )
    merges = [_pair(merge, where) for merge in _strings(metadata, "tokenizer.ggml.merges", where)]
    try:
        model = models.BPE(vocab=_vocabulary(metadata, where), merges=merges, ignore_merges=split.whole_words)
    except Exception as error:
        raise ModelFileError(
            f"{where}: the tokenizer's merges contradict its tokens: {error}", _DAMAGED
        ) from error
    tokenizer = Tokenizer(model)
    if split.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split.make()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.adds_bos


def _sentence_piece(metadata: Mapping[str, Any], where: str) -> tuple[Tokenizer, bool]:
    vocabulary = _vocabulary(metadata, where)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokens = _strings(metadata, "tokenizer.ggml.tokens", where)
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges_from_scores(vocabulary, metadata, where),
        unk_token=tokens[unknown] if isinstance(unknown, int) and unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *steps] if prefix else steps)
    parts: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return tokenizer, True


def _merges_from_scores(
    vocabulary: dict[str, int], metadata: Mapping[str, Any], where: str
) -> list[tuple[str, str]]:
    """SentencePiece joins the pair with the best score; as a list of merges, that is best score first."""
    kinds = metadata.get("tokenizer.ggml.token_type")
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) < len(vocabulary):
        raise ModelFileError(
            f"{where}: tokenizer.ggml.scores is missing or shorter than the vocabulary.", _DAMAGED
        )
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in vocabulary.items():
        if kinds is not None and index < len(kinds) and kinds[index] in (_UNKNOWN, _CONTROL):
            continue  # "</s>" is never put together from pieces of text
        score = -float(scores[index])
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((score, vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any], where: str) -> None:
    """Control tokens are special, user-defined ones are matched whole but kept in the text."""
    tokens = _strings(metadata, "tokenizer.ggml.tokens", where)
    kinds = metadata.get("tokenizer.ggml.token_type")
    if kinds is None:
        return
    control = [index for index, kind in enumerate(kinds) if kind in (_UNKNOWN, _CONTROL)]
    defined = [index for index, kind in enumerate(kinds) if kind == _USER_DEFINED]
    if max([*control, *defined], default=0) >= len(tokens):
        raise ModelFileError(f"{where}: tokenizer.ggml.token_type is longer than the vocabulary.", _DAMAGED)
    tokenizer.add_special_tokens([AddedToken(tokens[i], normalized=False, special=True) for i in control])
    tokenizer.add_tokens([AddedToken(tokens[i], normalized=False, special=False) for i in defined])


def _add_ends(tokenizer: Tokenizer, metadata: Mapping[str, Any], adds_bos: bool, where: str) -> None:
    """Tokens that the file wants around every text."""
    tokens = _strings(metadata, "tokenizer.ggml.tokens", where)
    ends: list[tuple[str, int]] = []
    for name, default in (("bos", adds_bos), ("eos", False)):
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        wanted = bool(metadata.get(f"tokenizer.ggml.add_{name}_token", default))
        ends.append((tokens[index], index) if wanted and isinstance(index, int) else ("", -1))
    (bos, bos_id), (eos, eos_id) = ends
    if bos or eos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
            pair=[*([bos] if bos else []), "$A", "$B", *([eos] if eos else [])],
            special_tokens=[(text, index) for text, index in ((bos, bos_id), (eos, eos_id)) if text],
        )


def _vocabulary(metadata: Mapping[str, Any], where: str) -> dict[str, int]:
    tokens = _strings(metadata, "tokenizer.ggml.tokens", where)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelFileError(
            f"{where}: {len(tokens) - len(vocabulary)} tokens of the vocabulary are repeated.", _DAMAGED
        )
    return vocabulary


def _strings(metadata: Mapping[str, Any], key: str, where: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value:
        raise ModelFileError(f"{where}: {key} is missing or not a list of strings.", _DAMAGED)
    return value


def _pair(merge: str, where: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise ModelFileError(f"{where}: the merge {merge!r} is not a pair.", _DAMAGED)
    return left, right


# How text is split before byte-pair merging, by the name that a GGUF file states in tokenizer.ggml.pre. The
# patterns are those of the models' published tokenizers. A name that is not in the table is refused, as a
# wrong split changes token ids without any other sign.


@dataclass(frozen=True)
class Split:
    """One way of splitting. `whole_words`: a word that is a token as it stands is not merged again."""

    make: Callable[[], pre_tokenizers.PreTokenizer]
    whole_words: bool = False
    adds_bos: bool = False  # unless the file says otherwise
    composes: bool = False  # Unicode NFC before splitting


def _patterns(*patterns: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def make() -> pre_tokenizers.PreTokenizer:
        splits: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns
        ]
        return pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    return make


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_LLAMA3_SPLIT = Split(_patterns(_LLAMA3), whole_words=True, adds_bos=True)
_QWEN2_SPLIT = Split(_patterns(_QWEN2), composes=True)

SPLITS: dict[str, Split] = {
    "default": Split(_patterns(*_DEFAULT)),
    "gpt-2": Split(_gpt2),
    "phi-2": Split(_gpt2),
    "smollm": Split(_single_digits),
    "starcoder": Split(_single_digits),
    "refact": Split(_single_digits),
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "tekken": Split(_patterns(_TEKKEN), whole_words=True, adds_bos=True),
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
}
