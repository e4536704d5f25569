"""The garbage collector of a process that serves."""

from __future__ import annotations

import gc

from trivet.render.garbage import spare_collections


def test_the_collector_leaves_alone_what_was_loaded():
    thresholds = gc.get_threshold()
    try:
        spare_collections()
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold() == (10_000, *thresholds[1:])
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
