"""What is known of a pair from the canaries that were sent through it (``trivet.gateway.guard``)."""

from __future__ import annotations

from enum import IntEnum


class Proof(IntEnum):
    """The standing of a pair. Above ``GOOD`` it is bad, and the member names the cause; the board keeps the numbers."""

    UNPROVEN = 0
    """No canary has been through it since either engine was started: held back while another pair serves."""
    OPEN = 1
    """Nothing is proven, and it serves all the same: there was no better pair, or canaries came to no verdict."""
    GOOD = 2
    """Its last verdict was good."""
    CANARY_ERROR = 16
    """A canary ended with an error."""
    WRONG_TOKENS = 17
    """The split answer is not the colocated one."""
    RECOMPUTE = 18
    """Decode computed the prompt itself."""
    BYTES = 19
    """Decode counted fewer bytes of KV than there are."""
    SILENT = 20
    """KV does not come, and no error either, while both engines answer others."""

    @property
    def is_bad(self) -> bool:
        """Whether it gets no request."""
        return self > Proof.GOOD

    @property
    def serves(self) -> bool:
        """Whether it is as good as any other to those who choose."""
        return self in (Proof.OPEN, Proof.GOOD)

    @property
    def word(self) -> str:
        """For people: ``good``, ``wrong-tokens``."""
        return self.name.lower().replace("_", "-")
