"""Parallel strategies: five dimensions and two more, their string form, and the arithmetic that must hold.

Grammar (letters in any order, each at most once)::

    strategy   = engine ":" (dims | "(" "attn:" dims "|" "ffn:" dims ")")
    dims       = (letter number layers?)+
    layers     = "[" number ("," number)* "]"
    letter     = d (data, or replicas of a server) | t (tensor) | p (pipeline) | c (context) | v (virtual pipeline) | e (expert)

``layers`` stands behind ``p`` alone: how many layers each pipeline stage has, ``p2[3,5]``. With virtual stages there is one count per
virtual stage, in the order of the layers, which is Megatron-Core's: the first chunk of every stage, then the second of every stage.
Without counts every stage has the same number.

In the two-part form ``t`` of the ffn part is expert tensor parallelism, ``d`` expert data parallelism and ``p`` the pipeline again;
the last two are derived and may be given as a check. In the one-part form experts are not tensor-parallel (etp = 1).

World size is ``tp*pp*cp*dp``: expert parallelism folds into the same ranks, as in Megatron-Core, so that
``edp = tp*pp*cp*dp / (pp*ep*etp)`` must be a whole number. Inference servers fold experts into one replica: ``e`` divides ``t``.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from areal_mega.core.errors import UserError

LETTERS: Mapping[str, str] = {"d": "dp", "t": "tp", "p": "pp", "c": "cp", "v": "vpp", "e": "ep"}
NAMES: Mapping[str, str] = {
    "d": "data parallelism",
    "t": "tensor parallelism",
    "p": "pipeline parallelism",
    "c": "context parallelism",
    "v": "virtual pipeline stages",
    "e": "expert parallelism",
    "t of ffn": "expert tensor parallelism",
}
ENGINES: Mapping[str, str] = {"megatron": "dtpcve", "sglang": "dtpe", "vllm": "dtpe", "embedded": "d"}
ATTN_LETTERS, FFN_LETTERS = "dtpcv", "dtpe"

_TWO_PARTS = re.compile(r"\(attn:(?P<attn>[^|()]*)\|ffn:(?P<ffn>[^|()]*)\)")
_DIM = re.compile(r"([a-z])([0-9]+)((?:\[[0-9]+(?:,[0-9]+)*\])?)")


@dataclass(frozen=True)
class ParallelStrategy:
    """How one role is split over ranks. Every dimension is a count of ranks, except ``vpp``: model chunks per pipeline stage,
    and ``stage_layers``.

    Raises:
        UserError: for a dimension below 1, one the engine does not have, or products that do not match.
    """

    engine: str
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    stage_layers: tuple[int, ...] = ()
    """Layers of each (virtual) pipeline stage, in the order of the layers; empty: the same number each."""
    # What the user wrote: messages and `str` show it. Never copied by `replace`, so that it cannot go stale.
    _text: str = field(default="", init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_engine(self.engine, f"{self.engine}:")
        for letter, name in (*LETTERS.items(), ("t of ffn", "etp")):
            size = getattr(self, name)
            if size < 1:
                raise UserError(
                    f"strategy of {self.engine}: {name} is {size}, but a dimension counts ranks and is at least 1; legal: {name}=1"
                )
            if (size > 1 and letter[0] not in ENGINES[self.engine]) or (name == "etp" and size > 1 and self.engine != "megatron"):
                raise UserError(_unknown_dimension(self.engine, letter, str(self), str(_without(self, name))))
        _check_stage_layers(self)
        _check_products(self)

    @property
    def world_size(self) -> int:
        """Number of ranks: tp*pp*cp*dp."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def edp(self) -> int:
        """Expert data parallelism: how many ranks hold the same expert shard, within one pipeline stage."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def replica_size(self) -> int:
        """Ranks of one replica of the model: world size over ``dp``."""
        return self.tp * self.pp * self.cp

    @property
    def sequence_multiple(self) -> int:
        """Tokens of a packed sample are padded to a multiple of this: context parallelism cuts each into 2·cp equal chunks."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def microbatch_multiple(self) -> int:
        """The number of micro-batches is a multiple of this: an interleaved pipeline runs whole rounds of them."""
        return self.pp if self.vpp > 1 else 1

    @classmethod
    def parse(cls, text: str) -> ParallelStrategy:
        return parse(text)

    def __str__(self) -> str:
        return self._text or _format(self.engine, _sizes(self), self.stage_layers)


