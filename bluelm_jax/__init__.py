"""BlueLM-V-3B in JAX: dynamic-resolution tiling, training on TPUs, export to TFLite.

Modules are functions over plain parameter trees; see `vlm` for the model, `schemes` for the tiling
schemes, `train` for the training step. Nothing is imported here, so that data workers, which need
NumPy alone, stay light.
"""
