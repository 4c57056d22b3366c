"""The tokenizer inside a GGUF file, as a `tokenizers.Tokenizer`.

Called by `text.model` and, for tokenizer.json, by `firstlight convert`. Two families: byte-level BPE
(tokenizer.ggml.model "gpt2") and SentencePiece BPE with scores ("llama"). Invariant: token ids are the
positions in tokenizer.ggml.tokens, so that they are rows of the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from firstlight.base.errors import ModelFileError, UnsupportedError
from firstlight.text.pretokenizers import SPLITS

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"
_DAMAGED = "Download or convert the file again; it may be damaged."


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
    except Exception as error:  # noqa: BLE001 - the bindings raise plain Exception for a bad merge
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
