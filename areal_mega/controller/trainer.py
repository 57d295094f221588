"""The public API: everything that ``areal-mega train`` does, from a script.

recipe = load_recipe("recipes/quickstart.yaml", ["run.steps=10"])
with Trainer(recipe, train_dataset=rows) as trainer:
    result = trainer.train(workflow="my_module.MyWorkflow")
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from areal_mega.config.checks import check_recipe
from areal_mega.config.loader import load_recipe, resolved_dict
from areal_mega.config.schema import DatasetSection, Recipe
from areal_mega.controller.cluster import Cluster
from areal_mega.controller.failure import PAGE, describe_failure
from areal_mega.controller.loops import overlapped_loop, plain_loop
from areal_mega.controller.recover import RecoverPoint, Stopped, Terminated, points, recover_folder
from areal_mega.controller.result import TrainResult
from areal_mega.controller.run import TRAINED_FILE, Run
from areal_mega.core.errors import DeadlineExceeded, RunFailed, UserError
from areal_mega.core.types import Prompt
from areal_mega.data.prompts import fit_prompts
from areal_mega.data.registry import load_rows
from areal_mega.data.rows import check_rows
from areal_mega.data.stream import PromptStream
from areal_mega.data.tokenizer import load_tokenizer
from areal_mega.launch.machines import Machines
from areal_mega.launch.rundir import RunDir
from areal_mega.observe.jsonl import cut_after
from areal_mega.observe.observer import Observer
from areal_mega.observe.record import METRICS_FILE

log = logging.getLogger(__name__)

Rows = Iterable[Mapping[str, Any]]


class Trainer:
    """One run. Use as a context manager: leaving it ends every process of the run.

    Args:
        recipe: a recipe, or the path of one.
        train_dataset, valid_dataset: rows in place of ``data.train`` and ``data.valid`` (mappings with ``prompt`` or ``messages``, and
            ``answer``); a HuggingFace dataset is such an iterable. They are kept in the run directory.
        provenance: where each setting came from, for the report.
        machines: where the processes live; none: on this machine.

    Raises:
        UserError: what can be known to be wrong before any process starts.
    """

    def __init__(
        self,
        recipe: Recipe | str | Path,
        *,
        train_dataset: Rows | None = None,
        valid_dataset: Rows | None = None,
        provenance: Mapping[str, str] | None = None,
        machines: Machines | None = None,
    ) -> None:
        self._recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
        self._given = {"train": train_dataset, "valid": valid_dataset}
        self._provenance, self._machines = provenance, machines
        self._run_dir: RunDir | None = None
        self._run_now: Run | None = None
        self._stop_asked = self._terminated = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._run_dir is not None:
            self._run_dir.close()

    def train(self, workflow: str | None = None, workflow_kwargs: Mapping[str, Any] | None = None) -> TrainResult:
        """Run all steps; returns when the run is finished.

        Args:
            workflow: import path in place of ``workflow.path``.
            workflow_kwargs: in place of ``workflow.kwargs``.

        Raises:
            UserError: a user's mistake, found here or in a process of the run.
            WorkerDied: a process ended unexpectedly.
        """
        if self._run_dir is not None:
            raise UserError("this Trainer has run already; make a new one, with another run.name, for another run")
        recipe = _with_workflow(self._recipe, workflow, workflow_kwargs)
        recipe, datasets = _with_datasets(recipe, self._given)
        check_recipe(recipe)
        # Loaded before the run directory exists: a mistake in the data leaves nothing behind.
        rows = datasets["train"] if datasets["train"] is not None else load_rows(recipe.data.train)
        valid = datasets["valid"]
        if valid is None and recipe.data.valid is not None:
            valid = load_rows(recipe.data.valid)
        cluster = Cluster(recipe, self._machines)
        recipe = cluster.recipe
        tokenizer = load_tokenizer(recipe.model.path)
        rows, skipped = _fitting(recipe, tokenizer, rows)
        valid, valid_skipped = _fitting(recipe, tokenizer, valid) if valid else ([], 0)
        prompts = [Prompt(id=row["id"], epoch=0, row=row) for row in valid]
        resumed: RecoverPoint | None = None
        if recipe.run.resume and (Path(recipe.run.root) / recipe.run.name).exists():
            self._run_dir = RunDir.resume(recipe)
            for point in points(recover_folder(recipe, self._run_dir.path))[-1:]:
                # What would be refused when all processes are up is refused now, and nothing is cut back.
                PromptStream(rows, seed=recipe.run.seed, shuffle=recipe.data.shuffle).restore(
                    point.state()["rollout"]["dispatch"]["stream"]
                )
            resumed = rewind(recipe, self._run_dir.path)
        else:
            self._run_dir = RunDir.create(recipe)
        _keep_datasets(self._run_dir.path, datasets)
        with (
            _logging_to(self._run_dir.log_path("controller", 0)),
            Observer(recipe.observe, self._run_dir.path, resolved_dict(recipe), self._provenance) as observer,
        ):
            observer.note(f"run directory: {self._run_dir.path}")
            if recipe.run.resume and resumed is None:
                observer.note("run.resume: no recover checkpoint there; from the beginning")
            if skipped or valid_skipped:
                limit = recipe.data.max_prompt_tokens
                observer.note(f"prompts longer than data.max_prompt_tokens={limit}: skipped {skipped} of train, {valid_skipped} of valid")
            with asyncio.Runner() as runner:
                result = runner.run(self._attempts(cluster, rows, prompts, observer, resumed))
            report = observer.close()
        return TrainResult(report=report, **result)

    async def _attempts(
        self, cluster: Cluster, rows: list[dict[str, Any]], prompts: list[Prompt], observer: Observer, resumed: RecoverPoint | None
    ) -> dict[str, Any]:
        """Run to the end, over as many failures as ``launch.restarts`` allows."""
        assert self._run_dir is not None
        recipe = cluster.recipe
        why, goes_on, earlier = "interrupted", True, list[str]()
        (self._run_dir.path / PAGE).unlink(missing_ok=True)  # of a failure that this run goes on after
        try:
            self._stop_on_signal(observer)
            for restarts_left in range(recipe.launch.restarts, -1, -1):
                stream = PromptStream(rows, seed=recipe.run.seed, shuffle=recipe.data.shuffle)
                try:
                    result = await self._run(cluster, stream, prompts, observer, resumed)
                    why, goes_on = "", False
                    return result
                except (RunFailed, DeadlineExceeded) as error:
                    if not restarts_left or isinstance(error, Stopped) or self._terminated:
                        raise
                    # On a thread: the file system may be slow, and agents of other machines are being listened to.
                    resumed = await asyncio.to_thread(rewind, recipe, self._run_dir.path)
                    observer.rewind(resumed.step if resumed else -1)
                    where = f"after step {resumed.step}" if resumed else "from the beginning: there is no recover checkpoint yet"
                    earlier.append(_first_line(error))
                    log.warning("attempt %s failed", self._run_dir.attempt, exc_info=True)
                    observer.note(f"failed: {_first_line(error)}")
                    observer.note(f"starting again {where}; {restarts_left - 1} restarts left")
                    self._run_dir.next_attempt(recipe)
            raise AssertionError("the last attempt returns or raises")
        except Exception as error:
            why, goes_on = _first_line(error), isinstance(error, Stopped)
            if self._terminated:
                raise Terminated(f"SIGTERM: {why}") from error
            if not goes_on:
                self._leave_page(recipe, error, earlier, observer)
            raise
        finally:
            # The tasks of a cluster are not told that it is over: they wait for this one to come back, or are told to end as it was.
            if self._machines is None or not self._terminated:
                await cluster.machines.close(why, goes_on=goes_on)

    def _leave_page(self, recipe: Recipe, error: Exception, earlier: list[str], observer: Observer) -> None:
        assert self._run_dir is not None
        try:
            page = describe_failure(recipe, self._run_dir.path, error, earlier, on_slurm=self._machines is not None)
        except OSError as reason:  # a full disk may be what ended the run: that is the story, not this
            log.warning("no %s was left: %s", PAGE, reason)
        else:
            observer.note(f"what failed, and how to go on: {page}")

    async def _run(
        self, cluster: Cluster, stream: PromptStream, prompts: list[Prompt], observer: Observer, resumed: RecoverPoint | None
    ) -> dict[str, Any]:
        assert self._run_dir is not None
        async with cluster.running(self._run_dir, stream, prompts, observer, resumed) as run:
            self._run_now, run.stop_asked = run, self._stop_asked
            loop = overlapped_loop if run.recipe.run.overlap else plain_loop
            try:
                await cluster.supervise(loop(run))
            finally:
                self._run_now = None
        return {
            "run_dir": self._run_dir.path,
            "steps": run.recipe.run.steps,
            "first_eval": run.first_eval,
            "last_eval": run.last_eval,
            "export": run.export_path,
        }

    def _stop_on_signal(self, observer: Observer) -> None:
        """SIGUSR1, which a cluster sends before it ends a job, and SIGTERM: save between two steps, and end. Where signals can be had."""

        def ask(name: str) -> None:
            self._stop_asked = True
            if self._run_now is not None:
                self._run_now.stop_asked = True
            observer.note(f"{name}: saving and ending after the step under way, or before it where it waits for groups")

        def terminate() -> None:
            if self._run_now is None or (self._terminated and self._machines is None):
                # Nothing to save, or asked for the second time: end as if nobody listened. (A cluster may send it again and again.)
                loop.remove_signal_handler(signal.SIGTERM)
                signal.raise_signal(signal.SIGTERM)
            elif not self._terminated:
                self._terminated = True
                ask("SIGTERM")

        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()  # its handlers are removed when it is closed
            loop.add_signal_handler(signal.SIGUSR1, ask, "SIGUSR1")
            loop.add_signal_handler(signal.SIGTERM, terminate)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # one that came before is delivered now


def rewind(recipe: Recipe, run_dir: Path) -> RecoverPoint | None:
    """The newest recover checkpoint of a run, with the run's records cut back to it; None, and empty records, where there is none."""
    found = points(recover_folder(recipe, run_dir))
    step = found[-1].step if found else -1
    for name in (METRICS_FILE, TRAINED_FILE):
        cut_after(run_dir / name, step)
    return found[-1] if found else None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Send what this process logs about the run to the run's own file, as every other process of it does."""
    ours = logging.getLogger("areal_mega")
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.setLevel(level)
        ours.removeHandler(handler)
        handler.close()