def parse(text: str) -> ParallelStrategy:
    """Read the string form. ``str(parse(text)) == text`` and ``parse(str(strategy)) == strategy``.

    Raises:
        UserError: one line with the arithmetic and a legal neighbour.
    """
    engine, colon, dims = text.partition(":")
    _check_engine(engine, text)
    if not colon or not dims:
        raise UserError(f"strategy '{text}' has no dimensions; write for example {engine}:d1")
    two = _TWO_PARTS.fullmatch(dims)
    if two is None and dims.startswith("("):
        raise UserError(f"strategy '{text}': two parts are written like {engine}:(attn:d4t2p2|ffn:e4t2)")
    if two is None:
        sizes = {LETTERS[letter]: size for letter, size in _read_dims(dims, text, engine, ENGINES[engine]).items()}
        layers = _read_layers(dims, text)
    elif engine != "megatron":
        raise UserError(f"strategy '{text}': only megatron takes separate attn and ffn parts; write for example {engine}:d1")
    else:
        sizes = _read_two_parts(two["attn"], two["ffn"], text)
        layers = _read_layers(two["attn"], text)
    strategy = ParallelStrategy(engine=engine, **sizes, stage_layers=layers)
    object.__setattr__(strategy, "_text", text)
    return strategy


def _read_two_parts(attn_text: str, ffn_text: str, text: str) -> dict[str, int]:
    attn = _read_dims(attn_text, text, "megatron", ATTN_LETTERS, part="attn")
    ffn = _read_dims(ffn_text, text, "megatron", FFN_LETTERS, part="ffn")
    layers = _read_layers(attn_text, text)
    if counts := _read_layers(ffn_text, text):
        pipeline = f"p{len(counts)}[{','.join(map(str, counts))}]"
        raise UserError(f"strategy '{text}': layers of each stage are given in the attn part; legal: megatron:(attn:d1{pipeline}|ffn:e1)")
    sizes = {LETTERS[letter]: size for letter, size in attn.items()}
    sizes |= {"ep": ffn.get("e", 1), "etp": ffn.get("t", 1)}
    pp = sizes.get("pp", 1)
    legal = _legal("megatron", sizes, layers)
    if ffn.get("p", pp) != pp:
        raise UserError(f"strategy '{text}': ffn has p{ffn['p']} but attn has p{pp}: experts live in the same stages; legal: {legal}")
    ranks, experts = sizes.get("tp", 1) * sizes.get("cp", 1) * sizes.get("dp", 1), sizes["ep"] * sizes["etp"]
    if "d" in ffn and ffn["d"] * experts != ranks:
        raise UserError(
            f"strategy '{text}': ffn d{ffn['d']}*e{sizes['ep']}*t{sizes['etp']} = {ffn['d'] * experts} ranks per stage, "
            f"but attn d*t*c = {ranks}; legal: {legal}"
        )
    return sizes


def _read_dims(dims: str, text: str, engine: str, allowed: str, part: str = "") -> dict[str, int]:
    """Letters and counts of one part, in the order written."""
    found = [(match[0], match[1], match[2]) for match in _DIM.finditer(dims)]
    where, legal = f"strategy '{text}'" + (f", part {part}" if part else ""), f"{part or engine}:"
    if not found or "".join(whole for whole, _, _ in found) != dims:
        example = "e8t1" if part == "ffn" else "".join(f"{letter}1" for letter in allowed[:2])
        raise UserError(f"{where}: '{dims}' is not a list of letters and counts; write for example {example}")
    sizes: dict[str, int] = {}
    for _, letter, digits in found:
        keep = "".join(whole for whole, other, _ in found if other != letter)
        if letter not in allowed:
            raise UserError(_unknown_dimension(engine, letter, where, legal + (keep or f"{allowed[0]}1"), allowed))
        if letter in sizes:
            first = f"{letter}{sizes[letter]}"
            raise UserError(f"{where}: dimension {letter} is given twice ({first} and {letter}{digits}); legal: {legal}{keep}{first}")
        if int(digits) < 1:
            raise UserError(f"{where}: {letter}{digits} is below 1, and a dimension counts ranks; legal: {legal}{keep}{letter}1")
        sizes[letter] = int(digits)
    return sizes


def _read_layers(dims: str, text: str) -> tuple[int, ...]:
    """Layers of each stage; empty where none are given."""
    layers: tuple[int, ...] = ()
    for whole, letter, digits, counts in ((m[0], m[1], m[2], m[3]) for m in _DIM.finditer(dims) if m[3]):
        if letter != "p":
            legal = text.replace(whole, f"{letter}{digits}")
            raise UserError(f"strategy '{text}': {whole} has counts of layers, which only p takes (one per stage); legal: {legal}")
        layers = tuple(map(int, counts[1:-1].split(",")))
    return layers


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """``layers`` over ``stages`` as evenly as they go: what is left over goes to the stages in the middle first, since the first also has
    the embedding and the last the output layer."""
    share, rest = divmod(layers, stages)
    more = [*range(1, stages - 1), 0, stages - 1][:rest]
    return tuple(share + (stage in more) for stage in range(stages))


