"""Benchmarks: each runs two things side by side and prints ratios."""
