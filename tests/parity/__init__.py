"""Parity with transformers: the same weights and inputs through both, output by output."""
