"""Published checkpoints, small: every key spelled out by hand as the published layout has it, in bf16."""

import math

import torch
from safetensors.torch import save_file

SIZES = {
    "vocabulary": 512, "hidden": 64, "streams": 4, "linear_heads": 4, "linear_dim": 16, "head_dim": 32,
    "indexer_heads": 2, "indexer_dim": 16, "shared_width": 64, "width": 32, "codec": 8192, "rank": 4,
}  # fmt: skip
V, H, N, F, FS, RANK = (SIZES[key] for key in ("vocabulary", "hidden", "streams", "width", "shared_width", "rank"))
KINDS = {  # layers, experts, experts of the second-token layer, null slots
    "dense": (4, 0, 0, 0),
    "mixture": (4, 4, 4, 4),
    "sigmoid mixture": (8, 12, 4, 0),
    "quantized": (8, 12, 4, 0),
}


def published_state(kind="dense", seed=0, dtype=torch.bfloat16, layers=None):
    """{canonical key: tensor} of a checkpoint whose sizes are those of a tiny preset."""
    made, experts, second_experts, null_slots = KINDS[kind]
    layers = layers or made
    generator = torch.Generator().manual_seed(seed)
    state = {}

    def add(key, *shape, scale=0.05, offset=0.0, like=dtype):
        state[key] = (torch.randn(shape, generator=generator) * scale + offset).to(like)

    def frequencies(prefix, head_dim):
        state[f"{prefix}rotary_emb.inv_freq"] = (10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)).to(dtype)

    def connection(prefix):
        add(f"{prefix}norm.weight", H, offset=1.0)
        add(f"{prefix}coeffs.rms.weight", N * H, offset=1.0)
        for name, rows in (("pre", (N,)), ("post", (N,)), ("res", (N, N))):
            add(f"{prefix}coeffs.phi_{name}.weight", math.prod(rows), N * H)
            add(f"{prefix}coeffs.b_{name}", *rows)
            add(f"{prefix}coeffs.alpha_{name}", offset=0.1)

    def deltanet(prefix):
        for name in "qkvgo":
            add(f"{prefix}{name}_proj.weight", H, H)
        for name in ("b", "gk"):
            add(f"{prefix}{name}_proj.weight", SIZES["linear_heads"], H)
            add(f"{prefix}{name}_proj.bias", SIZES["linear_heads"])
        for name in ("A_log", "D", "dt_bias"):
            add(f"{prefix}{name}", SIZES["linear_heads"])
        for name in "qkv":
            add(f"{prefix}{name}_conv1d.conv.weight", H, 1, 4, scale=0.3)
            add(f"{prefix}{name}_conv1d.conv.bias", H)
        add(f"{prefix}o_norm.norm.weight", SIZES["linear_dim"], offset=1.0)
        frequencies(prefix, SIZES["linear_dim"])

    def sparse_attention(prefix):
        add(f"{prefix}W_Iq.weight", SIZES["indexer_heads"] * SIZES["indexer_dim"], H)
        add(f"{prefix}W_Ik.weight", SIZES["indexer_dim"], H)
        add(f"{prefix}W_Iw.weight", SIZES["indexer_heads"], H)
        add(f"{prefix}gate_bias", SIZES["indexer_heads"])
        for name in ("W_q", "W_k", "W_v", "W_gv", "W_go", "o_proj"):
            add(f"{prefix}{name}.weight", H, H)
        add(f"{prefix}variance_ema", offset=0.5)
        add(f"{prefix}_variance_ema_snapshot", offset=0.5)
        frequencies(prefix, SIZES["head_dim"])

    def dense(prefix):
        for name in ("gate", "up"):
            add(f"{prefix}mlp.mlp.{name}_proj.weight", FS, H)
        add(f"{prefix}mlp.mlp.down_proj.weight", H, FS)

    def mixture(prefix, count):
        for name, rows, columns in (("gate", FS, H), ("up", FS, H), ("down", H, FS)):
            add(f"{prefix}moe.shared_{name}.weight", rows, columns)
        add(f"{prefix}moe.gate.gate.weight", count, H)
        add(f"{prefix}moe.gate.logit_bias", count)
        add(f"{prefix}moe.gate.null_logit", *([] if null_slots else [1]))
        for name, inputs, outputs in (("gate", H, F), ("up", H, F), ("down", F, H)):
            if kind != "quantized":
                add(f"{prefix}moe.W_{name}", count, inputs, outputs)
                continue
            module = f"{prefix}moe.tq_{name}_weights."
            codes = torch.randint(-128, 128, (count, outputs, inputs), generator=generator, dtype=torch.int8)
            state[f"{module}weight_indices"] = codes
            add(f"{module}row_norms", count, outputs, offset=0.5)
            state[f"{module}rotation_matrix"] = rotation(inputs, generator)
            state[f"{module}weight_codebook"] = torch.linspace(-0.3, 0.3, 256) * (1 if inputs == H else 2)
            add(f"{module}tqp_A", count, outputs, RANK, scale=1e-4)
            add(f"{module}tqp_B", count, RANK, inputs, scale=0.25)

    add("pf_to_model.weight", H, SIZES["codec"], scale=0.02)
    for key in ("embed_norm.weight", "norm.weight", "memory_ln.weight"):
        add(key, H, offset=1.0)
    add("lm_head.weight", V, H)
    add("lambda_r_raw", offset=-2.5)
    add("memory_ln.bias", H)
    add("memory_gate_proj.weight", 1, H)
    add("memory_gate_proj.bias", 1)
    for i in range(layers):
        attention, feed_forward = f"layers.{i}.attn_block.", f"layers.{i}.mlp_block."
        connection(attention)
        (sparse_attention if i % 4 == 3 else deltanet)(f"{attention}sublayer.")
        connection(feed_forward)
        if experts:
            mixture(f"{feed_forward}sublayer.", experts)
        else:
            dense(f"{feed_forward}sublayer.")
    add("mtp_block.fusion_proj.weight", H, 2 * H)
    sparse_attention("mtp_block.attn.")
    if experts:
        mixture("mtp_block.mlp.", second_experts)
        for block in (0, 1):
            connection(f"mtp_block.reversible_stack.blocks.{block}.block.")
    else:
        dense("mtp_block.mlp.")
        for block in ("attn_block", "mlp_block"):
            connection(f"mtp_block.{block}.")
    return state


