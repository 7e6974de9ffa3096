"""Context parallelism for Megatron-LM: ring, Ulysses, hybrid and KV-all-gather attention."""

__version__ = "0.1.0"
