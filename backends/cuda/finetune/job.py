"""A job file made ready to run: model, adapter, data, and the place where a previous run stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backends.cuda.finetune.adapter import attach, write_adapter
from backends.cuda.finetune.assembly import SharedWeights, build_engine
from backends.cuda.finetune.checkpoint import CheckpointFolder, CheckpointWriter, Restored
from backends.cuda.finetune.conversation import read_datasets
from backends.cuda.finetune.dropout import seeded
from backends.cuda.finetune.engine import FinetuneEngine
from backends.cuda.finetune.feed import SampleFeed
from backends.cuda.finetune.job_file import JobFile
from backends.cuda.finetune.layer_weights import SlotMemory
from backends.cuda.finetune.micro_batch import Sample
from backends.cuda.finetune.optimizer_step import UnitSettings
from backends.cuda.finetune.recipe import Recipe
from backends.cuda.finetune.step_report import StepReport
from backends.cuda.finetune.tokens import ByteTokenizer, ChatTokenizer, TemplateTokenizer, packed, samples_of
from backends.cuda.finetune.trainer_log import TrainerLog
from backends.cuda.finetune.unit_fit import UnitFit, fit_units
from harli_core.errors import JobError

RESUMED_FROM = ("identity", "micro_batch_tokens", "head_parts", "log_history")
"""What a checkpoint says of its job, beside step and tokens."""

GPU_PAD_MULTIPLE = 64
"""Lengths are rounded up to this on a GPU, so that shapes come again and graphs serve them."""


@dataclass(frozen=True, slots=True)
class ReadyJob:
    """An engine at the step where the job goes on. ``fit`` is how units were cut for the GPU, where they were."""

    job: JobFile
    engine: FinetuneEngine
    log: TrainerLog
    resumed_step: int
    fit: UnitFit | None

    def write_adapter(self) -> Path:
        """Write the trained adapter into the output directory; raises `JobError` where the disk refuses."""
        folder = Path(self.job.output_dir)
        try:
            write_adapter(folder, self.engine.model.peft_model, self.engine.states.masters())
        except OSError as error:
            raise JobError(
                f"{folder}: cannot write the adapter ({error.strerror}); the last checkpoint has it too"
            ) from None
        return folder


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """Everything of a job that can be had before its weights have a place; `start` gives them one."""

    job: JobFile
    device: str
    feed: SampleFeed
    recipe: Recipe
    peft_model: Any
    checkpoints: CheckpointFolder
    restored: Restored | None
    identity: dict[str, Any]

    @property
    def layers(self) -> int:
        """Layers of the finetuned model."""
        return int(self.peft_model.config.num_hidden_layers)

    def start(
        self,
        on_step: Callable[[StepReport], None] | None = None,
        *,
        window_layers: int | None = None,
        slot_memory: SlotMemory | None = None,
        shared: SharedWeights | None = None,
    ) -> ReadyJob:
        """The engine at the step where the job goes on; the places of the weights are those of `build_engine`.

        Raises `JobError` or `OutOfMemoryError`.
        """
        import torch

        job, feed, recipe, restored = self.job, self.feed, self.recipe, self.restored
        log = TrainerLog(Path(job.output_dir), recipe.max_steps, feed.steps_per_epoch)

        def facts(step: int) -> dict[str, Any]:
            history = [*log.restored, *(log.entry(report) for report in engine.reports.up_to(step))]
            cursor = feed.cursor(step)
            return {
                "identity": self.identity,
                "micro_batch_tokens": feed.micro_batch_tokens,
                "head_parts": engine.settings.head_parts,
                "data_cursor": {"epoch": cursor.epoch, "first_sample": cursor.first},
                "rng": {"seed": job.seed, "next_step": step},
                "learning_rate": recipe.rate_at(step),
                "log_history": history,
            }

        def told(report: StepReport) -> None:
            log.append(report)
            if on_step is not None:
                on_step(report)

        writer = CheckpointWriter(self.checkpoints, self.peft_model, job.save_steps, facts)
        engine = build_engine(
            self.peft_model,
            feed,
            recipe,
            device=self.device,
            window_layers=window_layers,
            shared=shared,
            slot_memory=slot_memory,
            settings=UnitSettings(
                recompute=job.recompute,
                group=job.micro_batches_at_once,
                head_parts=1 if restored is None else int(restored.facts["head_parts"]),
            ),
            checkpoints=writer,
            on_step=told,
        )
        window = engine.model.sliding_window()
        if window is not None and job.cutoff_len > window:
            raise JobError(f"cutoff_len = {job.cutoff_len} exceeds the model's sliding window of {window} tokens")
        fit = None
        if restored is not None:
            engine.states.restore(restored.tensors, restored.source)
            engine.resume_at(restored.step, restored.tokens)
            writer.resumed(restored.step)
        elif self.device == "cuda" and job.micro_batch_tokens is None:
            fit = fit_units(engine, feed, job.unit_ms, job.cutoff_len, torch.cuda.Stream())
        log.begin([] if restored is None else restored.facts["log_history"])
        return ReadyJob(job, engine, log, 0 if restored is None else restored.step, fit)


def load(job: JobFile, device: str) -> LoadedJob:
    """Load and check everything but the places of the weights; raises `ConfigError` or `JobError`."""
    import torch

    tokenizer = _tokenizer(job)
    feed = SampleFeed(
        _samples(job, tokenizer),
        job.batch_samples,
        job.micro_batch_tokens or job.per_device_train_batch_size * job.cutoff_len,
        seed=job.seed,
        shuffle=not job.disable_shuffling,
        pad_multiple=GPU_PAD_MULTIPLE if device == "cuda" else 1,
    )
    recipe = job.recipe(feed.steps_per_epoch)
    output = Path(job.output_dir)
    checkpoints = CheckpointFolder(output, job.save_total_limit)
    restored = _newest(job, checkpoints)
    identity = _identity(job, feed, recipe)
    if restored is not None:
        _check_same(restored, identity, output)
        feed.micro_batch_tokens = int(restored.facts["micro_batch_tokens"])
    model = _model(job)
    if tokenizer.vocabulary > model.config.vocab_size:
        raise JobError(
            f"the tokenizer has {tokenizer.vocabulary} tokens, the model {model.config.vocab_size}: "
            "they do not belong together"
        )
    with seeded(job.seed, torch.device("cpu")):  # the first values of the LoRA matrices
        peft_model = attach(model, _lora(job))
    return LoadedJob(job, device, feed, recipe, peft_model, checkpoints, restored, identity)


def prepare(job: JobFile, device: str, on_step: Callable[[StepReport], None] | None = None) -> ReadyJob:
    """Load and check everything that can be wrong before the first step; raises `ConfigError` or `JobError`."""
    return load(job, device).start(on_step, window_layers=job.window_layers)


def _tokenizer(job: JobFile) -> ChatTokenizer:
    if job.tokenizer == "byte":
        return ByteTokenizer()
    import transformers

    _model_folder(job)
    try:
        return TemplateTokenizer(
            transformers.AutoTokenizer.from_pretrained(job.model_name_or_path, local_files_only=True)
        )
    except (OSError, ValueError, KeyError) as error:
        raise JobError(
            f"{job.model_name_or_path}: no tokenizer can be loaded ({' '.join(str(error).split())})"
        ) from None


def _samples(job: JobFile, tokenizer: ChatTokenizer) -> list[Sample]:
    conversations = read_datasets(Path(job.dataset_dir), job.datasets, job.max_samples)
    samples = samples_of(
        conversations,
        tokenizer,
        job.cutoff_len,
        overlong=job.overlong,
        train_on_prompt=job.train_on_prompt,
        mask_history=job.mask_history,
    )
    if not samples:
        raise JobError(
            f"every sample is longer than cutoff_len = {job.cutoff_len} and was dropped: nothing is left to train on"
        )
    return packed(samples, job.cutoff_len, apart=job.neat_packing) if job.packing else samples


def _model(job: JobFile) -> Any:
    import torch
    import transformers

    folder = _model_folder(job)
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16 if job.bf16 else torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise JobError(f"{folder}: the model cannot be loaded ({' '.join(str(error).split())})") from None


def _model_folder(job: JobFile) -> Path:
    folder = Path(job.model_name_or_path)
    if not (folder / "config.json").is_file():
        raise JobError(f"model_name_or_path: {folder} is no folder of a model (no config.json in it)")
    return folder


def _lora(job: JobFile) -> Any:
    import peft

    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=job.model_name_or_path,
        r=job.lora_rank,
        lora_alpha=job.lora_alpha if job.lora_alpha is not None else 2 * job.lora_rank,
        lora_dropout=job.lora_dropout,
        target_modules=job.targets,
        use_rslora=job.use_rslora,
        use_dora=job.use_dora,
    )


def _identity(job: JobFile, feed: SampleFeed, recipe: Recipe) -> dict[str, Any]:
    """What must not change between a run and its resumption."""
    data = {name: value for name, value in feed.fingerprint().items() if name != "micro_batch_tokens"}
    lora = {
        name: getattr(job, name)
        for name in ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_rslora", "use_dora", "bf16")
    }
    return {"data": data, "recipe": asdict(recipe), "lora": lora, "model": job.model_name_or_path}


def _newest(job: JobFile, checkpoints: CheckpointFolder) -> Restored | None:
    steps = checkpoints.steps()
    if not steps:
        return None
    if job.overwrite_output_dir:
        for step in steps:
            shutil.rmtree(checkpoints.path(step))
        return None
    return checkpoints.read(steps[-1])


def _check_same(restored: Restored, identity: dict[str, Any], output: Path) -> None:
    lacking = [name for name in RESUMED_FROM if name not in restored.facts]
    if lacking or not isinstance(restored.facts["identity"], dict):
        raise JobError(
            f"{restored.source}: cannot read the checkpoint (its state has no {(lacking or ['identity'])[0]})"
        )
    before: dict[str, Any] = restored.facts["identity"]
    for part, values in identity.items():
        found = before.get(part)
        if found == values:
            continue
        named = part
        if isinstance(values, dict) and isinstance(found, dict):
            key = next(key for key in sorted(values.keys() | found.keys()) if values.get(key) != found.get(key))
            named = f"{part}, {key}: {found.get(key)!r} there, {values.get(key)!r} now"
        raise JobError(
            f"{restored.source} is of another job ({named}); set overwrite_output_dir = true to begin anew, or another "
            f"output_dir than {output}"
        )
