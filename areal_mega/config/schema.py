"""The recipe: every setting of a run, each with a type, a unit, a default, help, and a reader somewhere in the package.

Unknown keys are errors. The architecture of the model is never here: it comes from the model's own ``config.json``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt
from pydantic_core import PydanticUndefined

NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


def leaf(default: Any = PydanticUndefined, help: str = "", unit: str = "") -> Any:
    """A recipe field: ``unit`` is shown by ``areal-mega config show``; no default means that the recipe must give it."""
    return Field(default=default, description=help, json_schema_extra={"unit": unit})


def section(model: type[BaseModel]) -> Any:
    return Field(default_factory=model)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class RunSection(Section):
    name: str = leaf(help="Name of the run; its directory is <root>/<name>")
    root: str = leaf("runs", "Directory that holds run directories; on a cluster, a shared file system")
    seed: NonNegativeInt = leaf(1, "Seeds weights made at random, prompt order, and every sample (hashed with prompt, epoch, member)")
    steps: PositiveInt = leaf(help="Train steps after warm-up", unit="steps")
    overlap: bool = leaf(
        True, "Generate while training, and gather weights while others travel (the overlapped loops); false runs the plain ones"
    )
    overwrite: bool = leaf(False, "Replace an existing run directory of this name instead of refusing it")
    resume: bool = leaf(False, "Go on with an existing run of this name from its newest recover checkpoint; a new run where there is none")


class ModelSection(Section):
    path: str = leaf(help="HuggingFace folder or hub name; its config.json is the architecture")
    weights: Literal["pretrained", "random"] = leaf(
        "pretrained", "random: make weights from config.json and run.seed (for tests and for training from scratch)"
    )
    dtype: Literal["bf16", "fp32"] = leaf("bf16", "Parameters and activations while training; the optimizer's master copy is fp32")
    reference_path: str | None = leaf(None, "Frozen reference model for KL; `model.path` may be named again")


class DatasetSection(Section):
    loader: str = leaf("gsm8k", "Loader: gsm8k, arithmetic, jsonl, or an import path `module:function` yielding rows")
    path: str | None = leaf(None, "Local JSONL or Parquet file, or hub name; none for generated data")
    split: str = leaf("train", "Split of a hub dataset")
    limit: PositiveInt | None = leaf(None, "Use the first so many rows only", "rows")
    kwargs: dict[str, Any] = leaf({}, "Passed to the loader")


class DataSection(Section):
    train: DatasetSection = section(DatasetSection)
    valid: DatasetSection | None = leaf(None, "Evaluation data; none: no evaluation")
    shuffle: bool = leaf(True, "Shuffle prompts anew every epoch (seeded)")
    max_prompt_tokens: PositiveInt = leaf(1024, "Longest prompt", "tokens")
    overlong_prompt: Literal["error", "skip"] = leaf("error", "A longer prompt: an error, or skipped and counted (never truncated)")


class WorkflowSection(Section):
    path: str = leaf("areal_mega.rollout.rlvr.RLVRWorkflow", "Import path of the workflow class")
    kwargs: dict[str, Any] = leaf({}, "Passed to its constructor")


class RewardSection(Section):
    path: str = leaf("areal_mega.rewards.gsm8k.gsm8k_reward", "Import path of the reward function")
    timeout_s: PositiveFloat = leaf(10.0, "A verifier that takes longer is killed; its sample is dropped and counted", "s")
    workers: PositiveInt = leaf(1, "Isolated verifier processes per rollout worker")
    kwargs: dict[str, Any] = leaf({}, "Passed to the reward function at every call")


class RolloutSection(Section):
    strategy: str = leaf("embedded:d1", "Inference engine and parallelism, e.g. sglang:d4t2 or embedded:d1 (d = replicas)")
    group_size: PositiveInt = leaf(8, "Samples per prompt", "samples")
    max_new_tokens: PositiveInt = leaf(1024, "Longest answer", "tokens")
    temperature: PositiveFloat = leaf(1.0, "Sampling temperature; the trainer's log-probabilities use the same")
    top_p: Annotated[float, Field(gt=0, le=1)] = leaf(1.0, "Nucleus sampling")
    top_k: int = leaf(-1, "Sample among the k likeliest tokens; -1 is off")
    stop: list[str] = leaf([], "Stop strings, besides the model's end-of-sequence token")
    max_concurrent_prompts: PositiveInt = leaf(64, "Episodes a rollout worker runs at once", "prompts")
    request_timeout_s: PositiveFloat = leaf(600.0, "One generation request", "s")
    request_retries: NonNegativeInt = leaf(2, "Times a failed request is sent again before the attempt at its prompt has failed")
    prompt_timeout_s: PositiveFloat = leaf(3600.0, "One episode (all turns and rewards of one prompt); it is then ended as failed", "s")
    prompt_attempts: PositiveInt = leaf(
        2, "Times a prompt is tried, elsewhere where possible; then it is poisoned: never tried again", "attempts"
    )
    max_poisoned_prompts: NonNegativeInt = leaf(100, "A run with more poisoned prompts ends", "prompts")
    store_mb: PositiveFloat = leaf(4096.0, "Trajectories a rollout worker keeps in memory; more go to files in the run directory", "MiB")
    dtype: Literal["bf16", "fp32"] = leaf("bf16", "Parameters and activations of the inference server, and of weights sent to it")
    server_args: list[str] = leaf([], "Passed to the inference server's command line verbatim")
    python: str | None = leaf(None, "Interpreter of the environment that holds SGLang or vLLM; none: this one")


class StalenessSection(Section):
    max_staleness: NonNegativeInt = leaf(1, "Bound on current version minus the version that made a token; 0 is synchronous", "versions")
    action: Literal["mask_token", "drop_sample", "refill_prompt"] = leaf(
        "mask_token", "What happens at consumption to a token, or its sample or prompt, beyond the bound"
    )


class OptimizerSection(Section):
    lr: PositiveFloat = leaf(1e-6, "Peak learning rate")
    min_lr: NonNegativeFloat = leaf(0.0, "Learning rate at the end of decay")
    schedule: Literal["constant", "linear", "cosine"] = leaf("constant", "Decay after warm-up, over run.steps")
    warmup_steps: NonNegativeInt = leaf(0, "Linear warm-up of the learning rate", "train steps")
    weight_decay: NonNegativeFloat = leaf(0.0, "Decoupled weight decay (not on norms and biases)")
    beta1: Annotated[float, Field(ge=0, lt=1)] = leaf(0.9, "Adam's first moment decay")
    beta2: Annotated[float, Field(ge=0, lt=1)] = leaf(0.95, "Adam's second moment decay")
    eps: PositiveFloat = leaf(1e-8, "Adam's epsilon")
    clip_grad: NonNegativeFloat = leaf(1.0, "Global gradient norm is clipped to this; 0 is off")
    distributed: bool = leaf(True, "Shard the optimizer's state over data-parallel ranks")
    overlap: bool = leaf(False, "Reduce gradients over data-parallel ranks while the backward pass runs (GPUs)")


class FP8Section(Section):
    """FP8 matrix products of Transformer Engine; weights and everything else stay as model.dtype bf16 has them."""

    format: Literal["off", "e4m3", "hybrid"] = leaf(
        "off", "Number format of FP8 matrix products (GPUs with Transformer Engine); hybrid: E4M3 forward, E5M2 for gradients"
    )
    recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = leaf(
        "delayed", "Scaling of FP8 tensors, as Transformer Engine names it; blockwise needs Hopper, mxfp8 Blackwell"
    )


class TrainSection(Section):
    strategy: str = leaf("megatron:d1", "Parallel strategy, e.g. megatron:d4t2p2c1e8")
    batch_size: PositiveInt = leaf(8, "Prompts (groups) per train step", "prompts")
    minibatches: PositiveInt = leaf(1, "Optimizer updates per train step, each on its part of the batch", "updates")
    microbatch_tokens: PositiveInt = leaf(4096, "Token budget of one packed micro-batch on one data-parallel rank", "tokens")
    recompute: Literal["none", "selective", "full"] = leaf("none", "Recompute activations in the backward pass")
    optimizer: OptimizerSection = section(OptimizerSection)
    fp8: FP8Section = section(FP8Section)
    nccl_config: str | None = leaf(
        None, "YAML of Megatron-Core's NCCL options per communicator, e.g. `dp_cp: {is_high_priority_stream: true, max_ctas: 16}` (GPUs)"
    )


class RouterSection(Section):
    """MoE router settings that are training choices, not architecture."""

    aux_loss_coef: NonNegativeFloat = leaf(0.0, "Load-balancing loss; the model's own router_aux_loss_coef is never used silently")
    z_loss_coef: NonNegativeFloat = leaf(0.0, "Router z-loss")
    fp32: bool = leaf(True, "Router logits in fp32")
    expert_bias_update_rate: NonNegativeFloat = leaf(
        0.0, "Step of the router's correction bias towards balance after each update, where the model has one; 0 leaves it as loaded"
    )
    dispatcher: Literal["alltoall", "allgather"] = leaf(
        "alltoall",
        "How tokens reach experts of other ranks: each to its own, or every token to every rank, with micro-batches padded to one length",
    )
    capacity_factor: PositiveFloat | None = leaf(
        None,
        "An expert takes at most this many times its even share of a micro-batch's tokens on a rank; the rest skip it. None: no dropping",
    )
    drop_policy: Literal["probs", "position"] = leaf(
        "probs", "Under capacity_factor, which tokens an expert keeps: those it was chosen for with the highest probability, or the first"
    )


class KLSection(Section):
    coef: NonNegativeFloat = leaf(0.0, "Coefficient; needs model.reference_path when not zero")
    where: Literal["loss", "reward"] = leaf("loss", "Added to the loss per token, or taken from the reward")
    estimator: Literal["k1", "k2", "k3"] = leaf("k3", "Estimator of KL(policy || reference)")


class AlgorithmSection(Section):
    """A named algorithm; any piece may be overridden. None means: as the named algorithm has it."""

    name: str = leaf("grpo", "Registered algorithm")
    advantage: str | None = leaf(None, "Advantage estimator: group_norm, group_mean, leave_one_out or group_mean_batch_std")
    singleton: Literal["error", "batch_mean", "reward"] = leaf("error", "Baseline for a group of one, which has no group statistic")
    ratio: str | None = leaf(None, "Policy-ratio rule: ppo, gspo or cispo")
    clip_low: PositiveFloat | None = leaf(None, "Ratio is clipped at 1 - clip_low")
    clip_high: PositiveFloat | None = leaf(None, "Ratio is clipped at 1 + clip_high")
    dual_clip: PositiveFloat | None = leaf(None, "Bound c > 1 of the dual clip for negative advantages")
    correction: str | None = leaf(None, "Behaviour-to-proximal correction: none, decoupled, tis or mis")
    correction_cap: PositiveFloat | None = leaf(None, "Upper bound of the correction weight: tis truncates there, mis masks above it")
    correction_floor: PositiveFloat | None = leaf(None, "Lower bound of the correction weight: mis masks below it")
    aggregation: str | None = leaf(None, "token_mean, sequence_mean or fixed_length")
    kl: KLSection = section(KLSection)
    filter_uniform_groups: bool | None = leaf(None, "Drop and refill groups whose rewards are all equal (dynamic sampling)")
    mask_truncated: bool | None = leaf(None, "Do not train on answers that hit max_new_tokens")
    reward_scale: float = leaf(1.0, "Reward becomes scale * (reward + shift)")
    reward_shift: float = leaf(0.0, "See reward_scale")


class WarmupSection(Section):
    """Supervised warm-up on the training data's own answers, before the first rollout."""

    steps: NonNegativeInt = leaf(0, "Supervised steps; 0 is off", "steps")
    batch_size: PositiveInt = leaf(64, "Rows per step", "rows")
    lr: PositiveFloat = leaf(1e-3, "Learning rate, constant")
    data: DatasetSection | None = leaf(None, "Data with `messages` or `prompt` and `response`; none: data.train")


