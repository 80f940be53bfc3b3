"""The training loop: optimizer steps, evaluation, checkpoints, and a clean stop when asked."""

import math
import resource
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from lightninglm.data.order import micro_batches
from lightninglm.distributed.adapters import AdapterMovement, merge_adapters
from lightninglm.distributed.expert_bases import hash_expert_bases
from lightninglm.modeling.parameter_roles import ADAPTERS
from lightninglm.training.evaluate import heldout_loss
from lightninglm.training.interruption import Interruption
from lightninglm.training.schedule import learning_rate_factor, new_tensor_factor, ramped_step_sizes
from lightninglm.training.targets import count_targets

WATCHED_STEPS = 2  # of a stage, in which the adapters that move are counted: first A, then A and B


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and where the last checkpoint is."""


class Trainer:
    """
    Runs one stage from `state["step"]` to `state["total_steps"]`.

    One optimizer step is: forward and backward over the accumulation micro-batches, one clip and one update inside
    the engine, then once, outside the graph, the balance rule of the routers on counts summed over all ranks.

    Args:
        engine: from `distributed.engine.build_engine`.
        recipe: the stage.
        state: `trainer_state.json` as a dict; updated in place.
        batch: positions of the global order -> token ids [len(positions), S].
        heldout: domain -> token ids [n, S].
        save: called with the state when a checkpoint is due.
        logger: a `MetricsLogger` on rank 0, None elsewhere.
        interruption: asked once a step whether to stop.
    """

    def __init__(
        self,
        engine,
        recipe,
        state: dict[str, Any],
        *,
        batch: Callable[[Iterable[int]], torch.Tensor],
        heldout: dict[str, torch.Tensor],
        save: Callable[[dict[str, Any]], None],
        logger,
        interruption: Interruption,
    ):
        self.engine = engine
        self.model = engine.module
        self.recipe = recipe
        self.state = state
        self.batch = batch
        self.heldout = heldout
        self.save = save
        self.logger = logger
        self.interruption = interruption
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._saved_at = state["step"] if state["step"] else -1

    def train(self) -> bool:
        """Trains to the end of the stage. False when an interruption stopped it before; the state is saved then."""
        state, recipe = self.state, self.recipe
        while state["step"] < state["total_steps"]:
            values, stop = self._optimizer_step()
            last = state["step"] == state["total_steps"]
            every = recipe.train.merge_adapters_every
            if every is not None and state["step"] % every == 0 and not last:
                values["merged_adapters"] = self._merge_adapters()
            if last or state["step"] % recipe.evaluate.every == 0:
                values["heldout"] = state["heldout"] = self._evaluate()
            state["finished"] = last
            if self.logger:
                try:
                    self.logger.step(values)
                except OSError as error:  # a full disk: all ranks stop together, at the next step
                    self.interruption.ask(f"{self.logger.path}: {error.strerror}")
                if "heldout" in values:
                    losses = "  ".join(f"{name} {loss:.4f}" for name, loss in values["heldout"].items())
                    self.logger.say(f"step {state['step']}: held-out loss  {losses}")
                for line in adapter_lines(values):
                    self.logger.say(f"step {state['step']}: {line}")
            if last or stop or state["step"] % recipe.checkpoint.every == 0:
                self._save()
            if stop and not last:
                return False
        return True

    def _save(self) -> None:
        if self._saved_at != self.state["step"]:
            self.save(self.state)
            self._saved_at = self.state["step"]

    def _optimizer_step(self) -> tuple[dict[str, Any], bool]:
        """One update. Returns what to log, and whether any rank was asked to stop."""
        started = time.perf_counter()
        state, train = self.state, self.recipe.train
        step = state["step"]
        rates = self._set_learning_rates(step)
        step_sizes = ramped_step_sizes(step, state["ramps"].get("step_size"))
        if step_sizes is not None:
            self.model.set_step_size(step_sizes)

        # [next-token, second-token, aux, total, asked to stop], summed over micro-batches, then over ranks
        sums = torch.zeros(5, dtype=torch.float64, device=self.engine.device)
        micro_steps = micro_batches(
            0, train.global_batch, train.micro_batch, self.rank, self.world_size, base=state["data"]["position"]
        )
        batches = [self.batch(positions).to(self.engine.device) for positions in micro_steps]
        counts = sum(count_targets(ids, self.model.config) for ids in batches)
        dist.all_reduce(counts)
        # The engine averages over micro-batches and ranks; dividing by the mean count makes that a mean over targets.
        next_items, second_items = (counts / (len(batches) * self.world_size)).clamp(min=1).unbind()
        for micro_step, ids in enumerate(batches, start=1):
            output = self.engine(
                input_ids=ids, labels=ids, num_items_in_batch=next_items, num_second_items_in_batch=second_items
            )
            self.engine.backward(output.loss)
            parts = (output.next_token_loss, output.second_token_loss, output.aux_loss, output.loss)
            for i, part in enumerate(parts):
                if part is not None:
                    sums[i] += part.detach().double()
            if micro_step < len(batches):
                self.engine.step()  # between micro-batches it only counts
        sums[4] = float(self.interruption.requested)
        dist.all_reduce(sums)
        next_token, second_token, aux, loss, stop = sums.tolist()
        mean = 1 / (len(batches) * self.world_size)
        if not math.isfinite(loss):
            raise TrainingError(
                f"loss is not finite at step {step + 1}: next token {next_token * mean}, second token "
                f"{second_token * mean}, auxiliary {aux * mean}. Nothing was updated; the last checkpoint is step "
                f"{max(self._saved_at, 0)}"
            )
        watched = step < WATCHED_STEPS and self.model.config.expert_quantization is not None
        movement = AdapterMovement(self.model) if watched else None
        skipped = self.engine.skipped_steps
        self.engine.step()
        updated = self.engine.skipped_steps == skipped
        picks = self.model.after_optimizer_step(reduce=dist.all_reduce, update=updated)

        tokens = train.global_batch * self.recipe.data.sequence_length
        state["step"] += 1
        state["tokens"] += tokens
        state["lineage_tokens"] += tokens
        state["skipped_steps"] += not updated
        state["data"]["position"] += train.global_batch
        seconds = time.perf_counter() - started
        state["wall_seconds"] += seconds
        values = {
            "step": state["step"],
            "loss": loss * mean,
            "next_token_loss": next_token * mean,
            "second_token_loss": second_token * mean,
            "aux_loss": aux * mean,
            "learning_rate": rates,
            "gradient_norm": self.engine.gradient_norm.values(),
            "tokens": state["tokens"],
            "tokens_per_second": tokens / seconds,
            "skipped_steps": state["skipped_steps"],
            "expert_load": expert_load(picks),
            "reversibility": self._reversibility(),
            "peak_memory_bytes": peak_memory_bytes(self.engine.device),
        }
        if movement is not None:
            values["adapters_moved"] = movement.counts(picks)
        return values, stop > 0

    def _set_learning_rates(self, step: int) -> dict[str, float]:
        """Sets every parameter group's rate for this step; returns them by role for the log."""
        optimizer, state = self.recipe.optimizer, self.state
        factor = learning_rate_factor(step, state["total_steps"], self.recipe.schedule)
        warmup = new_tensor_factor(step, state["new_tensors"]["warmup_steps"])
        restart = new_tensor_factor(step - state["adapters_merged_at"], self.recipe.train.merge_adapters_warmup)
        rates = {}
        for group in self.engine.optimizer.param_groups:
            rate = optimizer.lr * getattr(optimizer.groups, group["role"]) * factor
            group["lr"] = rate * warmup if group["new"] else rate
            if group["role"] == ADAPTERS and state["adapters_merged_at"]:
                group["lr"] *= restart
            rates[group["role"] + ("_new" if group["new"] else "")] = group["lr"]
        return rates

    def _merge_adapters(self) -> dict[str, float]:
        """Merges the adapters into their bases, and notes which bases they go on with and since when."""
        report = merge_adapters(self.engine)
        self.state["expert_bases"] = hash_expert_bases(self.model)
        self.state["adapters_merged_at"] = self.state["step"]
        return report

    def _reversibility(self) -> dict[str, float]:
        """Checked backward passes so far, and the size of the streams: their growth shows an unstable stack early."""
        if self.model.config.stack == "sequential":
            return {}
        report = self.model.model.reversibility
        return {
            "passes_verified": report.passes_verified,
            "largest_state": report.largest_state,
            "stream_mean_rms": float(report.mean_rms),
            "stream_difference_rms": float(report.difference_rms),
        }

    def _evaluate(self) -> dict[str, float]:
        return heldout_loss(
            self.model,
            self.heldout,
            micro_batch=self.recipe.train.micro_batch,
            rank=self.rank,
            world_size=self.world_size,
            reduce=dist.all_reduce,
            device=self.engine.device,
        )


