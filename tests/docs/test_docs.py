"""What the pages say is there is there: links, verbs, flags, settings, metrics, strategies, presets; and their examples run."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml

from areal_mega.algorithms.registry import DEFAULT_CAP, DEFAULT_CLIP, DEFAULT_FLOOR, PRESETS
from areal_mega.cli.main import app
from areal_mega.config.loader import load_recipe
from areal_mega.config.provenance import schema_leaves
from areal_mega.config.schema import DatasetSection, Recipe
from areal_mega.core.errors import UserError
from areal_mega.core.imports import import_object
from areal_mega.core.types import NOT_GENERATED, Prompt
from areal_mega.data.registry import load_rows
from areal_mega.parallel.strategy import parse
from areal_mega.rewards.result import interpret
from areal_mega.rollout.inference import GenerateRequest, Generation
from areal_mega.rollout.load import load_workflow
from areal_mega.rollout.workflow import GenerationSettings, WorkflowContext

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LEAVES = set(schema_leaves())
SECTIONS = {".".join(path.split(".")[:n]) for path in LEAVES for n in range(1, path.count(".") + 1)}
TOP = set(Recipe.model_fields)
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "areal_mega").rglob("*.py")))
METRICS = re.compile(
    r"(reward|eval|batch|staleness|train|policy|correction|mismatch|kl|sync|time|rollout|router|throughput|sft)/([a-z_0-9]+)"
)
REFUSED = {"megatron:d3e2"}  # shown with its message
# A verb is told from prose by standing in code.
VERB = re.compile(r"(?:^|[\s/`])areal-mega((?:\s+[^\s`#|]+)+)", re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    """Fenced blocks of a language, without the indentation of the list that they stand in."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return ["\n".join(line[len(indent) :] for line in body.splitlines()) for indent, body in found]


def spans(page: Path) -> list[str]:
    """Inline code, outside fenced blocks."""
    prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


def each(kind: Any) -> list[Any]:
    return [pytest.param(page, item, id=f"{page.name}-{n}") for page in PAGES for n, item in enumerate(kind(page))]


def test_the_recipe_reference_is_what_the_schema_says() -> None:
    spec = importlib.util.spec_from_file_location("make_recipe_reference", ROOT / "scripts" / "make_recipe_reference.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PATH.read_text(encoding="utf-8") == script.reference(), "run python scripts/make_recipe_reference.py"
    named = set(re.findall(r"^\| `([^`]+)`", script.reference(), re.MULTILINE))
    assert named == LEAVES


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert file.resolve().is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(file), target


def test_every_page_is_named_in_the_readme() -> None:
    readme = PAGES[0].read_text(encoding="utf-8")
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in readme] == []


def invocations() -> Iterator[tuple[Path, list[str]]]:
    for page in PAGES:
        for code in [*spans(page), *blocks(page, "bash")]:
            for match in VERB.finditer(code.replace("python -m areal_mega ", "areal-mega ")):
                yield page, shlex.split(match[1].split("\n")[0])


def test_verbs_and_flags_exist() -> None:
    root: Any = typer.main.get_command(app)
    seen = 0
    for page, words in invocations():
        command: Any = root
        while words and hasattr(command, "commands"):
            assert words[0] in command.commands, f"{page.name}: areal-mega {' '.join(words)}"
            command = command.commands[words.pop(0)]
        seen += 1
        flags = {flag for parameter in command.params for flag in parameter.opts}
        if command.name == "serve":
            from areal_mega.serving.app import parser

            flags = set(parser()._option_string_actions)
        for word in words:
            if word.startswith("--") and word != "--help":
                assert word in flags, f"{page.name}: {command.name} has no {word}"
            elif "=" in word:
                assert word.partition("=")[0] in LEAVES, f"{page.name}: {word}"
    assert seen > 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_exist(page: Path) -> None:
    for span in spans(page):
        match = re.fullmatch(r"([a-z_]+(?:\.[a-z_0-9]+)+)(?:[=:].*)?", span)
        if match and match[1].split(".")[0] in TOP and not match[1].endswith((".yaml", ".jsonl", ".py", ".html")):
            assert match[1] in LEAVES | SECTIONS, span


def keys_of(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if path in SECTIONS and isinstance(value, dict):
            yield from keys_of(value, f"{path}.")
        elif path != "extends":
            yield path


@pytest.mark.parametrize(("page", "block"), each(lambda page: blocks(page, "yaml")))
def test_recipe_examples(page: Path, block: str, tmp_path: Path) -> None:
    tree = yaml.safe_load(block)
    assert set(keys_of(tree)) <= LEAVES
    if "extends" in tree:
        tree["extends"] = str(ROOT / tree["extends"])
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(tree))
        load_recipe(file)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_are_logged_somewhere(page: Path) -> None:
    for span in spans(page):
        match = METRICS.fullmatch(span)
        if match is None or (ROOT / span).exists():
            continue
        prefix, name = match.groups()
        counted = f'metrics[f"{prefix}/{{name}}"]' in SOURCE and f'"{name}"' in SOURCE
        # `parsed` is a named part of a reward: such names come from the reward function.
        assert f'"{span}"' in SOURCE or counted or name == "parsed", span


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_strategies_parse(page: Path) -> None:
    for text in re.findall(r"(?:megatron|sglang|embedded):(?:\([a-z0-9:|]+\)|[a-z0-9]+)", page.read_text(encoding="utf-8")):
        if text in REFUSED:
            with pytest.raises(UserError):
                parse(text)
        else:
            assert str(parse(text)) == text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_import_paths_exist(page: Path) -> None:
    for path in re.findall(r"`(areal_mega\.[\w.]+)`", page.read_text(encoding="utf-8")):
        import_object(path, "a name on the page")


