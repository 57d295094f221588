"""``areal-mega doctor``: what is installed, what is missing, and what is used instead."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

State = Literal["ok", "absent", "broken", "unrelated"]
STYLES: dict[State, str] = {"ok": "green", "absent": "yellow", "broken": "red", "unrelated": "red"}
SLURM_COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
PROBE_TIMEOUT_S = 120.0
# Run by the interpreter that would start the server; prints one line of JSON.
SGLANG_PROBE = """
import importlib.metadata, importlib.util, json
found = importlib.util.find_spec("sglang") is not None
out = {"version": importlib.metadata.version("sglang") if found else None}
if found:
    import torch
    out["torch"], out["gpus"] = torch.__version__, torch.cuda.device_count()
print(json.dumps(out))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked for. ``use`` says what the program does, given that."""

    name: str
    state: State
    detail: str
    use: str
    required: bool = False


def doctor(
    sglang_python: Annotated[
        str | None, typer.Option("--sglang-python", metavar="PYTHON", help="Interpreter of SGLang's own environment (rollout.python).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what is installed here and what will be used.

    Exits with 1 when something required is missing.
    """
    findings = examine(sglang_python)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        _print_table(findings)
    if any(f.required and f.state != "ok" for f in findings):
        raise typer.Exit(1)


def examine(sglang_python: str | None = None) -> list[Finding]:
    """Look at everything. Imports torch; never imports a package only because it has a promising name."""
    checks: list[Callable[[], Finding]] = [_python, _torch, _gpus, _nccl, _megatron, _transformer_engine, _apex]
    return [*(check() for check in checks), _sglang(sglang_python), _mlflow(), _slurm()]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Finding:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    detail = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {cores} cores, {memory:.0f} GiB memory"
    return Finding("machine", "ok", detail, sys.executable)


def _torch() -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", "broken", _one_line(error), "nothing works without it: install torch", required=True)
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPU"
    return Finding("torch", "ok", f"{torch.__version__}, {built}", "training, and the embedded inference server", required=True)


def _gpus() -> Finding:
    try:
        import torch
    except (ImportError, OSError):
        return Finding("GPUs", "absent", "unknown without torch", "nothing")
    # device_count answers without creating a context; properties are asked for only where there is one.
    count = torch.cuda.device_count()
    if count == 0:
        return Finding("GPUs", "absent", "no CUDA device is visible", "CPU: gloo, PyTorch layers, the same engine")
    names = [torch.cuda.get_device_properties(i) for i in range(count)]
    detail = ", ".join(f"{p.name} ({p.total_memory / 2**30:.0f} GiB)" for p in names)
    return Finding("GPUs", "ok", f"{count}: {detail}", "CUDA devices for train ranks and inference servers")


def _nccl() -> Finding:
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError):
        return Finding("NCCL", "absent", "unknown without torch", "nothing")
    if not dist.is_nccl_available():
        return Finding("NCCL", "absent", "torch was built without it", "gloo for training and weight sync")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    use = "NCCL for training and weight sync" if torch.cuda.device_count() else "gloo: NCCL needs a GPU"
    return Finding("NCCL", "ok", version, use)


def _megatron() -> Finding:
    version = _version("megatron-core")
    if version is None:
        return Finding("megatron-core", "absent", "not installed", "training is not possible: install megatron-core", required=True)
    return Finding("megatron-core", "ok", version, "the training engine", required=True)


def _transformer_engine() -> Finding:
    fallback = "PyTorch layers (exact, slower on GPUs)"
    if importlib.util.find_spec("transformer_engine") is None:
        return Finding("Transformer Engine", "absent", "not installed (extra: areal-mega[cuda])", fallback)
    version = _version("transformer-engine") or _version("transformer_engine_torch") or "unknown version"
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # its import runs CUDA set-up, which fails in many ways; each is a finding here
        return Finding("Transformer Engine", "broken", f"{version}, but importing it failed: {_one_line(error)}", fallback)
    return Finding("Transformer Engine", "ok", version, "Transformer Engine layers on GPUs")


def _apex() -> Finding:
    """NVIDIA apex by its own modules. The apex of PyPI is another program; neither is imported to find out."""
    fallback = "PyTorch's optimizer and norms"
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Finding("NVIDIA apex", "absent", "not installed", fallback)
    return judge_apex([Path(p) for p in spec.submodule_search_locations or ()], importlib.util.find_spec("amp_C") is not None)


def judge_apex(folders: list[Path], has_kernels: bool) -> Finding:
    """Tell NVIDIA's apex from the one on PyPI.

    Args:
        folders: where the package ``apex`` lies.
        has_kernels: whether its extension ``amp_C`` is importable.
    """
    fallback = "PyTorch's optimizer and norms"
    where = ", ".join(map(str, folders)) or "a single module"
    if not any((folder / "multi_tensor_apply").is_dir() and (folder / "optimizers").is_dir() for folder in folders):
        return Finding("NVIDIA apex", "unrelated", f"the apex in {where} is not NVIDIA's (PyPI has another): uninstall it", fallback)
    if not has_kernels:
        return Finding("NVIDIA apex", "broken", f"{where} was built without its CUDA extensions (no amp_C)", fallback)
    return Finding("NVIDIA apex", "ok", where, "fused optimizer and norms on GPUs")


def _sglang(python: str | None) -> Finding:
    fallback = "the embedded server (rollout.strategy embedded:d1)"
    interpreter = python or sys.executable
    where = f"in {interpreter}"
    if shutil.which(interpreter) is None:
        return Finding("SGLang", "broken", f"no interpreter {interpreter}", fallback)
    try:
        done = subprocess.run([interpreter, "-c", SGLANG_PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Finding("SGLang", "broken", f"{where} did not answer within {PROBE_TIMEOUT_S:.0f} s", fallback)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Finding("SGLang", "broken", f"{where}: {last}", fallback)
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    if answer["version"] is None:
        hint = "" if python else "; it lives in its own environment: name it with --sglang-python"
        return Finding("SGLang", "absent", f"not installed {where}{hint}", fallback)
    detail = f"{answer['version']} with torch {answer['torch']}, {answer['gpus']} GPUs, {where}"
    return Finding("SGLang", "ok", detail, "rollout.strategy sglang:…" + (f" with rollout.python={python}" if python else ""))


def _mlflow() -> Finding:
    version = _version("mlflow")
    if version is None:
        return Finding("MLflow", "absent", "not installed", "metrics.jsonl only (observe.mlflow=false)")
    return Finding("MLflow", "ok", version, "metrics and recipes are sent to it")


def _slurm() -> Finding:
    found = [command for command in SLURM_COMMANDS if shutil.which(command)]
    missing = [command for command in SLURM_COMMANDS if command not in found]
    if not found:
        return Finding("Slurm", "absent", "no sbatch on PATH", "the local launcher")
    if missing:
        return Finding("Slurm", "broken", f"{', '.join(found)} found, but not {', '.join(missing)}", "the local launcher")
    done = subprocess.run(["sinfo", "--version"], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    return Finding(
        "Slurm", "ok", done.stdout.strip() or "unknown version", "areal-mega launch --on slurm; areal-mega train uses this machine alone"
    )


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _print_table(findings: list[Finding]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console() if sys.stdout.isatty() else Console(width=1000)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "state", "found", "so it uses"):
        table.add_column(column, overflow="fold", no_wrap=not sys.stdout.isatty())
    for finding in findings:
        table.add_row(Text(finding.name), Text(finding.state, style=STYLES[finding.state]), Text(finding.detail), Text(finding.use))
    console.print(table)