def adapter_lines(values: dict[str, Any]) -> list[str]:
    """What a step's values say about adapters, for people."""
    lines = []
    if moved := values.get("adapters_moved"):
        why = "" if moved["B"] else " (while A is zero, B has no gradient)"
        lines.append(
            f"adapters of experts with tokens {moved['with_tokens']:,}: A moved in {moved['A']:,}, B in {moved['B']:,}"
            f"{why}; without tokens {moved['without_tokens']:,} moved"
        )
    if merged := values.get("merged_adapters"):
        lines.append(
            f"adapters merged into their bases: {merged['signal_to_noise_db']:.1f} dB at least, weights changed by "
            f"{merged['relative_change']:.1e} at most"
        )
    return lines


def expert_load(picks: list[torch.Tensor]) -> dict[str, float]:
    """
    How evenly the routers of all layers spread one step's picks; empty for a dense model.

    Args:
        picks: per router, the picks [E] of each expert.
    Returns:
        min, max: smallest and largest share of a layer's picks times E (1 is uniform); dead: experts without any
        pick, over all layers; top10_share: picks of the ten busiest experts of a layer, mean over layers.
    """
    if not picks:
        return {}
    shares = [count.double() / count.sum().clamp(min=1) for count in picks]
    return {
        "min": min(float(share.min() * len(share)) for share in shares),
        "max": max(float(share.max() * len(share)) for share in shares),
        "dead": sum(int((count == 0).sum()) for count in picks),
        "top10_share": sum(float(share.topk(min(10, len(share))).values.sum()) for share in shares) / len(shares),
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory this rank has held: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
