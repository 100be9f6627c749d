"""Rendered training data."""
