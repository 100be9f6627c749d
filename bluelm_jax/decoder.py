"""The language model: a LLaMA-shaped decoder with the options of DecoderConfig.

Two ways through it, equal to each other by test: `forward` for training (whole packed rows) and
`extend` for generation (append T positions to a KV cache; T = prompt, T = 128 for the phone's
chunked prefill, T = 1 for decoding). `extend` also takes the weights as `decoding.prepare` lays them
out: a tuple of blocks, which it goes through one by one, with fused projections.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from bluelm_jax import config, layers, params
from bluelm_jax.params import Param, Tree
from bluelm_jax.sharding import shard


@flax.struct.dataclass
class KVCache:
    """Keys and values of all layers.

    Attributes:
      k: keys after RoPE, stacked over the blocks, or a tuple of one array a block where the
        weights are a tuple of blocks. Heads come before positions, so that attention is a batched
        product of the cache as it lies.
      v: values, likewise.
      lengths: positions in use, by row. What stands beyond is never attended to.
    """

    k: Float[Array, "Z B K C H"] | tuple[Float[Array, "B K C H"], ...]
    v: Float[Array, "Z B K C H"] | tuple[Float[Array, "B K C H"], ...]
    lengths: Int[Array, "B"]

    @property
    def size(self) -> int:
        """Positions that a row has room for."""
        return self.k[0].shape[-2]


def init_cache(
    cfg: config.DecoderConfig, batch: int, size: int, dtype: DTypeLike, *, stacked: bool = True
) -> KVCache:
    """An empty cache of `size` positions a row, one array for all blocks or (not stacked) each."""
    shape = (batch, cfg.num_kv_heads, size, cfg.head_dim)

    def empty() -> Array | tuple[Array, ...]:
        if stacked:
            return jnp.zeros((cfg.depth, *shape), dtype)
        return tuple(jnp.zeros(shape, dtype) for _ in range(cfg.depth))

    return KVCache(k=empty(), v=empty(), lengths=jnp.zeros(batch, jnp.int32))


def specs(cfg: config.DecoderConfig) -> Tree:
    """Declares the decoder's weights; blocks are stacked on a leading axis of size depth."""
    d, m, h = cfg.width, cfg.mlp_dim, cfg.head_dim
    q, kv = cfg.num_heads * h, cfg.num_kv_heads * h
    bias, gain = cfg.qkv_bias, (2 * cfg.depth) ** -0.5
    block = {
        "norm1": layers.rms_norm_specs(d, "embed"),
        "attn": {
            "q": layers.linear_specs(d, q, ("embed", "heads"), bias=bias),
            "k": layers.linear_specs(d, kv, ("embed", "kv_heads"), bias=bias),
            "v": layers.linear_specs(d, kv, ("embed", "kv_heads"), bias=bias),
            "out": layers.linear_specs(q, d, ("heads", "embed"), bias=False, gain=gain),
        },
        "norm2": layers.rms_norm_specs(d, "embed"),
        "mlp": {
            "gate": layers.linear_specs(d, m, ("embed", "mlp"), bias=False),
            "up": layers.linear_specs(d, m, ("embed", "mlp"), bias=False),
            "down": layers.linear_specs(m, d, ("mlp", "embed"), bias=False, gain=gain),
        },
    }
    # Unit variance after MiniCPM's embed_scale; the head then sees inputs of unit variance.
    tree = {
        "embed": Param((cfg.vocab_size, d), ("vocab", "embed"), 1.0 / cfg.embed_scale),
        "blocks": params.stack(block, cfg.depth),
        "norm": layers.rms_norm_specs(d, "embed"),
    }
    if cfg.embed_norm:
        tree["embed_norm"] = layers.layer_norm_specs(d, "embed")
    if cfg.tied_head:
        tree["embed"] = Param((cfg.vocab_size, d), ("vocab", "embed"), d**-0.5)
    else:
        tree["head"] = Param((d, cfg.vocab_size), ("embed", "vocab"))
    return tree


def embed_tokens(
    p: Tree, tokens: Int[Array, "B L"], cfg: config.DecoderConfig, dtype: DTypeLike
) -> Float[Array, "B L D"]:
    """Scaled embeddings, through the LayerNorm where the model has one (text tokens only)."""
    x = layers.scaled(p["embed"].astype(dtype)[tokens], cfg.embed_scale)
    return layers.layer_norm(p["embed_norm"], x, cfg.norm_eps) if cfg.embed_norm else x


def head_matrix(p: Tree, cfg: config.DecoderConfig) -> Float[Array, "D V"]:
    """The output head, transposed embeddings when tied."""
    return p["embed"].T if cfg.tied_head else p["head"]


def final_hidden(
    p: Tree, x: Float[Array, "B L D"], cfg: config.DecoderConfig
) -> Float[Array, "B L D"]:
    """Last norm and logit divisor: what the head multiplies."""
    return layers.scaled(layers.rms_norm(p["norm"], x, cfg.norm_eps), 1.0 / cfg.logit_divisor)


def logits(
    p: Tree, hidden: Float[Array, "*B D"], cfg: config.DecoderConfig
) -> Float[Array, "*B V"]:
    """float32 logits of the final hidden state."""
    if cfg.tied_head and hidden.ndim == 2:  # A token a row, as in generation.
        return layers.rows_product(p["embed"].astype(hidden.dtype), hidden, jnp.float32)
    head = head_matrix(p, cfg).astype(hidden.dtype)
    return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)


