"""The training loop: optimizer steps, evaluation, checkpoints, knobs, and a clean stop when asked."""

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
from lightninglm.modeling.selection_noise import SelectionNoise, sampling_temperature
from lightninglm.recipe import RecipeError
from lightninglm.training.evaluate import heldout_loss
from lightninglm.training.interruption import Interruption
from lightninglm.training.knobs import Knobs, KnobsFile, apply_knobs, change_line, changes
from lightninglm.training.non_finite import WEIGHT, GradientWatch, first_fault
from lightninglm.training.saving import StageSaver
from lightninglm.training.schedule import learning_rate_factor, new_tensor_factor, ramped_step_sizes
from lightninglm.training.targets import count_targets

EXIT_NOT_FINITE = 3
"""Exit code of a stage that too many skipped steps in a row have ended."""
WATCHED_STEPS = 2  # of a stage, in which the adapters that move are counted: first A, then A and B


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and where the last checkpoint is."""


class Trainer:
    """
    Runs one stage from `state["step"]` to `state["total_steps"]`.

    One optimizer step is: forward and backward over the accumulation micro-batches, one clip and one update inside
    the engine, then once, outside the graph, the balance rule of the routers on counts summed over all ranks.

    A step whose loss, gradient or layer outputs are not finite on any rank is skipped on all: no weight, moment or
    balance bias moves, the data goes on. `train.max_skipped_steps` of them in a row end the training.

    Args:
        engine: from `distributed.engine.build_engine`.
        recipe: the stage.
        state: `trainer_state.json` as a dict; updated in place.
        batch: positions of the global order -> token ids [len(positions), S].
        heldout: domain -> token ids [n, S].
        saver: of the checkpoints, a `StageSaver`.
        logger: a `MetricsLogger` on rank 0, None elsewhere.
        interruption: asked once a step whether to stop.
        knobs_file: on rank 0, None elsewhere.
    """

    def __init__(
        self,
        engine,
        recipe,
        state: dict[str, Any],
        *,
        batch: Callable[[Iterable[int]], torch.Tensor],
        heldout: dict[str, torch.Tensor],
        saver: StageSaver,
        logger,
        interruption: Interruption,
        knobs_file: KnobsFile | None = None,
    ):
        self.engine = engine
        self.model = engine.module
        self.recipe = recipe
        self.state = state
        self.batch = batch
        self.heldout = heldout
        self.saver = saver
        self.logger = logger
        self.interruption = interruption
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.knobs_file = knobs_file
        self.knobs = Knobs.model_validate(state.setdefault("knobs", {}))
        apply_knobs(engine, self.knobs, recipe.optimizer.clip)
        modules = self.model.named_modules()
        self._stacks = {name: module.reversibility for name, module in modules if hasattr(module, "reversibility")}
        for report in self._stacks.values():
            report.defer_range_errors = True
        self._new_knobs: Knobs | None = None  # read on rank 0, not yet known to the others
        self._turned: dict[str, list[Any]] = {}
        self._skipped_in_row = 0
        self._weights_broken = False
        self._watch: GradientWatch | None = None
        self._watch_gradients()
        self._saved_at = state["step"] if state["step"] else -1

    def train(self) -> bool:
        """
        Trains to the end of the stage. False when an interruption stopped it before; the state is saved then.

        Raises TrainingError after too many skipped steps in a row; the state is saved unless a weight is at fault.
        """
        state, recipe = self.state, self.recipe
        if self._agree(self._own_flags()):
            return False
        while state["step"] < state["total_steps"]:
            started = time.perf_counter()
            values, stop = self._optimizer_step()
            last = state["step"] == state["total_steps"]
            every = recipe.train.merge_adapters_every
            if every is not None and state["step"] % every == 0 and not last:
                values["merged_adapters"] = self._merge_adapters()
            every = self.knobs.evaluate_every or recipe.evaluate.every
            if (last or state["step"] % every == 0) and not self._weights_broken:
                values["heldout"] = losses = self._evaluate()
                state["heldout"] = {name: loss if math.isfinite(loss) else None for name, loss in losses.items()}
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
            given_up = self._skipped_in_row >= recipe.train.max_skipped_steps
            self.interruption.took(step=time.perf_counter() - started)
            every = self.knobs.checkpoint_every or recipe.checkpoint.every
            if (last or stop or given_up or state["step"] % every == 0) and not self._weights_broken:
                self._save()
            if given_up:
                self.saver.finish()
                raise TrainingError(
                    f"{self._skipped_in_row} steps in a row were not finite and not applied, the last one is step "
                    f"{state['step']}: {values['skipped']}. The last checkpoint is step {max(self._saved_at, 0)}"
                )
            if stop and not last:
                return False
        return True

    def _save(self) -> None:
        if self._saved_at != self.state["step"]:
            self.saver.save(self.state)
            self._saved_at = self.state["step"]

    def _own_flags(self) -> list[float]:
        """[asked to stop, knobs were changed, a save has ended] here; summed over ranks they are for `_agree`."""
        if self.knobs_file:
            try:
                self._new_knobs = self.knobs_file.read_if_changed()
            except RecipeError as error:
                self.logger.say(f"knobs unchanged: {error}")
            if self._new_knobs is not None and self._new_knobs.stop:
                self.interruption.ask(f"stop in {self.knobs_file.path}")
        return [float(self.interruption.requested), float(self._new_knobs is not None), float(self.saver.ended)]

    def _agree(self, flags: list[float], summed: bool = False) -> bool:
        """Whether to stop, after all ranks have taken over new knobs and the reason of the rank that was asked."""
        if not summed:
            total = torch.tensor(flags, dtype=torch.float64, device=self.engine.device)
            dist.all_reduce(total)
            flags = total.tolist()
        stop, turned, saved = flags
        if saved:
            self.saver.finish()
        if turned:
            self._turn_knobs()
        if stop:
            reasons = [None] * self.world_size
            dist.all_gather_object(reasons, self.interruption.reason_and_signal())
            self.interruption.take_over(reasons)
        return stop > 0

    def _turn_knobs(self) -> None:
        """All ranks take over the knobs that rank 0 has read; they count from the next step on."""
        read = [self._new_knobs]
        dist.broadcast_object_list(read, src=0)
        self._new_knobs, old = None, self.knobs.values()
        self.knobs = read[0]
        self.state["knobs"] = self.knobs.values()
        apply_knobs(self.engine, self.knobs, self.recipe.optimizer.clip)
        if changed := changes(old, self.state["knobs"]):
            self._turned |= changed
            if self.logger:
                self.logger.say(f"knobs from step {self.state['step'] + 1} on: {change_line(changed)}")

    def _optimizer_step(self) -> tuple[dict[str, Any], bool]:
        """One update. Returns what to log, and whether any rank was asked to stop."""
        started = time.perf_counter()
        state, train = self.state, self.recipe.train
        step = state["step"]
        rates = self._set_learning_rates(step)
        step_sizes = ramped_step_sizes(step, state["ramps"].get("step_size"))
        if step_sizes is not None:
            self.model.set_step_size(step_sizes)

        # [next-token, second-token, aux, total, stop, knobs, saved, layer errors]: over micro-batches, then over ranks
        sums = torch.zeros(8, dtype=torch.float64, device=self.engine.device)
        for report in self._stacks.values():
            report.range_errors.clear()
        micro_steps = micro_batches(
            0, train.global_batch, train.micro_batch, self.rank, self.world_size, base=state["data"]["position"]
        )
        rows = [list(positions) for positions in micro_steps]
        batches = [self.batch(positions).to(self.engine.device) for positions in rows]
        counts = sum(count_targets(ids, self.model.config) for ids in batches)
        dist.all_reduce(counts)
        # The engine averages over micro-batches and ranks; dividing by the mean count makes that a mean over targets.
        next_items, second_items = (counts / (len(batches) * self.world_size)).clamp(min=1).unbind()
        for micro_step, ids in enumerate(batches, start=1):
            self.model.model.selection_noise = self._selection_noise(step, rows[micro_step - 1])
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
        layer_errors = [f"{name}: {error}" for name, report in self._stacks.items() for error in report.range_errors]
        sums[4:] = torch.tensor([*self._own_flags(), len(layer_errors)])
        dist.all_reduce(sums)
        next_token, second_token, aux, loss, *flags, wrong_layers = sums.tolist()
        mean = 1 / (len(batches) * self.world_size)
        if wrong_layers or not math.isfinite(loss):
            self.engine.gradient_norm.discard()
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
            "expert_load": expert_load(picks) if updated else {},
            "reversibility": self._reversibility(),
            "peak_memory_bytes": peak_memory_bytes(self.engine.device),
        }
        if movement is not None and updated:
            values["adapters_moved"] = movement.counts(picks)
        if updated:
            self._skipped_in_row, self._weights_broken = 0, False
        else:
            values["skipped"] = self._explain_skip(values, layer_errors)
        self._watch_gradients()
        stop = self._agree(flags, summed=True)
        if self._turned:
            values["knobs"], self._turned = self._turned, {}
        return values, stop

    def _explain_skip(self, values: dict[str, Any], layer_errors: list[str]) -> str:
        """Counts a skipped step, finds what was wrong in it (a collective), and says so."""
        self._skipped_in_row += 1
        fault = first_fault(self.model, self._watch, layer_errors)
        self._weights_broken = fault is not None and fault.kind == WEIGHT
        norms = ", ".join(f"{role} {norm:.3g}" for role, norm in values["gradient_norm"].items())
        text = f"loss {values['loss']:.4g}, gradient norm {norms}"
        if fault is not None:
            text += f"; first non-finite: {fault}"
        if self.logger:
            self.logger.say(
                f"step {values['step']} skipped, {self._skipped_in_row} in a row of "
                f"{self.recipe.train.max_skipped_steps} that end training: {text}"
            )
        return text

    def _watch_gradients(self) -> None:
        """Watches the gradients of every single rank while steps are skipped, or when one skipped step is the end."""
        needed = self._skipped_in_row > 0 or self.recipe.train.max_skipped_steps == 1
        if self._watch and not needed:
            self._watch.close()
            self._watch = None
        elif needed and not self._watch:
            self._watch = GradientWatch(self.model)
        elif self._watch:
            self._watch.clear()

    def _selection_noise(self, step: int, rows: list[int]) -> SelectionNoise | None:
        """What samples experts in this step, for the sequences at these positions of the global order."""
        sampled = self.recipe.train.sampled_selection
        if sampled is None or step >= sampled.steps:
            return None
        temperature = sampling_temperature(step, sampled.steps, sampled.temperature)
        return SelectionNoise.of_sequences(
            torch.tensor(rows, device=self.engine.device),
            self.recipe.data.sequence_length,
            temperature,
            self.state["seed"],
        )

    def _set_learning_rates(self, step: int) -> dict[str, float]:
        """Sets every parameter group's rate for this step; returns them by role for the log."""
        optimizer, state = self.recipe.optimizer, self.state
        parent_rate = state.get("parent_learning_rate")
        factor = learning_rate_factor(
            step,
            state["total_steps"],
            self.recipe.schedule_in_steps,
            None if parent_rate is None else parent_rate / optimizer.lr,
        )
        if self.knobs.learning_rate_factor is not None:
            factor *= self.knobs.learning_rate_factor
        state["learning_rate"] = optimizer.lr * factor
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
