"""Tells at once of tasks and futures whose fault nobody looked at, which Python does when they are collected."""

import gc


def collect() -> None:
    """Collects garbage, and sets what is left aside: the next time does not walk all that the whole run has made.

    A run of thousands of tests keeps a gigabyte, which takes a second to walk, test by test.
    """
    gc.collect()
    gc.freeze()
