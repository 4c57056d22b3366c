"""`python -m firstlight`: the same program as the `firstlight` command."""

from __future__ import annotations

from firstlight.cli.entry import main

main()
