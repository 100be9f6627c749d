"""Commands: train, evaluate, ablate, generate, quickstart, statistics and benchmarks."""