def _check_stage_layers(s: ParallelStrategy) -> None:
    if not s.stage_layers or (s.vpp > 1 and s.pp == 1):  # the second is refused for itself
        return
    if s.engine != "megatron":
        raise UserError(f"strategy {s}: only megatron takes counts of layers; legal: {_format(s.engine, _sizes(s))}")
    stages, total = s.pp * s.vpp, sum(s.stage_layers)
    if len(s.stage_layers) == stages and min(s.stage_layers) >= 1:
        return
    legal = _format(s.engine, _sizes(s), even_layers(total, stages) if total >= stages else ())
    if len(s.stage_layers) != stages:
        product = f"p*v = {s.pp}*{s.vpp} = {stages} virtual stages" if s.vpp > 1 else f"p{s.pp}"
        raise UserError(f"strategy {s}: {len(s.stage_layers)} counts of layers for {product}; legal: {legal}")
    raise UserError(f"strategy {s}: a stage without layers; each has at least 1; legal: {legal}")


def _check_engine(engine: str, text: str) -> None:
    if engine in ENGINES:
        return
    close = difflib.get_close_matches(engine, ENGINES, n=1)
    hint = f"did you mean {close[0]}?" if close else f"engines: {', '.join(ENGINES)}"
    raise UserError(f"strategy '{text}': unknown engine '{engine}'; {hint} (form: megatron:d4t2p2c1e8)")


def _unknown_dimension(engine: str, letter: str, where: str, legal: str, allowed: str | None = None) -> str:
    known = " ".join(allowed or ENGINES[engine])
    name = NAMES.get(letter, "unknown")
    here = "" if allowed in (None, ENGINES[engine]) else " in this part"
    return f"{where}: {engine} has no dimension {letter} ({name}){here}, only {known}; legal: {legal}"


def _check_products(s: ParallelStrategy) -> None:
    if s.vpp > 1 and s.pp == 1:
        legal = [str(replace(s, vpp=1, stage_layers=())), str(replace(s, pp=2, stage_layers=()))]
        raise UserError(f"strategy {s}: v{s.vpp} needs a pipeline (p1 has nothing to interleave); legal: {' or '.join(legal)}")
    experts = s.ep * s.etp
    if s.engine != "megatron":
        if s.tp % s.ep:
            legal_tp = math.ceil(s.tp / s.ep) * s.ep
            raise UserError(
                f"strategy {s}: experts of a server are split inside its tensor-parallel ranks, and t{s.tp} / e{s.ep} = "
                f"{s.tp}/{s.ep} is not a whole number; legal: {_format(s.engine, _sizes(s) | {'tp': legal_tp})}"
            )
        return
    per_stage = s.tp * s.cp * s.dp
    if per_stage % experts:
        raise UserError(
            f"strategy {s}: edp = t*p*c*d / (p*e*etp) = {s.tp}*{s.pp}*{s.cp}*{s.dp} / ({s.pp}*{s.ep}*{s.etp}) = "
            f"{per_stage * s.pp}/{experts * s.pp} is not a whole number; legal: {_legal(s.engine, _sizes(s), s.stage_layers)}"
        )


def _sizes(s: ParallelStrategy) -> dict[str, int]:
    return {name: getattr(s, name) for name in (*LETTERS.values(), "etp")}


def _legal(engine: str, sizes: Mapping[str, int], layers: tuple[int, ...] = ()) -> str:
    """The nearest legal strategies: another ep where one exists, and another dp."""
    full = {"dp": 1, "tp": 1, "pp": 1, "cp": 1, "vpp": 1, "ep": 1, "etp": 1} | dict(sizes)
    base, experts = full["tp"] * full["cp"], full["ep"] * full["etp"]
    if (base * full["dp"]) % experts == 0:
        return _format(engine, full, layers)
    legal = []
    if (base * full["dp"]) % full["etp"] == 0:
        room = base * full["dp"] // full["etp"]
        divisors = [n for n in range(1, room + 1) if room % n == 0]
        legal.append(_format(engine, full | {"ep": min(divisors, key=lambda n: abs(n - full["ep"]))}, layers))
    step = experts // math.gcd(experts, base)
    legal.append(_format(engine, full | {"dp": math.ceil(full["dp"] / step) * step}, layers))
    return " or ".join(legal)


def _without(s: ParallelStrategy, name: str) -> str:
    known = {n: (1 if n == name or (n == "etp") or letter not in ENGINES[s.engine] else getattr(s, n)) for letter, n in LETTERS.items()}
    return _format(s.engine, known | {"etp": 1})


def _format(engine: str, sizes: Mapping[str, int], layers: tuple[int, ...] = ()) -> str:
    """The canonical form: ``d`` always, the others where they are not 1, two parts where experts are tensor-parallel."""
    shown = [name for name in LETTERS.values() if name != "ep" and (name == "dp" or sizes[name] > 1 or (name == "pp" and layers))]
    counts = f"[{','.join(map(str, layers))}]" if layers else ""
    dims = "".join(f"{letter}{sizes[name]}{counts if name == 'pp' else ''}" for letter, name in LETTERS.items() if name in shown)
    if sizes["etp"] > 1:
        return f"{engine}:(attn:{dims}|ffn:e{sizes['ep']}t{sizes['etp']})"
    return f"{engine}:{dims}" + (f"e{sizes['ep']}" if sizes["ep"] > 1 else "")
