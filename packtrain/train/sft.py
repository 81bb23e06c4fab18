"""Supervised fine-tuning: TRL's SFTTrainer with packtrain's steps, exact normalisation and checkpoints.

What is changed, and nothing else: a loader item is a whole optimizer step (any number of micro-batches); the loss is Σ of
token losses over the global batch / Σ of its trained tokens, counted as tensors and reduced over ranks before the first
forward pass, plus the weighted loss of routers where one is asked for; evaluation is exact over the set, and of the tokens
alone; checkpoints are complete or absent.
"""

from __future__ import annotations

import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from trl import SFTConfig, SFTTrainer
from trl.trainer.utils import compute_flops_per_token, get_peak_flops_per_device

from packtrain.config.schema import Objective
from packtrain.data.dataset import Document
from packtrain.run_folder import write_json
from packtrain.train import checkpoint
from packtrain.train.callbacks import TerminalProgress
from packtrain.train.forward import add_loss_sum
from packtrain.train.loader import MicroBatch, Steps, step_loader
from packtrain.train.model import base_model
from packtrain.train.preflight import FirstStepWatch
from packtrain.train.routers import router_loss, without_labels
from packtrain.train.stop import StopRequest

_PROBE_TOKENS = 64
# TRL wants a datasets.Dataset to look at; ours are never read through it.
_PLACEHOLDER = {"input_ids": [[0]], "labels": [[0]]}


