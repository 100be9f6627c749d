"""JAX -> TFLite: jax2tf, a SavedModel, the TFLite converter. The only file that knows TensorFlow.

TensorFlow is imported inside the functions: it costs some 300 MB and seconds that nobody else who
imports this package should pay.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from export.signatures import Model, Signature


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Holds back what libraries write to standard error; it is shown if the block fails.

    The converter logs a dozen lines a model from C++ that no Python setting turns off.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside TensorFlow and jax2tf themselves
        shown = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(shown, held.read())
            raise
        finally:
            os.dup2(shown, 2)
            os.close(shown)


def to_tflite(model: Model) -> bytes:
    """Lowers a model to a float32 flatbuffer whose signatures share one copy of the weights.

    Peak memory is about nine times the weights. Only TFLite's builtin operations are allowed; the
    converter raises its own ConverterError for a graph that needs others.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # no notes about devices it does not find
    with _quiet():
        import tensorflow as tf
        from jax.experimental import jax2tf

        module: Any = tf.Module()
        module.weights = jax.tree.map(lambda w: tf.Variable(w, trainable=False), model.weights)

        def concrete(signature: Signature):
            converted = jax2tf.convert(signature.fn, with_gradient=False)
            specs = {
                name: tf.TensorSpec(s.shape, tf.as_dtype(s.dtype), name=name)
                for name, s in signature.inputs.items()
            }
            call = tf.function(
                lambda **inputs: converted(module.weights, **inputs), autograph=False
            )
            return call.get_concrete_function(**specs)

        functions = {s.name: concrete(s) for s in model.signatures}
        with tempfile.TemporaryDirectory() as directory:
            tf.saved_model.save(module, directory, signatures=functions)
            converter = tf.lite.TFLiteConverter.from_saved_model(
                directory, signature_keys=list(functions)
            )
            converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
            return converter.convert()
