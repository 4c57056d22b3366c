"""`python -m firstlight`: the same program as the `firstlight` command."""

from __future__ import annotations

from firstlight.cli.main import main

main()