class PackedSFTTrainer(SFTTrainer):
    """Trains `model` over `steps`; `evaluation` is run every eval_steps. See the module's docstring for what differs."""

    model: Any  # never None here
    state: Any

    def __init__(
        self,
        model: PreTrainedModel,
        args: SFTConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        steps: Steps,
        evaluation: Steps | None,
        objective: Objective,
        stop: StopRequest,
        checkpoints: Path,
        origin: dict[str, Any],
        keep_checkpoints: int | None = None,
        first_step: int = 0,
        loader_workers: int = 0,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        text_config = base_model(model).config.get_text_config()
        routers = getattr(text_config, "output_router_logits", None)
        super().__init__(
            model=model,
            args=args,
            processing_class=tokenizer,
            data_collator=cast(Any, list),
            train_dataset=datasets.Dataset.from_dict(_PLACEHOLDER),
            eval_dataset=datasets.Dataset.from_dict(_PLACEHOLDER) if evaluation is not None else None,
            callbacks=callbacks,
        )
        if routers is not None:  # TRL turns them on for its auxiliary loss; ours asks for them itself
            text_config.output_router_logits = routers
        self.routers = router_loss(base_model(self.model), objective.router_aux_coef)
        self.remove_callback(PrinterCallback)
        add_loss_sum(base_model(self.model), loss=objective.loss, neftune_alpha=objective.neftune_alpha)
        self.steps, self._evaluation, self._stop = steps, evaluation, stop
        self._first_step, self._loader_workers = first_step, loader_workers
        self._checkpoints, self._keep_checkpoints, self._origin = checkpoints, keep_checkpoints, origin
        self.watch: FirstStepWatch | None = None
        self._window = _Window()
        self._flops_share = self._flops_share_of_a_token()

    # -- what a step is made of

    def get_train_dataloader(self) -> DataLoader:
        """All steps of the run as one "epoch" of transformers' loop, from the resumed one on."""
        return step_loader(self.steps, first=self._first_step, workers=self._loader_workers)

    def _get_num_items_in_batch(
        self, batch_samples: list[list[MicroBatch]], device: torch.device
    ) -> torch.Tensor | None:
        """Trained tokens of the global step. The same reduction counts what is logged, and agrees on stopping."""
        if not batch_samples:
            return None
        batches = batch_samples[0]
        counts = [
            sum(column) for column in zip(*((b.trained, b.tokens, b.slots, b.examples) for b in batches), strict=True)
        ]
        total = torch.tensor([*counts, *self._stop.counts()], device=device)
        total = cast(torch.Tensor, self.accelerator.reduce(total, reduction="sum"))
        self._window.open(total)
        return total[0]

    def training_step(
        self, model: torch.nn.Module, inputs: list[MicroBatch], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Forward and backward over all micro-batches; gradients are exchanged with the last one only.

        Returns this rank's part of the loss, scaled so that the mean over ranks is the global token mean.
        """
        if self.watch is not None and (rows := [batch.inputs for batch in inputs if "segments" in batch.inputs]):
            self.watch.check(self.model, self._prepare_inputs(rows[0]))
            self.watch = None
        model.train()
        assert num_items_in_batch is not None
        # DDP averages gradients over ranks; clamped so that a step without trained tokens is a zero and not 0 / 0
        scale = self.accelerator.num_processes / num_items_in_batch.clamp(min=1)
        total = torch.zeros((), device=self.args.device)
        if self.routers is not None:
            self.routers.open_step(inputs, self._run_without_labels, self.accelerator)
        for number, batch in enumerate(inputs, start=1):
            last = number == len(inputs)
            with nullcontext() if last else self.accelerator.no_sync(model):
                with self.maybe_activation_offload_context:
                    loss = self._loss_of(model, batch, scale)
                self.accelerator.backward(loss)
            total += loss.detach()
        _, tokens, _, _, *signals = self._window.last.tolist()
        # with the step and not with the logged line: a checkpoint may lie between two lines
        self.state.num_input_tokens_seen += tokens
        self._stop.agree(*signals)
        return total

    def _loss_of(self, model: torch.nn.Module, batch: MicroBatch, scale: torch.Tensor) -> torch.Tensor:
        """The token losses of a micro-batch times `scale`, and its part of the routers' loss, scaled as the step's is."""
        inputs = self._prepare_inputs(batch.inputs)
        if self.routers is None:
            return model(**inputs, loss_sum=True) * scale
        with self.routers.watching(real=batch.examples > 0) as loads:
            loss = model(**inputs, loss_sum=True) * scale
        return loss + self.routers.part(loads) * self.accelerator.num_processes

    def _run_without_labels(self, batch: MicroBatch) -> None:
        self.model(**self._prepare_inputs(without_labels(batch.inputs)), loss_sum=True)

    def probe(self) -> dict[str, Any]:
        """Inputs of one short real document with every token trained, to check the output head with."""
        longest = int(self.steps.data.lengths.argmax())
        ids = self.steps.data[longest].input_ids[:_PROBE_TOKENS]
        document = Document(ids, np.ones(len(ids), dtype=bool))
        return self._prepare_inputs(self.steps.collate([document]).inputs)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted here: the logged MFU comes from token counts."""
        return 0

    # -- what is reported

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Adds the exact counts of the steps since the last line to a training line."""
        self.state.epoch = self.steps.schedule.epoch_of(self.state.global_step)
        if "loss" in logs:
            counts, seconds = self._window.close()
            _, tokens, slots, examples, _, _ = counts.tolist()
            rate = tokens / max(seconds, 1e-9)
            logs["tokens"] = self.state.num_input_tokens_seen
            logs["tokens_per_second"] = rate
            logs["padding_fraction"] = 1 - tokens / max(slots, 1)
            logs["examples"] = examples
            logs["mfu"] = rate * self._flops_share if self._flops_share else None
            if self.routers is not None:
                logs["router_aux_loss"] = self.routers.value()
        super().log(logs, start_time)

    def _flops_share_of_a_token(self) -> float | None:
        """Model FLOPs of a token at the mean document length / peak FLOPs of all devices in a second, by TRL's tables.

        None where TRL knows neither the device nor the architecture.
        """
        if self.args.device.type != "cuda":
            return None
        precision = "bfloat16" if self.args.bf16 else str(base_model(self.model).dtype).removeprefix("torch.")
        peak = get_peak_flops_per_device(self.accelerator, precision)
        try:
            flops = compute_flops_per_token(base_model(self.model).config, int(self.steps.data.lengths.mean()))
        except (AttributeError, RuntimeError, TypeError):  # its formula asks for fields that not every config has
            return None
        return flops / (peak * self.accelerator.num_processes) if peak else None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class; the live bar is taken down also when training ends by an error."""
        try:
            return super().train(*args, **kwargs)
        finally:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, TerminalProgress):
                    callback.close()

    @torch.no_grad()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Mean loss per trained token over the whole evaluation set, whatever the layout and the number of ranks."""
        assert self._evaluation is not None
        started = time.perf_counter()
        self.model.eval()
        device = self.args.device
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        trained = torch.zeros((), dtype=torch.float64, device=device)
        for batches in step_loader(self._evaluation, workers=self._loader_workers):
            for batch in batches:
                loss_sum += self.model(**self._prepare_inputs(batch.inputs), loss_sum=True).double()
                trained += batch.trained
        loss_sum, trained = self.accelerator.reduce(torch.stack([loss_sum, trained]), reduction="sum")
        metrics = {
            f"{metric_key_prefix}_loss": (loss_sum / trained.clamp(min=1)).item(),
            f"{metric_key_prefix}_tokens": int(trained.item()),
        }
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.model.train()
        self._window.leave_out(time.perf_counter() - started)
        return metrics

    # -- what is kept

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Writes the checkpoint of this step aside and renames it when all ranks have written."""
        step, main = self.state.global_step, self.accelerator.is_main_process
        target = checkpoint.folder_of(self._checkpoints, step)
        staging = checkpoint.staging_of(self._checkpoints, step)
        if main:
            shutil.rmtree(staging, ignore_errors=True)  # an interrupted write, maybe of more ranks than these
            staging.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        self.save_model(str(staging), _internal_call=True)
        self._save_optimizer_and_scheduler(str(staging))
        self._save_rng_state(str(staging))
        if main:
            for callback in (*self.callback_handler.callbacks, self.control):
                if isinstance(callback, ExportableState):
                    self.state.stateful_callbacks[type(callback).__name__] = callback.state()
            self.state.save_to_json(str(staging / TRAINER_STATE_NAME))
            write_json(staging / checkpoint.ORIGIN, self._origin)
        self.accelerator.wait_for_everyone()
        if main:
            checkpoint.complete(staging, target)
            best = self.state.best_global_step
            kept = checkpoint.folder_of(self._checkpoints, best) if best else None
            checkpoint.prune(self._checkpoints, self._keep_checkpoints, kept)
        self.accelerator.wait_for_everyone()

    def load_best_weights(self) -> None:
        """Puts the weights of the evaluation with the lowest loss back into the model."""
        if self.state.best_global_step and self.state.best_global_step != self.state.global_step:
            self.state.best_model_checkpoint = str(checkpoint.folder_of(self._checkpoints, self.state.best_global_step))
            self._load_best_model()

    def _send_telemetry(self) -> None:
        """packtrain reports to nobody."""


class _Window:
    """Counts and time of the steps since the last logged line."""

    def __init__(self) -> None:
        self.last = torch.zeros(6, dtype=torch.int64)
        self._sum = torch.zeros(6, dtype=torch.int64)
        self._since: float | None = None

    def open(self, counts: torch.Tensor) -> None:
        self.last = counts
        self._sum = self._sum.to(counts.device) + counts
        self._since = time.perf_counter() if self._since is None else self._since

    def leave_out(self, seconds: float) -> None:
        self._since = None if self._since is None else self._since + seconds

    def close(self) -> tuple[torch.Tensor, float]:
        """(counts, seconds), and starts anew."""
        counts, seconds = self._sum, time.perf_counter() - (self._since or time.perf_counter())
        self._sum, self._since = torch.zeros_like(self._sum), None
        return counts, seconds
