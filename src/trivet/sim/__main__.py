"""``python -m trivet.sim serve MODEL ...``: a simulated engine with the flags of ``vllm serve``."""

from __future__ import annotations

import sys

from trivet.errors import TrivetError
from trivet.sim.options import parse, tier_of
from trivet.sim.process import run, say


def main() -> None:
    """Runs the command; what a person can mend is one line on standard error."""
    try:
        settings, name, notes = parse(sys.argv[1:])
        for note in notes:
            say(f"note: {note}")
        run(settings, name=name, tier=tier_of(sys.argv[1:]))
    except TrivetError as error:
        sys.stderr.write(f"trivet: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