class SyncSection(Section):
    transport: Literal["collective", "disk"] = leaf("collective", "Weights over the dedicated process group, or through a folder")
    bucket_mb: PositiveFloat = leaf(256.0, "Bytes broadcast at once", "MiB")
    senders_per_stage: PositiveInt = leaf(2, "At most so many train ranks of one pipeline stage send, each its own experts", "ranks")
    pause: Literal["in_place", "retract", "abort", "drain"] = leaf("retract", "What becomes of running requests during a sync")
    timeout_s: PositiveFloat = leaf(600.0, "Deadline of every wait of one sync", "s")
    every_steps: PositiveInt = leaf(1, "Train steps between syncs", "steps")
    verify: Literal["sampled", "whole"] = leaf("sampled", "Digests after a sync: of samples of every tensor but at first, or of every byte")


class EvalSection(Section):
    every_steps: NonNegativeInt = leaf(0, "Train steps between evaluations; 0: only at start and end", "steps")
    at_start: bool = leaf(True, "Evaluate before the first train step (after warm-up)")
    samples: PositiveInt = leaf(1, "Samples per evaluation prompt", "samples")
    temperature: NonNegativeFloat = leaf(0.0, "0 is greedy")
    max_new_tokens: PositiveInt | None = leaf(None, "None: as rollout.max_new_tokens", "tokens")


