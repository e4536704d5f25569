"""The demo model's tokenizer, read once: its package's file has 100 MB."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from trivet.demo.model import demo_gguf_fields


@functools.cache
def demo_fields() -> Mapping[str, Any]:
    """The metadata of the packaged model."""
    return demo_gguf_fields()
