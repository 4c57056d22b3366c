"""Whether a model that says that its ends are tied has an output head of its own all the same.

transformers compares `lm_head.weight` with the embedding and ties them only where they are equal; so do we.
Invariant: both are read at most once, in pieces, and only where both are there.
"""

from __future__ import annotations

import os
from dataclasses import replace

from msgspec import structs

from firstlight.base.errors import ModelFileError, why_unreadable
from firstlight.facts.checkpoint.checkpoint import Checkpoint, TensorFacts
from firstlight.facts.checkpoint.remedies import CHECK_FILE

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PIECE_BYTES = 8 * 1024 * 1024


def settle_ties(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as it is served: not tied, and with a note, where the head differs from the embedding.

    Raises `ModelFileError` where a file cannot be read.
    """
    embedding, head = checkpoint.tensors.get(EMBEDDING), checkpoint.tensors.get(HEAD)
    if not checkpoint.description.tie_embeddings or embedding is None or head is None:
        return checkpoint
    if _are_equal(embedding, head):
        return checkpoint
    note = (
        f"{HEAD} is not {EMBEDDING}, though config.json says tie_word_embeddings: true; it is used, as "
        "transformers does"
    )
    description = structs.replace(checkpoint.description, tie_embeddings=False)
    return replace(checkpoint, description=description, notes=(*checkpoint.notes, note))


def _are_equal(one: TensorFacts, other: TensorFacts) -> bool:
    """Byte for byte; what is stored in another way counts as another."""
    if (one.format, one.shape, one.nbytes) != (other.format, other.shape, other.nbytes):
        return False
    if one.parts or other.parts:
        return False
    try:
        with open(one.path, "rb") as first, open(other.path, "rb") as second:
            for done in range(0, one.nbytes, PIECE_BYTES):
                size = min(PIECE_BYTES, one.nbytes - done)
                if os.pread(first.fileno(), size, one.offset + done) != os.pread(
                    second.fileno(), size, other.offset + done
                ):
                    return False
    except OSError as error:
        raise ModelFileError(
            f"{error.filename or one.path} cannot be read: {why_unreadable(error)}", CHECK_FILE
        ) from error
    return True
