"""What to do about a model file that cannot be used: remedies that many errors of this room share.

Invariant: each is one sentence in the imperative.
"""

from __future__ import annotations

DOWNLOAD_AGAIN = "Download the file again; compare its size with the one the publisher states."
CHECK_FILE = "Check the path and the file's permissions, or download it again."
CHECK_CONFIG = "Download the file again; if it stays so, use another model, or a GGUF file of this one."
OTHER_DRAFTER = "Export or download the drafter again, or use another drafter of this very target."
OTHER_MODEL = "Use another file of this model, or another model."
GIVE_MODEL = "Give a GGUF file, or a Hugging Face folder with config.json, tokenizer.json and safetensors."
