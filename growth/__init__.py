"""Growth operators: a checkpoint in, a larger one out, nothing that was learned lost on the way, with a receipt."""

__version__ = "0.1.0"
