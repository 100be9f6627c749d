"""Metrics and readers of public benchmarks."""
