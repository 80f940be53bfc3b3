"""Learning-rate roles: which group of the optimizer a parameter belongs to."""

import re

ROUTER, ADAPTERS, REST = "router", "adapters", "rest"


def role(name: str) -> str:
    """
    `"router"` for the routers' weights and biases, `"adapters"` for the low-rank adapters of quantized experts, else
    `"rest"`.

    Args:
        name: of a parameter, in memory or on disk (`model.layers.3.mlp.experts.17.gate_proj.A` or without the 17).
    """
    if re.search(r"\.mlp\.router\.", name):
        return ROUTER
    if re.search(r"\.mlp\.experts\.(\d+\.)?\w+_proj\.[AB]$", name):
        return ADAPTERS
    return REST
