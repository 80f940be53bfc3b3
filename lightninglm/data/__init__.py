"""Text to packed sequences to one deterministic order. Start at `prepare.py`; read with `loader.py`."""
