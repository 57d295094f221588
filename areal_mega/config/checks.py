"""What single fields cannot say: settings that contradict each other, found before any process starts.

Each check names the dotted paths it is about, with the arithmetic and a remedy; the file and line of each path are put in by
``cited``. The algorithm's own pieces are checked where algorithms are known (``algorithms.registry``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from areal_mega.config.provenance import schema_leaves
from areal_mega.config.schema import Recipe
from areal_mega.config.source import Origin
from areal_mega.core.errors import UserError
from areal_mega.parallel.placement import place
from areal_mega.parallel.strategy import ParallelStrategy, parse

_PATH = re.compile(r"(?<![\w.])[a-z_]+(?:\.[a-z_0-9]+)+")

# Flags of an inference server that the launcher sets from the recipe: given again, the last one would win unseen.
SERVER_FLAGS: Mapping[str, str] = {
    "--model-path": "model.path",
    "--model": "model.path",
    "--tp": "rollout.strategy",
    "--tp-size": "rollout.strategy",
    "--tensor-parallel-size": "rollout.strategy",
    "--pp": "rollout.strategy",
    "--pp-size": "rollout.strategy",
    "--pipeline-parallel-size": "rollout.strategy",
    "--ep": "rollout.strategy",
    "--ep-size": "rollout.strategy",
    "--expert-parallel-size": "rollout.strategy",
    "--dp": "rollout.strategy",
    "--dp-size": "rollout.strategy",
    "--data-parallel-size": "rollout.strategy",
    "--dtype": "rollout.dtype",
    "--host": "launch.host",
    "--port": "launch.host",
    "--random-seed": "run.seed",
    "--seed": "run.seed",
    **dict.fromkeys(("-tp", "-pp", "-dp", "-ep", "--enable-expert-parallel"), "rollout.strategy"),
    # What the client of vLLM relies on.
    **dict.fromkeys(("--logprobs-mode", "--worker-extension-cls", "--weight-transfer-config"), "rollout.strategy"),
}


def server_flag(argument: str) -> str:
    """The flag of a command-line argument as ``SERVER_FLAGS`` spells it: vLLM takes underscores for dashes."""
    return argument.partition("=")[0].replace("_", "-")


def check_recipe(recipe: Recipe, origins: Mapping[str, Origin] | None = None) -> None:
    """Refuse a recipe whose settings contradict each other. ``origins`` adds file and line of each setting to the message.

    Raises:
        UserError: the first contradiction found, as one line.
    """
    strategies = []
    for path, text in (("train.strategy", recipe.train.strategy), ("rollout.strategy", recipe.rollout.strategy)):
        try:
            strategies.append(parse(text))
        except UserError as error:
            raise UserError(cited(f"{path}: {error}", origins)) from None
    train, rollout = strategies
    for check in CHECKS:
        for message in check(recipe, train, rollout):
            raise UserError(cited(message, origins))


def cited(message: str, origins: Mapping[str, Origin] | None) -> str:
    """``message`` with the origin of every setting it names, in brackets after the first mention."""
    if origins is None:
        return message
    known, seen = {*schema_leaves(), *origins}, set()

    def add(match: re.Match[str]) -> str:
        path = match[0]
        if path not in known or path in seen:
            return path
        seen.add(path)
        return f"{path} [{_origin(path, origins)}]"

    return _PATH.sub(add, message)


def _origin(path: str, origins: Mapping[str, Origin]) -> str:
    """Origin of a leaf, or of the optional section above it that is absent."""
    while path not in origins and "." in path:
        path = path.rpartition(".")[0]
    return str(origins.get(path, "default"))


def _model_and_kl(r: Recipe, train: ParallelStrategy, rollout: ParallelStrategy) -> Iterator[str]:
    if r.algorithm.kl.coef > 0 and r.model.reference_path is None:
        yield (
            f"algorithm.kl.coef is {r.algorithm.kl.coef:g} but model.reference_path is not set: KL to no reference; "
            "name the reference model (model.path may be named again) or set the coefficient to 0"
        )


def _placement(r: Recipe, train: ParallelStrategy, rollout: ParallelStrategy) -> Iterator[str]:
    # Without launch.slots only the machine itself knows what fits; the launcher asks again there.
    try:
        place(train, rollout, r.launch.slots or train.world_size + rollout.world_size, r.launch.device)
    except UserError as error:
        yield str(error)
    both = sorted(set(r.launch.train_cpus) & set(r.launch.rollout_cpus))
    if both:
        yield f"launch.train_cpus and launch.rollout_cpus both name cores {both}: pinned roles must not share; remove them from one"


def _slurm(r: Recipe, train: ParallelStrategy, rollout: ParallelStrategy) -> Iterator[str]:
    section = r.launch.slurm
    if (section.container == "none") != (section.image is None):
        yield (
            f"launch.slurm.container is {section.container} and launch.slurm.image is {section.image or 'not set'}: "
            "a container needs an image, and an image a container; set both or neither"
        )


def _server(r: Recipe, train: ParallelStrategy, rollout: ParallelStrategy) -> Iterator[str]:
    if r.rollout.python is not None and rollout.engine == "embedded":
        yield (
            f"rollout.python names an interpreter for SGLang or vLLM but rollout.strategy is {rollout}, which runs in this one; "
            f"use sglang:d{rollout.dp} or remove rollout.python"
        )
    if rollout.engine == "vllm" and rollout.ep not in (1, rollout.tp):
        yield (
            f"rollout.strategy {rollout} spreads experts over e{rollout.ep} of t{rollout.tp} ranks: vLLM spreads them over all ranks of a "
            f"replica or over none; use e{rollout.tp} or leave e out"
        )
    for argument in r.rollout.server_args:
        flag = server_flag(argument)
        if flag in SERVER_FLAGS:
            setting = SERVER_FLAGS[flag]
            yield f"rollout.server_args gives {flag}, which is set from {setting}: two values for one flag; change {setting} instead"


def _batch(r: Recipe, train: ParallelStrategy, rollout: ParallelStrategy) -> Iterator[str]:
    size, parts, members = r.train.batch_size, r.train.minibatches, r.rollout.group_size
    if size % parts:
        legal = [n for n in (size // parts * parts, (size // parts + 1) * parts) if n]
        yield (
            f"train.batch_size {size} does not divide into train.minibatches {parts}: {size} / {parts} = {size / parts:.3g} prompts each; "
            f"use a batch of {' or '.join(map(str, legal))}"
        )
    per_update = size // parts * members
    if per_update < train.dp:
        yield (
            f"train.strategy {train} has {train.dp} data-parallel ranks but an update has train.batch_size {size} / train.minibatches "
            f"{parts} * rollout.group_size {members} = {per_update} samples: some ranks would never train; use at most d{per_update}"
        )
    if r.warmup.steps and r.warmup.batch_size < train.dp:
        yield (
            f"warmup.batch_size {r.warmup.batch_size} is below the {train.dp} data-parallel ranks of train.strategy {train}; "
            f"use {train.dp} or more"
        )
    unit = train.sequence_multiple
    total = r.data.max_prompt_tokens + r.rollout.max_new_tokens
    longest = -(-total // unit) * unit
    if longest > r.train.microbatch_tokens:
        padded = f", padded to {longest} for train.strategy {train}," if longest > total else ""
        yield (
            f"data.max_prompt_tokens {r.data.max_prompt_tokens} + rollout.max_new_tokens {r.rollout.max_new_tokens} = {total} tokens"
            f"{padded} do not fit into train.microbatch_tokens {r.train.microbatch_tokens}: the longest sample must; raise the last to "
            f"{longest} or shorten either"
        )


def _sampling(r: Recipe, train: ParallelStrategy, rollout: ParallelStrategy) -> Iterator[str]:
    if r.rollout.top_k == 0 or r.rollout.top_k < -1:
        yield f"rollout.top_k is {r.rollout.top_k}: it counts tokens to sample among; use -1 to turn it off, or 1 or more"
    if r.rollout.prompt_timeout_s < r.rollout.request_timeout_s:
        yield (
            f"rollout.prompt_timeout_s {r.rollout.prompt_timeout_s:g} is below rollout.request_timeout_s {r.rollout.request_timeout_s:g}: "
            "a prompt would be given up while its first request may still be answered; raise the first or lower the second"
        )
    if r.eval.samples > 1 and r.eval.temperature == 0:
        yield (
            f"eval.samples {r.eval.samples} with eval.temperature 0 would give the same greedy answer {r.eval.samples} times; "
            "use 1 sample or a temperature above 0"
        )


def _resume(r: Recipe, train: ParallelStrategy, rollout: ParallelStrategy) -> Iterator[str]:
    if r.run.resume and r.run.overwrite:
        yield "run.resume and run.overwrite are both true: one goes on with what is there, the other removes it; set one to false"
    if r.launch.restarts and not r.checkpoint.recover_every_steps:
        yield (
            f"launch.restarts is {r.launch.restarts} but checkpoint.recover_every_steps is 0: every restart would begin anew; "
            "set checkpoint.recover_every_steps or launch.restarts=0"
        )
    fp8 = r.train.fp8
    if fp8.format != "off" and fp8.recipe == "delayed" and r.checkpoint.recover_every_steps:
        yield (
            f"train.fp8.recipe is delayed with train.fp8.format {fp8.format}, and checkpoint.recover_every_steps is "
            f"{r.checkpoint.recover_every_steps}: delayed scales come from earlier steps, and recover checkpoints hold none, so that a "
            "resumed run would go on with others; set train.fp8.recipe to tensorwise or blockwise, or checkpoint.recover_every_steps=0"
        )


def _schedules(r: Recipe, train: ParallelStrategy, rollout: ParallelStrategy) -> Iterator[str]:
    steps, optimizer = r.run.steps, r.train.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield f"train.optimizer.min_lr {optimizer.min_lr:g} is above train.optimizer.lr {optimizer.lr:g}; decay goes down"
    if optimizer.schedule == "constant" and optimizer.min_lr > 0:
        yield (
            f"train.optimizer.min_lr {optimizer.min_lr:g} is never reached under train.optimizer.schedule constant; "
            "choose linear or cosine, or remove min_lr"
        )
    if optimizer.warmup_steps > steps:
        yield (
            f"train.optimizer.warmup_steps {optimizer.warmup_steps} exceeds run.steps {steps}: the peak is never reached; "
            f"use at most {steps}"
        )
    if r.checkpoint.export_every_steps > steps and not r.checkpoint.export_at_end:
        yield (
            f"checkpoint.export_every_steps {r.checkpoint.export_every_steps} exceeds run.steps {steps} and checkpoint.export_at_end is "
            "false: nothing would ever be saved; export more often or at the end"
        )
    if r.eval.every_steps and r.data.valid is None:
        yield f"eval.every_steps is {r.eval.every_steps} but data.valid is not set: nothing to evaluate on; set it or use 0"
    if r.eval.every_steps % r.sync.every_steps:
        yield (
            f"eval.every_steps {r.eval.every_steps} is not a multiple of sync.every_steps {r.sync.every_steps}: the servers would be "
            f"evaluated with weights of an earlier step; use {-(-r.eval.every_steps // r.sync.every_steps) * r.sync.every_steps}"
        )
    if r.sync.timeout_s > r.launch.rpc_timeout_s:
        yield (
            f"sync.timeout_s {r.sync.timeout_s:g} exceeds launch.rpc_timeout_s {r.launch.rpc_timeout_s:g}: the call that syncs would be "
            "given up before its own waits; raise the second or lower the first"
        )


Check = Callable[[Recipe, ParallelStrategy, ParallelStrategy], Iterator[str]]
CHECKS: tuple[Check, ...] = (_model_and_kl, _placement, _server, _batch, _sampling, _schedules, _resume, _slurm)