def rotation(size, generator):
    """H diag(s) / sqrt(n), fp32, H by Sylvester's construction."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
    return matrix @ torch.diag(signs) / size**0.5


def aliases(state):
    """{alias: canonical key} that a published state dict of these keys has."""
    found = {}
    for key in state:
        parts = key.split(".")
        if parts[0] == "layers" and any(".moe." in other for other in state):
            i, rest = int(parts[1]), ".".join(parts[2:])
            found[f"stack.blocks.{i}.{rest}"] = key
            if i == 0:
                found[f"stack.bootstrap_layer.{rest}"] = key
            else:
                found[f"stack.mid_layers.{i - 1}.block.{rest}"] = key
                found[f"stack.mid_layers.{i - 1}.wrapper.layer.{rest}"] = key
        stack = "mtp_block.reversible_stack."
        first = [f"{stack}blocks.0.block.", f"{stack}bootstrap_layer.block."]
        second = [f"{stack}blocks.1.block."]
        second += [f"{stack}mid_layers.0.{name}.block." for name in ("block", "wrapper.layer")]
        dense = not any(other.startswith(stack) for other in state)
        for name, places, outer in (("attn", first, "attn_block"), ("mlp", second, "mlp_block")):
            if key.startswith(f"mtp_block.{name}."):
                rest = "sublayer." + key.removeprefix(f"mtp_block.{name}.")
                for place in [f"mtp_block.{outer}."] if dense else places:
                    found[place + rest] = key
            if not dense and key.startswith(places[0]):
                for place in places[1:]:
                    found[place + key.removeprefix(places[0])] = key
    return found


def rank_files(state, folder, ranks=8):
    """One file per expert-parallel rank: blocks of experts, most of them padded with zeros to one length."""
    stacked = ("weight_indices", "row_norms", "tqp_A", "tqp_B")
    for rank in range(ranks):
        part = {}
        for key, tensor in state.items():
            if not key.endswith(stacked):
                part[key] = tensor
                continue
            least, more = divmod(len(tensor), ranks)
            start = rank * least + min(rank, more)
            block = tensor[start : start + least + (rank < more)]
            padding = 0 if key.endswith("row_norms") else least + (more > 0) - len(block)
            part[key] = torch.cat([block, torch.zeros_like(tensor[:padding])])
        folder.mkdir(exist_ok=True)
        torch.save({"module": part}, folder / f"mp_rank_{rank:02d}_model_states.pt")
    return folder


def save(state, path):
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, path)
    return path