class CheckpointSection(Section):
    export_every_steps: NonNegativeInt = leaf(0, "HuggingFace export to <run>/export/step-N; 0 is off", "steps")
    export_at_end: bool = leaf(True, "HuggingFace export to <run>/export/final")
    keep_exports: PositiveInt | None = leaf(
        None, "Newest exports of the schedule that are kept, besides the best by evaluation; none: all", "exports"
    )
    recover_every_steps: NonNegativeInt = leaf(0, "Recover checkpoint of the whole run, to go on from; 0 is off", "steps")
    keep: PositiveInt = leaf(2, "Newest recover checkpoints that are kept", "checkpoints")
    keep_every_steps: NonNegativeInt = leaf(0, "Recover checkpoints of every so many steps are kept for good; 0: none", "steps")
    recover_root: str | None = leaf(None, "Folder for recover checkpoints, as <folder>/<run.name>; none: <run>/recover")


class ObserveSection(Section):
    console: Literal["rich", "plain", "off"] = leaf("rich", "How steps are shown on standard output")
    mlflow: bool = leaf(True, "Send metrics and the resolved recipe to MLflow")
    mlflow_uri: str | None = leaf(None, "Tracking server; none: a local store under run.root")
    mlflow_experiment: str = leaf("areal-mega", "Experiment name")
    report: bool = leaf(True, "Write <run>/report.html at the end")


