"""What is inside a .tflite file: operations and ranks, weight bytes and types, signatures."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any

from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.tools import flatbuffer_utils

_OP_NAMES = {v: k for k, v in vars(schema.BuiltinOperator).items() if isinstance(v, int)}

# What MediaTek's compiler plugin in ai-edge-litert 2.3 legalises.
NPU_OPS = frozenset((
    "ABS", "ADD", "AVERAGE_POOL_2D", "BATCH_MATMUL", "CAST", "CONCATENATION", "CONV_2D",
    "DEPTHWISE_CONV_2D", "DEQUANTIZE", "DIV", "FULLY_CONNECTED", "GELU", "GREATER",
    "HARD_SWISH", "L2_NORMALIZATION", "LEAKY_RELU", "LESS", "LOGISTIC", "MAXIMUM",
    "MAX_POOL_2D", "MEAN", "MINIMUM", "MUL", "PAD", "PADV2", "PRELU", "QUANTIZE", "REDUCE_MAX",
    "RELU", "RESHAPE", "RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR", "RSQRT", "SLICE",
    "SOFTMAX", "SPLIT", "SQRT", "SQUARED_DIFFERENCE", "STRIDED_SLICE", "SUB", "SUM", "TANH",
    "TILE", "TRANSPOSE", "TRANSPOSE_CONV", "UNPACK",
))  # fmt: skip
NPU_MAX_RANK = 4


def _read(source: str | Path | bytes) -> Any:
    """The object form of a file or of its bytes (generated code, every field optional)."""
    if isinstance(source, bytes):
        return flatbuffer_utils.read_model_from_bytearray(bytearray(source))
    return flatbuffer_utils.read_model(str(source))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignatureReport:
    """One signature of a file.

    Attributes:
      ops: operation name -> how often it occurs.
      max_rank: most dimensions of any tensor.
    """

    name: str
    ops: dict[str, int]
    max_rank: int

    def npu_problems(self) -> list[str]:
        """What MediaTek's plugin would refuse: operations outside NPU_OPS, ranks above 4."""
        problems = [f"{op} x{n}" for op, n in sorted(self.ops.items()) if op not in NPU_OPS]
        if self.max_rank > NPU_MAX_RANK:
            problems.append(f"rank {self.max_rank}")
        return problems


def _signature_report(model, definition) -> SignatureReport:
    graph = model.subgraphs[definition.subgraphIndex]
    codes = (model.operatorCodes[op.opcodeIndex].builtinCode for op in graph.operators)
    ranks = [len(t.shape) for t in graph.tensors if t.shape is not None]
    return SignatureReport(
        name=definition.signatureKey.decode(),
        ops=dict(collections.Counter(_OP_NAMES[code] for code in codes)),
        max_rank=max(ranks, default=0),
    )


def report(path: str | Path) -> list[SignatureReport]:
    """Operations and ranks of every signature of the file."""
    model = _read(path)
    return [_signature_report(model, d) for d in model.signatureDefs]


def _constants(path: str | Path) -> list[bytes]:
    model = _read(path)
    return [bytes(b.data) for b in model.buffers if b.data is not None and len(b.data)]


def constant_bytes(path: str | Path) -> int:
    """Bytes of all constant buffers: weights, and small shape and axis operands."""
    return sum(map(len, _constants(path)))


def duplicate_bytes(path: str | Path, at_least: int = 64) -> int:
    """Bytes of constant buffers whose very content stands in an earlier buffer already.

    Not zero means that signatures do not share their weights, or that weights are equal by chance
    (untrained biases), which `at_least` does not rule out for wide layers.
    """
    counts = collections.Counter(data for data in _constants(path) if len(data) >= at_least)
    return sum(len(data) * (count - 1) for data, count in counts.items())


def weight_types(path: str | Path) -> dict[str, str]:
    """Constant operand of each FULLY_CONNECTED, EMBEDDING_LOOKUP and CONV_2D -> its tensor type.

    Keys are '<signature>:<name of the output tensor>'.
    """
    model = _read(path)
    kinds = {v: k for k, v in vars(schema.TensorType).items() if isinstance(v, int)}
    found = {}
    for definition in model.signatureDefs:
        graph = model.subgraphs[definition.subgraphIndex]
        for op in graph.operators:
            name = _OP_NAMES[model.operatorCodes[op.opcodeIndex].builtinCode]
            if name in ("FULLY_CONNECTED", "EMBEDDING_LOOKUP", "CONV_2D"):
                output = graph.tensors[op.outputs[0]].name.decode()
                weight = graph.tensors[op.inputs[1]]
                found[f"{definition.signatureKey.decode()}:{output}"] = kinds[weight.type]
    return found


def check_signatures(data: bytes, reference: bytes) -> None:
    """Holds a rewritten file (quantised) against the one it was made from.

    Signature definitions refer to tensors by number; rewriting inserts tensors, and a definition
    that was not renumbered reads or writes the wrong one without any error at run time.

    Raises:
      ValueError: a signature is missing, or a name of it no longer is a graph input or output of
        the same shape; each one is named.
    """
    problems = []
    after = _signature_tensors(data)
    for key, (shape, _) in _signature_tensors(reference).items():
        if key not in after:
            problems.append(f"{'/'.join(key)} is missing")
        elif after[key][0] != shape:
            problems.append(f"{'/'.join(key)} has shape {after[key][0]}, was {shape}")
        elif not after[key][1]:
            problems.append(f"{'/'.join(key)} is not a graph {key[1]} any more")
    if problems:
        raise ValueError("broken signatures: " + "; ".join(problems))


def _signature_tensors(data: bytes) -> dict[tuple[str, str, str], tuple[tuple[int, ...], bool]]:
    """(signature, 'input' | 'output', name) -> (shape, whether the graph lists the tensor so)."""
    model = _read(data)
    found = {}
    for definition in model.signatureDefs:
        graph = model.subgraphs[definition.subgraphIndex]
        sides = (
            ("input", definition.inputs, graph.inputs),
            ("output", definition.outputs, graph.outputs),
        )
        for side, maps, listed in sides:
            for item in maps:
                shape = tuple(int(n) for n in graph.tensors[item.tensorIndex].shape)
                key = (definition.signatureKey.decode(), side, item.name.decode())
                found[key] = (shape, item.tensorIndex in list(listed))
    return found
