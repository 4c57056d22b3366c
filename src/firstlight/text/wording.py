"""Reasons of others (parsers, templates, other processes) as parts of our own sentences.

Used wherever a message of somebody else's is put into an error. Invariant: what comes out ends with exactly
one full stop.
"""

from __future__ import annotations


def sentence(text: str) -> str:
    """The text as the end of a sentence, whether or not it brought a full stop."""
    text = text.strip()
    return text if text.endswith(("!", "?")) else f"{text.rstrip('.')}."
