"""``python -m trivet.cli`` is ``trivet``."""

from trivet.cli import main

main()
