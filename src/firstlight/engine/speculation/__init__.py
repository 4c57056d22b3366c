"""Drafting: guessing a sequence's next tokens so that one step of the model can verify several.

The parts of `firstlight.engine` that propose drafts, decide how many, and count what became of them.
Invariant: what is proposed never changes what is answered, only when.
"""