def project_qkv(p: Tree, x: Array, rope: tuple[Array, Array], cfg: config.DecoderConfig):
    """Queries [B, T, N, H], keys and values [B, T, K, H]; RoPE applied to the first two."""
    if "qkv" in p:
        query, key = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        q, k, v = jnp.split(layers.linear(p["qkv"], x), (query, query + key), axis=-1)
    else:
        q, k, v = (layers.linear(p[name], x) for name in "qkv")
    q = q.reshape(*x.shape[:-1], cfg.num_heads, cfg.head_dim)
    k, v = (y.reshape(*x.shape[:-1], cfg.num_kv_heads, cfg.head_dim) for y in (k, v))
    return layers.apply_rope(q, *rope), layers.apply_rope(k, *rope), v


def mlp(p: Tree, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """SwiGLU."""
    if "gate_up" in p:
        gate, up = jnp.split(layers.linear(p["gate_up"], x), 2, axis=-1)
    else:
        gate, up = layers.linear(p["gate"], x), layers.linear(p["up"], x)
    return layers.linear(p["down"], jax.nn.silu(gate) * up)


def finish_block(p: Tree, x: Array, attended: Array, cfg: config.DecoderConfig) -> Array:
    """Adds attention's output and the MLP to the residual stream, each times residual_scale."""
    attended = attended.reshape(*x.shape[:-1], cfg.num_heads * cfg.head_dim)
    x = x + layers.scaled(layers.linear(p["attn"]["out"], attended), cfg.residual_scale)
    y = mlp(p["mlp"], layers.rms_norm(p["norm2"], x, cfg.norm_eps))
    return x + layers.scaled(y, cfg.residual_scale)


def forward(
    p: Tree,
    x: Float[Array, "B L D"],
    positions: Int[Array, "B L"],
    segments: Int[Array, "B L"],
    cfg: config.DecoderConfig,
) -> Float[Array, "B L D"]:
    """Final hidden states of packed rows; samples in a row do not see each other."""
    rope = layers.rope_tables(positions, cfg.head_dim, cfg.rope_theta)

    def step(x, w):
        y = layers.rms_norm(w["norm1"], x, cfg.norm_eps)
        q, k, v = project_qkv(w["attn"], y, rope, cfg)
        attended = layers.packed_attention(q, k, v, segments, cfg.attention_block)
        x = finish_block(w, x, attended, cfg)
        return shard(x, "batch", "seq", "features"), None

    step = jax.checkpoint(step) if cfg.remat else step
    x, _ = jax.lax.scan(step, x, p["blocks"], unroll=cfg.unroll)
    return final_hidden(p, x, cfg)


def extend(
    p: Tree,
    x: Float[Array, "B T D"],
    valid: Int[Array, "B"],
    cache: KVCache,
    cfg: config.DecoderConfig,
) -> tuple[Float[Array, "B T D"], KVCache]:
    """Appends T positions to every row, of which the first `valid[b]` count.

    Rows of unequal length are padded on the right. What a padded position writes lies beyond the
    row's length, so it is overwritten before anything attends to it; writes past the end of the
    cache are dropped.

    Returns:
      Final hidden states, and the cache with lengths increased by `valid`.
    """
    positions = cache.lengths[:, None] + jnp.arange(x.shape[1])[None]
    rope = layers.rope_tables(positions, cfg.head_dim, cfg.rope_theta)
    mask = jnp.arange(cache.size)[None, None] <= positions[:, :, None]

    def step(x, inputs):
        w, k_cache, v_cache = inputs
        y = layers.rms_norm(w["norm1"], x, cfg.norm_eps)
        q, k, v = project_qkv(w["attn"], y, rope, cfg)
        k_cache, v_cache = _write(k_cache, k, positions), _write(v_cache, v, positions)
        x = finish_block(w, x, layers.heads_attention(q, k_cache, v_cache, mask), cfg)
        return x, (k_cache, v_cache)

    inputs = (p["blocks"], cache.k, cache.v)
    if isinstance(p["blocks"], tuple):
        written = []
        for block in zip(*inputs, strict=True):
            x, new = step(x, block)
            written.append(new)
        k, v = (tuple(each) for each in zip(*written, strict=True))
    else:
        x, (k, v) = jax.lax.scan(step, x, inputs, unroll=cfg.unroll)
    return final_hidden(p, x, cfg), KVCache(k=k, v=v, lengths=cache.lengths + valid)


# Above so many rows a scatter is used: one slice update a row and block would be too many operations.
_MAX_SLICES = 16


def _write(
    cache: Float[Array, "B K C H"], new: Float[Array, "B T K H"], positions: Int[Array, "B T"]
) -> Float[Array, "B K C H"]:
    """`new` at its positions; what would stand past the end is dropped."""
    batch, chunk = positions.shape
    new = new.astype(cache.dtype)
    if chunk > 1 or batch > _MAX_SLICES:
        return cache.at[jnp.arange(batch)[:, None], :, positions].set(new, mode="drop")
    for row in range(batch):  # XLA does these in place and without a loop over indices.
        at = (row, 0, positions[row, 0], 0)
        old = jax.lax.dynamic_slice(cache, at, (1, cache.shape[1], 1, cache.shape[3]))
        fits = positions[row, 0] < cache.shape[2]
        value = jnp.where(fits, new[row, 0][None, :, None], old)
        cache = jax.lax.dynamic_update_slice(cache, value, at)
    return cache
