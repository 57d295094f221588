from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_mega.config.loader import load_recipe, load_with_provenance, resolved_dict
from areal_mega.config.provenance import leaves, schema_leaves
from areal_mega.config.schema import Recipe
from areal_mega.core.errors import UserError

MINIMAL = """\
run:
  name: tiny
  steps: 3
model:
  path: some/model
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as error:
        load_recipe(path, overrides)
    message = str(error.value)
    assert "\n" not in message
    return message


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# --- values and where they came from -------------------------------------------------------------------------------------------------


def test_files_overrides_and_defaults_each_say_so(tmp_path: Path) -> None:
    written(tmp_path / "base.yaml", MINIMAL + "train:\n  batch_size: 4\n  optimizer:\n    lr: 1e-5\n")
    written(tmp_path / "mid.yaml", "extends: base.yaml\ntrain:\n  optimizer: {beta1: 0.8}\n")
    top = written(tmp_path / "top.yaml", "extends: [mid.yaml]\n\nrun:\n  steps: 5\nreward:\n  kwargs:\n    tolerance: 1e-3\n")
    loaded = load_with_provenance(top, ["train.minibatches=2", "reward.kwargs.strict=true"])
    r = loaded.recipe
    assert (r.run.steps, r.run.name, r.train.batch_size, r.train.minibatches) == (5, "tiny", 4, 2)
    assert (r.train.optimizer.lr, r.train.optimizer.beta1, r.train.optimizer.beta2) == (1e-5, 0.8, 0.95)
    assert r.reward.kwargs == {"tolerance": 1e-3, "strict": True}
    origins = {path: str(origin).removeprefix(f"{tmp_path}/") for path, origin in loaded.provenance.items()}
    assert origins["run.steps"] == "top.yaml:4"
    assert origins["run.name"] == "base.yaml:2"
    assert origins["train.optimizer.lr"] == "base.yaml:9"
    assert origins["train.optimizer.beta1"] == "mid.yaml:3"
    assert origins["train.optimizer.beta2"] == "default"
    assert origins["train.minibatches"] == "override train.minibatches=2"
    assert origins["reward.kwargs"] == "override reward.kwargs.strict=true"
    assert set(origins) == {leaf.path for leaf in leaves(r)}


def test_another_loader_takes_none_of_the_old_ones_arguments(tmp_path: Path) -> None:
    written(tmp_path / "base.yaml", MINIMAL + "data:\n  train: {loader: arithmetic, limit: 9, kwargs: {high: 49}}\n")
    other = written(tmp_path / "other.yaml", "extends: base.yaml\ndata:\n  train: {loader: my.module:rows}\n")
    same = written(tmp_path / "same.yaml", "extends: base.yaml\ndata:\n  train: {loader: arithmetic, kwargs: {digits: 2}}\n")
    assert load_recipe(other).data.train.kwargs == {}
    assert load_recipe(other).data.train.limit == 9
    assert load_recipe(same).data.train.kwargs == {"high": 49, "digits": 2}


def test_an_override_replaces_a_mapping_and_a_longer_one_sets_a_key_of_it(tmp_path: Path) -> None:
    path = written(tmp_path / "recipe.yaml", MINIMAL + "reward:\n  kwargs: {tolerance: 1e-3, strict: false}\n")
    assert load_with_provenance(path, ["reward.kwargs={}"]).recipe.reward.kwargs == {}
    assert load_with_provenance(path, ["reward.kwargs={strict: true}"]).recipe.reward.kwargs == {"strict": True}
    assert load_with_provenance(path, ["reward.kwargs.strict=true"]).recipe.reward.kwargs == {"tolerance": 1e-3, "strict": True}


def test_later_bases_win_over_earlier_and_the_recipe_over_both(tmp_path: Path) -> None:
    written(tmp_path / "a.yaml", MINIMAL + "train: {batch_size: 2, minibatches: 2}\n")
    written(tmp_path / "b.yaml", "train: {batch_size: 4}\nrun: {seed: 7}\n")
    r = load_recipe(written(tmp_path / "c.yaml", "extends: [a.yaml, b.yaml]\nrun: {seed: 8}\n"))
    assert (r.train.batch_size, r.train.minibatches, r.run.seed) == (4, 2, 8)


def test_paths_of_extends_are_relative_to_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    written(tmp_path / "base.yaml", MINIMAL)
    written(tmp_path / "deep" / "top.yaml", "extends: ../base.yaml\n")
    monkeypatch.chdir(tmp_path)
    loaded = load_with_provenance("deep/top.yaml")
    assert str(loaded.provenance["run.name"]) == "base.yaml:2"


def test_optional_sections_appear_and_disappear_whole(tmp_path: Path) -> None:
    path = written(tmp_path / "r.yaml", MINIMAL + "data:\n  valid: {loader: jsonl, path: v.jsonl}\n")
    assert load_recipe(path).data.valid is not None
    assert load_recipe(path, ["data.valid=null"]).data.valid is None
    assert load_recipe(path, ["warmup.data.loader=jsonl"]).warmup.data is not None


def test_scalars_are_read_by_yaml_1_2(recipe: Path) -> None:
    r = load_recipe(recipe, ["observe.console=off", "train.optimizer.lr=1e-6", "run.name=2024-01-01", "run.seed=010", "model.path='on'"])
    assert (r.observe.console, r.train.optimizer.lr, r.run.name, r.run.seed, r.model.path) == ("off", 1e-6, "2024-01-01", 10, "on")
    kwargs = load_recipe(recipe, ["reward.kwargs={a: 1e-6, b: yes, c: 1:30, d: 0x10, e: null, f: [.5, -1]}"]).reward.kwargs
    assert kwargs == {"a": 1e-6, "b": "yes", "c": "1:30", "d": 16, "e": None, "f": [0.5, -1]}


def test_anchors_and_merges(tmp_path: Path) -> None:
    text = MINIMAL + "data:\n  train: &set\n    loader: jsonl\n    path: a.jsonl\n  valid:\n    <<: *set\n    path: b.jsonl\n"
    loaded = load_with_provenance(written(tmp_path / "r.yaml", text))
    valid = loaded.recipe.data.valid
    assert valid is not None
    assert (valid.loader, valid.path) == ("jsonl", "b.jsonl")
    assert str(loaded.provenance["data.valid.path"]).endswith("r.yaml:12")
    assert str(loaded.provenance["data.valid.loader"]).endswith("r.yaml:8")


def test_a_resolved_recipe_loads_again_as_itself(recipe: Path, tmp_path: Path) -> None:
    import yaml

    r = load_recipe(recipe, ["data.valid.loader=jsonl", "reward.kwargs={a: 1}", "train.optimizer.lr=3e-7"])
    again = written(tmp_path / "again.yaml", yaml.safe_dump(resolved_dict(r), sort_keys=False))
    assert load_recipe(again) == r


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=1e-300))
def test_floats_survive_the_command_line(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.getbasetemp() / "float.yaml"
    if not path.exists():
        path.write_text(MINIMAL)
    assert load_recipe(path, [f"reward.timeout_s={value!r}"]).reward.timeout_s == value


# --- mistakes ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "key", "meant"),
    [
        ("train:\n  batchsize: 3\n", 7, "train.batchsize", "train.batch_size"),
        ("trian:\n  batch_size: 3\n", 6, "trian", "train"),
        ("train:\n  optimizer:\n    learning_rat: 3\n    lr_min: 1\n", 8, "train.optimizer.learning_rat", None),
        ("train:\n  lr: 1e-6\n", 7, "train.lr", "train.optimizer.lr"),
        ("data:\n  valid:\n    pth: x\n", 8, "data.valid.pth", "data.valid.path"),
        ("temperature: 0.5\n", 6, "temperature", "rollout.temperature"),
    ],
)
def test_a_typo_names_file_line_and_what_was_meant(tmp_path: Path, text: str, line: int, key: str, meant: str | None) -> None:
    message = refusal(written(tmp_path / "r.yaml", MINIMAL + text))
    assert message.startswith(f"{tmp_path}/r.yaml:{line}: unknown key '{key}'; ")
    if meant:
        assert f"did you mean '{meant}'?" in message


def test_a_typo_on_the_command_line(recipe: Path) -> None:
    message = refusal(recipe, "rollout.group_sizes=3")
    assert message == "override rollout.group_sizes=3: unknown key 'rollout.group_sizes'; did you mean 'rollout.group_size'?"


@given(st.sampled_from(sorted(schema_leaves())), st.data())
def test_one_dropped_letter_is_always_seen(tmp_path_factory: pytest.TempPathFactory, path: str, data: st.DataObject) -> None:
    recipe = tmp_path_factory.getbasetemp() / "typo.yaml"
    if not recipe.exists():
        recipe.write_text(MINIMAL)
    *above, name = path.split(".")
    if len(name) < 4:
        return
    drop = data.draw(st.integers(0, len(name) - 1))
    typo = ".".join([*above, name[:drop] + name[drop + 1 :]])
    if typo in set(schema_leaves()):
        return
    # top_ may be top_p or top_k: any sibling that loses one letter to become the typo will do.
    siblings = [p for p in schema_leaves() if p.split(".")[:-1] == above]
    meant = {p for p in siblings if typo in {p[:i] + p[i + 1 :] for i in range(len(p))}}
    message = refusal(recipe, f"{typo}=1")
    assert path in meant
    assert message in {f"override {typo}=1: unknown key '{typo}'; did you mean '{p}'?" for p in meant}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.batch_size=eight", "train.batch_size is 'eight', but must be an integer (Prompts (groups) per train step; in prompts)"),
        ("train.batch_size=true", "train.batch_size is true, but must be an integer"),
        ("train.batch_size='8'", "train.batch_size is '8', but must be an integer"),
        ("train.batch_size=8.0", "train.batch_size is 8.0, but must be an integer"),
        ("train.batch_size=0", "train.batch_size is 0, but must be greater than 0"),
        ("train.batch_size=", "train.batch_size is empty, but must be an integer"),
        ("rollout.top_p=1.5", "must be less than or equal to 1"),
        ("train.optimizer.lr=.nan", "train.optimizer.lr is nan, but must be"),
        ("train.optimizer.lr=.inf", "train.optimizer.lr is inf, but must be"),
        ("run.name=3", "run.name is 3, but must be a string; write it in quotes: name: '3'"),
        ("run.overlap=yes", "run.overlap is 'yes', but must be a boolean"),
        ("rollout.stop=x", "rollout.stop is 'x', but must be a list"),
        ("launch.train_cpus=[0, a]", "launch.train_cpus.1 is 'a', but must be an integer (Pin train ranks"),
        ("observe.console=riche", "must be 'rich', 'plain' or 'off'; did you mean rich?"),
        ("train=3", "train is a section with the keys strategy, batch_size"),
        ("train=", "train is a section with the keys strategy, batch_size"),
        ("reward.kwargs=3", "reward.kwargs is 3, but must be a dictionary"),
        ("x", "override 'x' is not of the form section.key=value"),
        ("=3", "is not of the form"),
        ("train..x=3", "is not of the form"),
        ("run.name=[", "override 'run.name=[': not valid YAML"),
        ("extends=base.yaml", "extends belongs in a recipe file"),
    ],
)
def test_wrong_values_are_one_line_with_origin(recipe: Path, override: str, expected: str) -> None:
    message = refusal(recipe, override)
    assert expected in message
    assert message.startswith(f"override {override}:") or f"override '{override}'" in message


def test_an_override_given_twice(recipe: Path) -> None:
    assert "already overridden by 'run.seed=1'" in refusal(recipe, "run.seed=1", "run.seed=2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty; a recipe needs at least run.name, run.steps and model.path"),
        ("# nothing\n", "is empty"),
        ("- a\n", "r.yaml:1: a recipe is a mapping of sections"),
        ("run: {name: x, steps: 3\nmodel: {path: p}\n", "r.yaml:2: not valid YAML"),
        (
            "run: {name: x}\nmodel: {path: p}\n",
            "r.yaml: run.steps is missing (Train steps after warm-up); add it, or override it with run.steps=…",
        ),
        ("run: {name: x, stps: 3}\nmodel: {path: p}\n", "r.yaml:1: unknown key 'run.stps'; did you mean 'run.steps'? (and 1 more problem)"),
        (MINIMAL + "run:\n  seed: 3\n", "r.yaml:6: 'run' is given twice; first at"),
        (MINIMAL + "train:\n  batch_size: 3\n  minibatches: 1\n  batch_size: 4\n", "r.yaml:9: 'batch_size' is given twice; first at"),
        (MINIMAL + "1: 2\n", "r.yaml:6: keys are text"),
        (MINIMAL + "extends: 3\n", "r.yaml:6: extends names a recipe file"),
        (MINIMAL + "extends: nowhere.yaml\n", "r.yaml:6: extends 'nowhere.yaml', but there is no file"),
        (MINIMAL + "run2: !!python/object:os.system {}\n", "could not determine a constructor for the tag"),
    ],
)
def test_broken_files_are_one_line_with_file_and_line(tmp_path: Path, text: str, expected: str) -> None:
    message = refusal(written(tmp_path / "r.yaml", text))
    assert expected in message
    assert str(tmp_path) in message


def test_circles_of_extends(tmp_path: Path) -> None:
    written(tmp_path / "a.yaml", "extends: b.yaml\n" + MINIMAL)
    written(tmp_path / "b.yaml", "extends: a.yaml\n")
    message = refusal(tmp_path / "a.yaml")
    assert "circle" in message
    assert f"{tmp_path}/a.yaml -> {tmp_path}/b.yaml -> {tmp_path}/a.yaml" in message


def test_a_base_shared_by_two_parents_is_no_circle(tmp_path: Path) -> None:
    written(tmp_path / "base.yaml", MINIMAL)
    written(tmp_path / "a.yaml", "extends: base.yaml\n")
    written(tmp_path / "b.yaml", "extends: base.yaml\nrun: {seed: 3}\n")
    assert load_recipe(written(tmp_path / "c.yaml", "extends: [a.yaml, b.yaml]\n")).run.seed == 3


def test_missing_files_and_folders(tmp_path: Path) -> None:
    written(tmp_path / "good.yaml", MINIMAL)
    assert f"no recipe {tmp_path}/god.yaml; there are: {tmp_path}/good.yaml" in refusal(tmp_path / "god.yaml")
    assert "is a folder" in refusal(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot read recipe" in refusal(tmp_path / "binary.yaml")


def test_a_recipe_is_frozen(recipe: Path) -> None:
    from pydantic import ValidationError

    r: Recipe = load_recipe(recipe)
    with pytest.raises(ValidationError):
        r.run.steps = 5
