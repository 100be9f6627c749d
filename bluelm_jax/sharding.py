"""Device mesh and the one table from logical axis names to mesh axes.

Arrays name what their dimensions mean ('batch', 'embed', ...); this table says where that lives on
the data x fsdp x tensor mesh. A name that is not in the table is an error, never "replicated".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from bluelm_jax import config as config_lib

MESH_AXES = ("data", "fsdp", "tensor")

# Weights split over `fsdp` along their model-width axis and over `tensor` along heads, MLP and
# vocabulary (Megatron's layout), so each matmul needs one collective. Activations split by batch.
RULES: dict[str, tuple[str, ...] | str | None] = {
    "batch": ("data", "fsdp"),  # rows of a batch, groups of tiles
    "tiles": ("data", "fsdp"),  # groups x tiles, flattened for the ViT
    "seq": None,
    "features": None,  # model width of an activation
    "layers": None,  # stacked blocks
    "patch": None,  # kernel positions, colours
    "position": None,  # learned position embeddings
    "embed": "fsdp",  # model width of a weight
    "vision_embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "fused": None,  # concatenated patches entering the downsampler
}


def partition_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """Maps logical axis names to a PartitionSpec; None is replicated; unknown names raise."""
    unknown = [a for a in axes if a is not None and a not in RULES]
    if unknown:
        raise ValueError(f"unknown logical axes {unknown}; known: {sorted(RULES)}")
    return PartitionSpec(*(None if a is None else RULES[a] for a in axes))


def make_mesh(cfg: config_lib.MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Lays `devices` (default: all) out as data x fsdp x tensor.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    rest = cfg.fsdp * cfg.tensor
    data = len(devices) // rest if cfg.data == -1 else cfg.data
    if data * rest != len(devices) or data == 0:
        data = max(data, 1)
        raise ValueError(
            f"mesh data={data} x fsdp={cfg.fsdp} x tensor={cfg.tensor} needs {data * rest} devices, "
            f"there are {len(devices)}; set MeshConfig.data, fsdp and tensor"
        )
    shape = (data, cfg.fsdp, cfg.tensor)
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def named(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """The sharding of an array whose dimensions mean `axes`."""
    return NamedSharding(mesh, partition_spec(axes))


def check_divisible(
    name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], mesh: Mesh
) -> None:
    """Raises ValueError unless each dimension of `name` splits evenly over its mesh axes."""
    for size, axis, over in zip(shape, axes, partition_spec(axes), strict=True):
        over = (over,) if isinstance(over, str) else over or ()
        if size % math.prod(mesh.shape[a] for a in over):
            ways = " x ".join(f"{a} = {mesh.shape[a]}" for a in over)
            raise ValueError(f"{name}: {size} along {axis!r} does not split evenly over {ways}")


def data_parallelism(mesh: Mesh) -> int:
    """How many ways the batch is split."""
    return math.prod(mesh.shape[a] for a in ("data", "fsdp"))


def shard(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains `x` to the layout of `axes`; the identity when no mesh is set.

    Raises:
      ValueError: an unknown axis name, or not one name for each dimension.
    """
    if len(axes) != x.ndim:
        raise ValueError(f"{len(axes)} axis names {axes} for an array of shape {x.shape}")
    spec = partition_spec(axes)
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec)
