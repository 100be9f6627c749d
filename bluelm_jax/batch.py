"""The batch that the model trains on: fixed shapes, text and image samples mixed without branches."""

from __future__ import annotations

import flax.struct
from jaxtyping import Array, Float, Int, UInt8

from bluelm_jax.layout import NEWLINE as NEWLINE
from bluelm_jax.layout import TEXT as TEXT


@flax.struct.dataclass
class Batch:
    """Samples packed into B rows of L positions, and the tiles they refer to.

    Tiles are pooled by groups of B / G rows: a row's `image_index` counts the Q tokens of each of
    the I tiles of its own group. One group for the whole batch wastes the least tiles; one group
    a data-parallel device keeps the gather of image tokens on that device.

    Attributes:
      tokens: vocabulary ids; positions of image tokens hold any valid id.
      loss_weights: 1 where `tokens` is a supervised target, else 0.
      positions: position within its own sample.
      segments: 0 padding, 1.. the sample within the row; attention stays inside a segment.
      image_index: >= 0 an image token of the group, TEXT (-1), NEWLINE (-2).
      tiles: RGB pixels; unused tiles are zero.
      corner_index, corner_weights: where a layout resizes token maps (`UnpadNewline.anyres_max`), an
        image position holds the weighted sum of these four tokens of the group instead; None else.
    """

    tokens: Int[Array, "B L"]
    loss_weights: Float[Array, "B L"]
    positions: Int[Array, "B L"]
    segments: Int[Array, "B L"]
    image_index: Int[Array, "B L"]
    tiles: UInt8[Array, "G I S S 3"]
    corner_index: Int[Array, "B L 4"] | None = None
    corner_weights: Float[Array, "B L 4"] | None = None
