"""TrivetConnector that spoils KV on purpose: equality tests must notice it, checksums what is spoiled on the way.

What is done to the next transfers stands in the file that ``TRIVET_TEST_SPOIL`` names. ``zero`` clears the first
received block once all has come and was checked, ``mistake`` puts the second block's content into the first,
``corrupt`` changes each piece on its way into the pages, ``slow`` lets a megabyte take a second; anything else leaves
KV alone.
"""

import os
import time
from pathlib import Path

from trivet.transfer import connector
from trivet.transfer.connector import TrivetConnector
from trivet.transfer.receiver import Receiver

SLOW_BYTES_PER_S = 1e6


class SpoilingReceiver(Receiver):
    def write(self, mover, window, receiving, piece, is_void):
        control = Path(os.environ["TRIVET_TEST_SPOIL"])
        order = control.read_text() if control.exists() else ""
        if order == "slow":
            time.sleep(piece.bytes / SLOW_BYTES_PER_S)
        super().write(mover, Corrupted(window) if order == "corrupt" else window, receiving, piece, is_void)
        if receiving.arrivals.is_complete():  # nobody has been told yet
            self._spoil(order, receiving.receive)

    def _spoil(self, order, receive):
        for layer in self._pages.layers:
            own = receive.blocks[layer.group]
            first, *others = [own[index] for start, end in receive.wanted[layer.group] for index in range(start, end)]
            if order == "zero":
                layer.rows[first].zero_()
            elif order == "mistake" and others:
                layer.rows[first].copy_(layer.rows[others[0]])


class Corrupted:
    """A window in which a bit of every piece is wrong."""

    def __init__(self, window):
        self._window = window

    def read(self, slot, size):
        piece = self._window.read(slot, size).clone()
        piece[size // 2] ^= 1
        return piece


class SpoiledTrivetConnector(TrivetConnector):
    def register_kv_caches(self, kv_caches):
        connector.Receiver = SpoilingReceiver
        super().register_kv_caches(kv_caches)