def test_presets_are_those_of_the_registry() -> None:
    page = (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8")
    cells = [[c.strip(" `") for c in line.strip("|").split("|")] for line in page.splitlines() if line.endswith("|")]
    rows = {row[0]: row[1:] for row in cells if len(row) == 7 and row[0] in PRESETS}
    assert set(rows) == set(PRESETS)
    for name, (advantage, ratio, clip, aggregation, also, source) in rows.items():
        preset = PRESETS[name]
        low, high = preset.clip or DEFAULT_CLIP[preset.ratio]
        assert (advantage, ratio, aggregation, source) == (preset.advantage, preset.ratio, preset.aggregation, preset.source)
        assert [float(number) for number in clip.split(",")] == [low, high]
        assert ("filter_uniform_groups" in also, "mask_truncated" in also) == (preset.filter_uniform_groups, preset.mask_truncated)
    assert f"default cap {DEFAULT_CAP['tis']:g} " in page
    assert f"default {DEFAULT_FLOOR['mis']:g} and {DEFAULT_CAP['mis']:g} " in page


# --- the examples in Python


def test_the_script_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    """As written, up to the start of processes."""
    from areal_mega.controller.trainer import Trainer

    def train(self: Trainer, workflow: str | None = None, workflow_kwargs: dict[str, Any] | None = None) -> SimpleNamespace:
        assert workflow is not None
        import_object(workflow, "workflow")
        return SimpleNamespace(first_eval=0.0, last_eval=1.0, export=Path("model"))

    monkeypatch.setattr(Trainer, "train", train)
    monkeypatch.chdir(ROOT)
    (script,) = blocks(PAGES[0], "python")
    assert len([line for line in script.splitlines() if line.strip()]) <= 10
    exec(compile(script, "README.md", "exec"), {})


class Spaced:
    """A tokenizer of characters."""

    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(i) for i in ids if i)


class Sayings:
    """An engine that gives the answers it was told, one per request."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.asked: list[GenerateRequest] = []

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        self.asked += requests
        texts = [self.texts.pop(0) for _ in requests]
        return [
            Generation(
                output_ids=(*map(ord, text), 0),
                logprobs=(-0.5,) * (len(text) + 1),
                versions=(3,) * (len(text) + 1),
                finish_reason="stop",
                prompt_tokens=len(request.input_ids),
                text=text,
            )
            for text, request in zip(texts, requests, strict=True)
        ]


def example(page: str, name: str) -> Any:
    """The object ``name`` that an example on a page defines."""
    for block in blocks(ROOT / "docs" / page, "python"):
        if re.search(rf"^(?:def|class) {name}\b", block, re.MULTILINE):
            scope: dict[str, Any] = {}
            exec(compile(block, page, "exec"), scope)
            return scope[name]
    raise AssertionError(f"{page} has no {name}")


async def test_the_workflow_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    cls, exact = example("workflow-and-reward.md", "SecondTry"), example("workflow-and-reward.md", "exact")

    class Scorer:
        async def score(self, prompt: str, completion: str, row: Any) -> Any:
            return interpret(exact(prompt, completion, row))

    settings = GenerationSettings(group_size=2, max_new_tokens=8, temperature=1.0)
    context = WorkflowContext(tokenizer=Spaced(), settings=settings, reward=Scorer(), run_seed=1, evaluation=False)
    monkeypatch.setattr("areal_mega.rollout.load.import_object", lambda path, what: cls)
    workflow = load_workflow("my_module.SecondTry", {"hint": "?"}, context)
    engine = Sayings("42", "41", "42")
    trajectories = await workflow.arun_episode(engine, Prompt(id="a", epoch=0, row={"prompt": "17+25=", "answer": "42"}))
    assert trajectories is not None
    first, second = trajectories
    assert (first.reward, second.reward) == (1.0, 1.0)
    assert Spaced().decode(second.input_ids) == "17+25=41?42"
    assert list(second.loss_mask) == [False] * 6 + [True] * 3 + [False] + [True] * 3
    assert [int(v) for v in second.versions][6:] == [3, 3, 3, NOT_GENERATED, 3, 3, 3]
    assert (first.member, second.member) == (0, 1)
    assert engine.asked[2].seed == engine.asked[1].seed != engine.asked[0].seed


def test_the_reward_and_the_rows_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = example("workflow-and-reward.md", "exact")
    assert exact("", " 42\n", {"answer": "42"}, bonus=0.5) == {"reward": 1.5, "parsed": 1.0}
    assert interpret(exact("", "x", {"answer": "42"})).status == "unparsed"
    rows = example("workflow-and-reward.md", "rows")
    monkeypatch.setattr("areal_mega.data.registry.import_object", lambda path, what: rows)
    loaded = load_rows(DatasetSection(loader="my_module:rows", split="valid", kwargs={"count": 3}))
    assert [(row["id"], row["prompt"], row["answer"]) for row in loaded][2] == ("valid-2", "02+01=", "3")
