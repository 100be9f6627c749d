"""From files of records to batches of fixed shape. Nothing in this package imports JAX."""
