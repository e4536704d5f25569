"""Layers that keep a state of one size for a sequence: Mamba, gated delta nets, short convolutions.

Source: vLLM 0.32, ``model_executor/layers/mamba/mamba_utils.py`` (``MambaStateShapeCalculator``) and
``get_mamba_state_shape_from_config`` of each model.
"""

from __future__ import annotations

from dataclasses import dataclass

from trivet.check.model_config import Reading


@dataclass(frozen=True, slots=True)
class State:
    """The state of one layer.

    vLLM's ``MambaStateShapeCalculator``: a convolution's last inputs (``conv_kernel - 1`` of them) and, but for short
    convolutions, a recurrent matrix. Both are divided among TP ranks; groups too few to be divided are kept by each.
    """

    conv_steps: int
    conv_width: int
    matrix_elements: int = 0
    groups: int = 0
    group_width: int = 0
    matrix_dtype: str | None = None
    """The dtype of the matrix where it is not the convolution's."""

    def conv_elements(self, tp: int) -> int:
        """Elements that one of ``tp`` ranks keeps."""
        groups = self.groups if self.groups % tp == 0 else tp
        return (self.conv_width + groups * self.group_width) // tp * self.conv_steps


def mamba1(reading: Reading) -> State:
    """Mamba, Falcon-Mamba and Jamba: (width, kernel - 1) of the convolution, (width, state size)."""
    width = reading.optional("intermediate_size") if "state_size" in reading.text else None
    if width is None:
        width = reading.number("mamba_expand", "expand") * reading.hidden()
    return State(
        conv_steps=reading.number("conv_kernel", "mamba_d_conv") - 1,
        conv_width=width,
        matrix_elements=width * reading.number("state_size", "mamba_d_state"),
    )


def mamba2(reading: Reading) -> State:
    """(width + 2 x groups x state size, kernel - 1) of the convolution, (heads, head size, state size)."""
    heads = reading.number("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    hidden = reading.hidden()
    size = reading.text.get("mamba_d_head")
    if size == "auto":
        size = reading.number("mamba_expand") * hidden // heads
    if size is None:
        size = reading.number("mamba_head_dim", "mamba_headdim", "head_dim")
    width = reading.optional("mamba_d_ssm")
    if width is None and "mamba_num_heads" in reading.text:  # Nemotron-H
        width = heads * int(size)
    elif width is None:
        width = reading.number("mamba_expand", "expand") * hidden
    state_size = reading.number("ssm_state_size", "mamba_d_state", "state_size")
    return State(
        conv_steps=reading.number("conv_kernel", "mamba_d_conv") - 1,
        conv_width=width,
        groups=reading.number("n_groups", "mamba_n_groups", "mamba_ngroups"),
        group_width=2 * state_size,
        matrix_elements=heads * int(size) * state_size,
        matrix_dtype=_nemotron_dtype(reading),
    )


def _nemotron_dtype(reading: Reading) -> str | None:
    """vLLM takes float32 for Nemotron-H unless its config says otherwise."""
    if not reading.model_type.startswith("nemotron_h"):
        return None
    return str(reading.text.get("mamba_ssm_cache_dtype") or "float32")


def gated_delta(reading: Reading) -> State:
    """Gated delta net: keys, queries and values of the convolution, (value heads, value size, key size)."""
    keys = reading.number("linear_num_key_heads") * reading.number("linear_key_head_dim")
    values = reading.number("linear_num_value_heads") * reading.number("linear_value_head_dim")
    dtype = reading.text.get("mamba_ssm_dtype") if reading.model_type.startswith("qwen3_5") else None
    return State(
        conv_steps=reading.number("linear_conv_kernel_dim") - 1,
        conv_width=2 * keys + values,
        matrix_elements=values * reading.number("linear_key_head_dim"),
        matrix_dtype=None if dtype is None else str(dtype),
    )


def short_conv(reading: Reading) -> State:
    """LFM2: a convolution's inputs alone."""
    width = reading.optional("conv_dim") or reading.hidden()
    return State(conv_steps=reading.number("conv_L_cache") - 1, conv_width=width)


def kimi_delta(reading: Reading) -> State:
    """Kimi's delta attention: as the gated delta net, with a float32 matrix."""
    linear = reading.text["linear_attn_config"]
    heads, size = reading.number("num_heads", within=linear), reading.number("head_dim", within=linear)
    return State(
        conv_steps=reading.number("short_conv_kernel_size", within=linear) - 1,
        conv_width=3 * heads * size,
        matrix_elements=heads * size * size,
        matrix_dtype="float32",
    )
