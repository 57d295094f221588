"""The report is one page, made from files alone, that shows every figure there is data for."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import fabricate
import pytest

from areal_mega.config.schema import ObserveSection
from areal_mega.core.errors import UserError
from areal_mega.core.metrics import last, mean
from areal_mega.observe.observer import Observer
from areal_mega.observe.report import write_report

QUIET = ObserveSection(console="off", mlflow=False)


class Page(HTMLParser):
    """Collects tags, images and text, and checks that what is opened is closed."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.images: dict[str, str] = {}
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        assert not any(name in values for name in ("onload", "onclick"))
        if tag == "img":
            self.images[values["alt"] or ""] = values["src"] or ""
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(run: Path) -> Page:
    html = write_report(run).read_text(encoding="utf-8")
    assert not re.search(r'(?:src|href)=(?!"data:)', html), "the page must need no other file"
    return Page(html)


def record(run: Path, steps, provenance=fabricate.PROVENANCE) -> None:
    with Observer(QUIET.model_copy(update={"report": False}), run, fabricate.RECIPE, provenance) as observer:
        for step, metrics, histograms in steps:
            observer.log(step, metrics, histograms)


def svg(page: Page, heading: str) -> str:
    source = page.images[f"{heading} by train step"]
    text = base64.b64decode(source.removeprefix("data:image/svg+xml;base64,"), validate=True).decode()
    ET.fromstring(text)
    return text


def test_every_figure_is_embedded_with_the_summary_and_the_recipe(tmp_path: Path) -> None:
    record(tmp_path, fabricate.steps(40))
    page = page_of(tmp_path)
    headings = [
        "Reward",
        "Evaluation",
        "Staleness",
        "Length bias",
        "Time split",
        "Train–inference mismatch",
        "Throughput",
        "Optimisation",
        "Weight sync",
    ]
    assert list(page.images) == [f"{heading} by train step" for heading in headings]
    for heading in headings:
        assert len(svg(page, heading)) > 5000
    assert "age in versions" in svg(page, "Staleness") and "wait for rollouts" in svg(page, "Time split")
    assert "current version only" in svg(page, "Train–inference mismatch")
    for words in ("demo", "40 of 40", "accuracy @ 0", "0.328", "accuracy @ 40", "0.938", "tokens trained", "quickstart.yaml:2"):
        assert words in page.text, words
    assert "not measured" not in page.text


def test_an_unmeasured_figure_says_so_instead_of_showing_zero(tmp_path: Path) -> None:
    record(tmp_path, [(1, {"reward/mean": mean(1, 2)}, {})], provenance=None)
    page = page_of(tmp_path)
    assert list(page.images) == ["Reward by train step"]
    assert page.text.count("not measured in this run") == 8
    assert "pre" in page.tags and "max_new_tokens: 16" in page.text


def test_the_length_bias_is_told_in_words(tmp_path: Path) -> None:
    means = {"staleness/fresh_tokens": mean(200, 4), "staleness/fresh_reward": mean(2, 4)}
    late = {"staleness/late_tokens": mean(300, 1), "staleness/late_reward": mean(0, 1)}
    lengths = {"staleness/fresh_length": {48: 3, 56: 1}}
    record(tmp_path, [(1, means, lengths)])
    assert "All 4 samples were within the staleness bound" in page_of(tmp_path).text
    record(tmp_path, [(2, means | late, {**lengths, "staleness/late_length": {288: 1}})])
    text = page_of(tmp_path).text
    assert "1 of 9 samples (11.1%) had tokens beyond the staleness bound: mean length 300 tokens, mean reward 0.000." in text
    assert "changes the mean length by -35.7% and the mean reward by +0.056" in text


def test_a_long_run_stays_a_small_page(tmp_path: Path) -> None:
    record(tmp_path, fabricate.steps(3000))
    page_of(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 3_000_000


def test_strange_values_do_not_break_the_page(tmp_path: Path) -> None:
    odd = {"reward/mean": last(float("nan")), "train/loss": last(float("inf")), "mismatch/abs_mean": last(0.0), "reward/<b>": last(1.0)}
    record(tmp_path, [(1, odd, {"staleness/age": {0: 0}}), (2, odd, {})])
    page = page_of(tmp_path)
    assert "b" not in page.tags


def test_reporting_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no metrics\.jsonl"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no finished step yet"):
        write_report(tmp_path)


def test_a_run_that_ends_leaves_its_report(tmp_path: Path) -> None:
    observer = Observer(QUIET, tmp_path, fabricate.RECIPE)
    observer.log(1, {"reward/mean": last(1)})
    assert observer.close() == tmp_path / "report.html"
    assert observer.close() is None


def test_a_run_that_fails_before_its_first_step_shows_its_own_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyboardInterrupt), Observer(QUIET.model_copy(update={"report": True}), tmp_path, fabricate.RECIPE):
        raise KeyboardInterrupt
    assert not (tmp_path / "report.html").exists()
    assert "no report: " in caplog.text