class SlurmResources(Section):
    """What a task asks Slurm for, in sbatch's own words; none: not asked for."""

    partition: str | None = leaf(None, "Partition")
    account: str | None = leaf(None, "Account that is charged")
    qos: str | None = leaf(None, "Quality of service")
    time: str | None = leaf(None, "Time limit, e.g. 4:00:00")
    constraint: str | None = leaf(None, "Node features")
    gres: str | None = leaf(None, "Generic resources of one task, e.g. gpu:8")
    reservation: str | None = leaf(None, "Reservation")
    cpus_per_task: PositiveInt | None = leaf(None, "CPU cores of one task", "cores")
    mem: str | None = leaf(None, "Memory of one task, e.g. 200G; 0 is the whole node's")
    exclude: str | None = leaf(None, "Nodes not to use")


class SlurmSection(SlurmResources):
    """Runs as Slurm arrays. The common resources hold for both roles; ``train`` and ``rollout`` override them."""

    slots_per_task: PositiveInt | None = leaf(None, "GPUs (or CPU slots) of one array task: a node, or a slice of one", "slots")
    train: SlurmResources = section(SlurmResources)
    rollout: SlurmResources = section(SlurmResources)
    output: str = leaf("slurm-%x-%A_%a.out", "File of a task's own output, in sbatch's patterns")
    requeue: bool = leaf(True, "Slurm may start a task again after a node failure or preemption")
    signal_s: PositiveInt = leaf(300, "A task is told so long before its time limit", "s")
    mail_type: str | None = leaf(None, "Events that send mail, e.g. END,FAIL")
    mail_user: str | None = leaf(None, "Who gets mail")
    extra: list[str] = leaf([], "More #SBATCH options, verbatim, e.g. --exclusive")
    setup: list[str] = leaf([], "Shell lines before the program starts, e.g. module load cuda; source venv/bin/activate")
    container: Literal["none", "apptainer", "pyxis"] = leaf("none", "How a task enters its container")
    image: str | None = leaf(None, "Container image; needed with a container")
    container_args: list[str] = leaf([], "More options of apptainer exec, or srun's --container-... options with pyxis")
    queue_timeout_s: PositiveFloat = leaf(
        259200.0,
        "Longest wait for tasks to leave the queue: at the start, after a requeue, with no rollout task left; no start-up time",
        "s",
    )