def _fitting(recipe: Recipe, tokenizer: Any, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Rows whose prompts are short enough, and how many were skipped."""
    data = recipe.data
    fitting = fit_prompts(rows, tokenizer, max_tokens=data.max_prompt_tokens, overlong=data.overlong_prompt)
    return fitting.rows, len(fitting.skipped)


def _with_workflow(recipe: Recipe, path: str | None, kwargs: Mapping[str, Any] | None) -> Recipe:
    given: dict[str, Any] = {}
    if path is not None:
        given["path"] = path
    if kwargs is not None:
        given["kwargs"] = dict(kwargs)
    return recipe.model_copy(update={"workflow": recipe.workflow.model_copy(update=given)}) if given else recipe


def _with_datasets(recipe: Recipe, given: Mapping[str, Rows | None]) -> tuple[Recipe, dict[str, list[dict[str, Any]] | None]]:
    """Point the recipe at the files that will hold the given rows, and check the rows as if they came from there."""
    datasets: dict[str, list[dict[str, Any]] | None] = {"train": None, "valid": None}
    data = recipe.data
    for name, rows in given.items():
        if rows is None:
            continue
        checked = check_rows(rows, f"{name}_dataset")
        if not checked:
            raise UserError(f"{name}_dataset has no rows")
        datasets[name] = checked
        path = Path(recipe.run.root).absolute() / recipe.run.name / "data" / f"{name}.jsonl"
        data = data.model_copy(update={name: DatasetSection(loader="jsonl", path=str(path))})
    return recipe.model_copy(update={"data": data}), datasets


def _keep_datasets(run_dir: Path, datasets: Mapping[str, list[dict[str, Any]] | None]) -> None:
    for name, rows in datasets.items():
        if rows is not None:
            (run_dir / "data").mkdir(exist_ok=True)
            with (run_dir / "data" / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
