"""A plain AdamW loop on one process that starts from checkpoints and writes them, for properties of resumed growth."""

import torch
from small_checkpoints import VOCABULARY

from growth.receipt import load_model
from lightninglm.checkpoint import CheckpointReader, CheckpointWriter
from lightninglm.checkpoint.model_tensors import model_tensors
from lightninglm.training.schedule import new_tensor_factor, ramped_step_sizes

LEARNING_RATE, BETAS, EPS = 1e-2, (0.9, 0.95), 1e-10
PARTS = ("exp_avg", "exp_avg_sq")


def load(folder):
    """Model, optimizer and trainer state of a checkpoint."""
    model = load_model(folder).train()
    with CheckpointReader(folder) as reader:
        state = reader.trainer_state
        trained = [item for item in model_tensors(model) if item.tensor.requires_grad]
        new = set(state["new_tensors"]["names"])
        groups = [
            {"params": [item.tensor for item in trained if (item.name in new) == fresh], "new": fresh}
            for fresh in (0, 1)
        ]
        optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=0.0)
        for item in trained:
            optimizer.state[item.tensor] = {"step": torch.tensor(float(state["adam_step"]))}
            for part in PARTS:
                rows = [reader.read(f"{name}.{part}") for name in item.disk_names]
                optimizer.state[item.tensor][part] = rows[0] if item.experts is None else torch.stack(rows)
    return model, optimizer, state


def backward(model, step):
    """Gradients of step `step`, which has a batch of its own. Every trained parameter has one."""
    ids = torch.randint(model.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(step))
    memory = torch.randn(2, model.config.hidden_size, generator=torch.Generator().manual_seed(step))
    model(input_ids=ids.clamp(max=VOCABULARY - 1), labels=ids, prev_memory=memory).loss.backward()
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def train(folder, steps, target):
    """Goes on from a checkpoint for some steps and writes another one."""
    model, optimizer, state = load(folder)
    for _ in range(steps):
        step = state["step"]
        sizes = ramped_step_sizes(step, state["ramps"].get("step_size"))
        if sizes is not None:
            model.set_step_size(sizes)
        for group in optimizer.param_groups:
            warmup = new_tensor_factor(step, state["new_tensors"]["warmup_steps"]) if group["new"] else 1.0
            group["lr"] = LEARNING_RATE * warmup
        backward(model, state["lineage_tokens"] + step)
        optimizer.step()
        optimizer.zero_grad()
        model.after_optimizer_step()
        state["step"] += 1
        state["adam_step"] += 1
    with CheckpointWriter(target) as writer:
        for item in model_tensors(model):
            for name, value in item.split(item.tensor.detach()):
                writer.add(name, value)
            if item.tensor.requires_grad:
                for part in PARTS:
                    for name, value in item.split(optimizer.state[item.tensor][part]):
                        writer.add(f"{name}.{part}", value)
        return writer.commit(model.config.to_dict(), state, tokenizer_folder=folder)