class LaunchSection(Section):
    device: Literal["auto", "cpu", "cuda"] = leaf("auto", "auto: cuda where a GPU is visible")
    slots: PositiveInt | None = leaf(None, "GPUs (or CPU slots) of this machine; none: all GPUs, or as many CPU slots as ranks")
    host: str = leaf("127.0.0.1", "Address that this machine's processes listen on")
    startup_timeout_s: PositiveFloat = leaf(600.0, "Every process must be ready within", "s")
    rpc_timeout_s: PositiveFloat = leaf(
        1800.0, "Longest single call to a worker (one train step of one rank), and longest time without any finished episode", "s"
    )
    shutdown_timeout_s: PositiveFloat = leaf(20.0, "Processes that ignore SIGTERM are killed after", "s")
    restarts: NonNegativeInt = leaf(
        0, "Times a run that failed (not by a user's mistake) starts again by itself from its newest recover checkpoint", "restarts"
    )
    server_restarts: NonNegativeInt = leaf(
        2,
        "Dead inference servers and rollout workers are started again so often, all together; 0: a death, or the loss of a rollout task, "
        "ends the attempt",
        "restarts",
    )
    server_health_timeout_s: PositiveFloat = leaf(
        60.0, "An inference server that answers no health check for so long is killed; then as launch.server_restarts says", "s"
    )
    threads: PositiveInt = leaf(1, "OMP_NUM_THREADS of every process on a CPU")
    train_cpus: list[int] = leaf([], "Pin train ranks to these cores (benchmarks); empty: not pinned")
    rollout_cpus: list[int] = leaf([], "Pin rollout workers and servers to these cores; empty: not pinned")
    slurm: SlurmSection = section(SlurmSection)


class Recipe(Section):
    """One run. Field order is the order of ``areal-mega config show``."""

    run: RunSection
    model: ModelSection
    data: DataSection = section(DataSection)
    workflow: WorkflowSection = section(WorkflowSection)
    reward: RewardSection = section(RewardSection)
    rollout: RolloutSection = section(RolloutSection)
    staleness: StalenessSection = section(StalenessSection)
    train: TrainSection = section(TrainSection)
    router: RouterSection = section(RouterSection)
    algorithm: AlgorithmSection = section(AlgorithmSection)
    warmup: WarmupSection = section(WarmupSection)
    sync: SyncSection = section(SyncSection)
    eval: EvalSection = section(EvalSection)
    checkpoint: CheckpointSection = section(CheckpointSection)
    observe: ObserveSection = section(ObserveSection)
    launch: LaunchSection = section(LaunchSection)
