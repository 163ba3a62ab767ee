"""The verbs of `megatron-d3`, one module each; see `main`."""
