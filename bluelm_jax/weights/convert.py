"""Between dicts of named arrays and our trees, in memory; bit for bit in both directions.

tree = convert.load_decoder(tensors, cfg)      # names as Hugging Face writes them
tensors = convert.decoder_tensors(tree, cfg)   # and back
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bluelm_jax import config
from bluelm_jax.params import Tree
from bluelm_jax.weights import names
from bluelm_jax.weights.names import Transform
from bluelm_jax.weights.plan import Read, Shape, WeightsError, expand, make_plan


def to_ours(x: np.ndarray, transform: Transform, shape: Shape) -> np.ndarray:
    """One tensor of theirs as ours of `shape`; a view where that is possible."""
    match transform:
        case "linear":
            return x.T
        case "patch" if x.ndim == 4:
            return x.transpose(2, 3, 1, 0)
        case "patch":
            return x.T.reshape(shape)
        case "none":
            return x


def to_theirs(x: np.ndarray, transform: Transform) -> np.ndarray:
    """Inverse of `to_ours`; patch kernels become OIHW."""
    match transform:
        case "linear":
            return x.T
        case "patch":
            return x.transpose(3, 2, 0, 1)
        case "none":
            return x


def nest(leaves: Mapping[str, Any]) -> Tree:
    """A nested dict from values by path."""
    tree: Tree = {}
    for path, value in leaves.items():
        *above, last = path.split("/")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def flatten(tree: Tree) -> dict[str, Any]:
    """Inverse of `nest`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def widest(dtypes: list[np.dtype]) -> np.dtype:
    """One dtype that holds all of them exactly."""
    return dtypes[0] if len(set(dtypes)) == 1 else np.dtype(np.float32)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether shape, dtype and every bit agree; equal NaNs are equal."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    x, y = (np.ascontiguousarray(v).reshape(-1).view(np.uint8) for v in (a, b))
    return np.array_equal(x, y)


def _assemble(read: Read, tensors: Mapping[str, Any]) -> np.ndarray:
    transform = read.entry.transform
    arrays = [np.asarray(tensors[name]) for name in read.names]
    dtype = widest([x.dtype for x in arrays])
    pieces = [to_ours(x.astype(dtype, copy=False), transform, read.shape) for x in arrays]
    return np.stack(pieces) if read.entry.stacked else pieces[0]


def load(
    part: names.Part, tensors: Mapping[str, Any], shapes: Mapping[str, Shape] | None = None
) -> Tree:
    """The weights of a part from named arrays, as JAX arrays in the dtype that they have.

    Blocks of one stacked weight that differ in dtype become float32, which holds them exactly.

    Args:
      shapes: of all tensors, where they are known without reading them.

    Raises:
      WeightsError: a tensor is missing, unknown, of another shape, or a tied head differs from the
        embedding.
    """
    if shapes is None:
        shapes = {name: tuple(np.shape(x)) for name, x in tensors.items()}
    plan = make_plan(part, shapes)
    for copy, original in plan.twins:
        if not same_bits(np.asarray(tensors[copy]), np.asarray(tensors[original])):
            raise WeightsError(f"{copy} differs from {original}, but the config ties them")
    return nest({read.entry.path: jnp.asarray(_assemble(read, tensors)) for read in plan.reads})


def tensors_of(part: names.Part, tree: Tree) -> dict[str, np.ndarray]:
    """The named arrays of a part's weights, spelt as in the tables.

    Raises:
      WeightsError: the tree is not one of this configuration.
    """
    leaves, declared = flatten(tree), part.declared()
    wrong = sorted(leaves.keys() ^ declared.keys())
    wrong += [
        f"{path}: shape {tuple(np.shape(leaves[path]))}, expected {p.shape}"
        for path, p in declared.items()
        if path in leaves and tuple(np.shape(leaves[path])) != p.shape
    ]
    if wrong:
        raise WeightsError(f"not the weights of this {part.name}: {'; '.join(wrong[:8])}")
    out = {}
    for entry in part.entries:
        x = np.asarray(leaves[entry.path])
        blocks = x if entry.stacked else x[None]
        spelt = expand(entry, declared[entry.path], part.namings[0])
        for name, block in zip(spelt, blocks, strict=True):
            out[name] = np.ascontiguousarray(to_theirs(block, entry.transform))
    return out


def load_decoder(tensors: Mapping[str, Any], cfg: config.DecoderConfig) -> Tree:
    """A decoder from named arrays (see `load`)."""
    return load(names.decoder_part(cfg), tensors)


def load_vision(tensors: Mapping[str, Any], cfg: config.VisionConfig) -> Tree:
    """A vision tower from named arrays (see `load`)."""
    return load(names.vision_part(cfg), tensors)


def decoder_tensors(tree: Tree, cfg: config.DecoderConfig) -> dict[str, np.ndarray]:
    """Named arrays of a decoder, as `LlamaForCausalLM` would save them."""
    return tensors_of(names.decoder_part(cfg), tree)


def vision_tensors(tree: Tree, cfg: config.VisionConfig) -> dict[str, np.ndarray]:
    """Named arrays of a vision tower, as `SiglipModel` would save them ('vision_model.' first)."""
    return tensors_of(names.vision_part(cfg), tree)
