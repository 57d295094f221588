"""The one object that the trainer tells what happened: file first, then every view of it."""

from __future__ import annotations

import json
import logging
import queue
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from areal_mega.config.schema import ObserveSection
from areal_mega.core.metrics import Metric
from areal_mega.observe.console import ConsoleSink
from areal_mega.observe.jsonl import JsonlSink, cut_after
from areal_mega.observe.mlflow_sink import MlflowSink, RunStatus, local_store_uri
from areal_mega.observe.record import StepRecord

log = logging.getLogger(__name__)

PROVENANCE_FILE = "provenance.json"
_TAGS = ("algorithm.name", "model.path", "train.strategy", "rollout.strategy", "run.seed")


class Observer:
    """Writes ``metrics.jsonl``, the console, MLflow and the final report of one run directory.

    Args:
        section: the recipe's ``observe``.
        run_dir: made where missing; a resumed run goes on in its files.
        recipe_resolved: the whole recipe as plain data. Written to ``recipe.yaml`` unless that is there already.
        provenance: dotted path of each setting -> where its value came from; kept for the report.
    """

    def __init__(
        self, section: ObserveSection, run_dir: Path, recipe_resolved: Mapping[str, Any], provenance: Mapping[str, str] | None = None
    ) -> None:
        self._section = section
        self._run_dir = run_dir
        self._jsonl = JsonlSink(run_dir)
        run = recipe_resolved.get("run", {})
        self._console = ConsoleSink(section.console, total_steps=run.get("steps"))
        if not (run_dir / "recipe.yaml").exists():
            (run_dir / "recipe.yaml").write_text(yaml.safe_dump(dict(recipe_resolved), sort_keys=False, allow_unicode=True))
        if provenance is not None:
            (run_dir / PROVENANCE_FILE).write_text(json.dumps(dict(provenance), indent=1) + "\n", encoding="utf-8")
        # Filled by MLflow's thread, shown by the trainer's: two threads writing to one terminal garble it.
        self._notes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._mlflow: MlflowSink | None = None
        if section.mlflow:
            self._mlflow = MlflowSink(
                run_dir,
                uri=section.mlflow_uri or local_store_uri(run_dir.absolute().parent),
                experiment=section.mlflow_experiment,
                run_name=str(run.get("name", run_dir.name)),
                tags={path: str(value) for path in _TAGS if (value := _at(recipe_resolved, path)) is not None},
                on_trouble=self._notes.put,
            )
        if self._jsonl.torn_bytes:
            self.note(f"{self._jsonl.path}: cut off the {self._jsonl.torn_bytes} bytes of a line that was never finished")
        self._closed = False

    def log(self, step: int, metrics: Mapping[str, Metric], histograms: Mapping[str, Mapping[int, int]] | None = None) -> StepRecord:
        """Record one step. Returns when the file has it; never waits for MLflow."""
        record = StepRecord.of(step, metrics, histograms)
        self._jsonl.write(record)
        self._show_notes()
        self._console.write(record)
        if self._mlflow is not None:
            self._mlflow.notify()
        return record

    def rewind(self, step: int) -> None:
        """Forget what was recorded of steps beyond ``step``: the run goes on from there and records them again."""
        kept = cut_after(self._jsonl.path, step)
        if self._mlflow is not None:
            self._mlflow.rewound(kept)

    def note(self, text: str) -> None:
        """A sentence for the person who watches."""
        self._show_notes()
        self._console.note(text)

    def close(self, status: RunStatus = "FINISHED") -> Path | None:
        """Finish the files, write the report where the recipe asks for it (returns its path), end the MLflow run. Once only."""
        if self._closed:
            return None
        self._closed = True
        self._jsonl.close()
        report: Path | None = None
        try:
            if self._section.report:
                from areal_mega.observe.report import write_report

                report = write_report(self._run_dir)
        except Exception as error:
            # Of a run that failed, the failure is the news; one that failed before its first step has nothing to show at all.
            if status == "FINISHED":
                raise
            log.warning("no report: %s", error)
        finally:
            left_over = self._mlflow.close(status) if self._mlflow is not None else None
            self._show_notes()
            if left_over is not None:
                self._console.note(left_over)
        return report

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close("FINISHED" if kind is None else "KILLED" if kind is KeyboardInterrupt else "FAILED")

    def _show_notes(self) -> None:
        while not self._notes.empty():
            self._console.note(self._notes.get())


def _at(recipe: Mapping[str, Any], dotted: str) -> Any:
    value: Any = recipe
    for key in dotted.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value
