from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_mega.sync.digest import ROW_WORDS, SAMPLE_BYTES, SAMPLE_EVERY, DigestKind, combine, tensor_digest
from areal_mega.sync.digest import tensor_digest as of_kind

KINDS = st.sampled_from(["sums", "xxh3", "xxh3-sampled"])  # of a small tensor the sample is the whole
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def random_tensor(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    raw = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 400), st.sampled_from(DTYPES), st.integers(0, 2**31), st.data())
def test_every_changed_bit_and_every_swap_shows(count: int, dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
    tensor = random_tensor(count, dtype, seed)
    tensor_digest = partial(of_kind, kind=data.draw(KINDS))
    digest = tensor_digest(tensor)
    assert tensor_digest(tensor.clone()) == digest
    raw = tensor.clone().view(torch.uint8)
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= 1 << data.draw(st.integers(0, 7))
    assert tensor_digest(raw.view(dtype)) != digest
    i, j = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, count - 1))
    swapped = tensor.clone()
    swapped[i], swapped[j] = tensor[j].clone(), tensor[i].clone()
    same = torch.equal(swapped.view(torch.uint8), tensor.view(torch.uint8))
    assert (tensor_digest(swapped) == digest) == same


@pytest.mark.parametrize("words", [ROW_WORDS - 1, ROW_WORDS, ROW_WORDS + 1, 3 * ROW_WORDS + 7])
def test_rows_and_blocks_are_no_blind_spots(words: int) -> None:
    tensor = random_tensor(words, torch.int64, 1)
    digest = tensor_digest(tensor)
    for index in {0, words // 2, words - 1, min(ROW_WORDS, words - 1)}:
        other = tensor.clone()
        other[index] += 1
        assert tensor_digest(other) != digest
    assert tensor_digest(tensor.roll(ROW_WORDS)) != digest or words == ROW_WORDS


@pytest.mark.parametrize("kind", ["sums", "xxh3", "xxh3-sampled"])
def test_views_unaligned_slices_and_layout_do_not_matter(kind: DigestKind) -> None:
    tensor_digest = partial(of_kind, kind=kind)
    bucket = random_tensor(1000, torch.uint8, 3)
    part = bucket[2:402].view(torch.bfloat16)
    assert tensor_digest(part) == tensor_digest(part.clone())
    matrix = random_tensor(64, torch.int64, 4).view(8, 8)
    assert tensor_digest(matrix.t()) == tensor_digest(matrix.t().contiguous())
    assert tensor_digest(matrix.t()) != tensor_digest(matrix)


@pytest.mark.parametrize("kind", ["sums", "xxh3", "xxh3-sampled"])
def test_shape_and_dtype_count(kind: DigestKind) -> None:
    tensor_digest = partial(of_kind, kind=kind)
    tensor = torch.zeros(4, 6)
    digests = {tensor_digest(t) for t in (tensor, tensor.view(6, 4), tensor.view(24), torch.zeros(4, 6, dtype=torch.int32))}
    assert len(digests) == 4
    assert tensor_digest(torch.empty(0)) == tensor_digest(torch.empty(0))
    assert tensor_digest(torch.tensor(1.0)) != tensor_digest(torch.tensor(2.0))


def test_the_algorithm_is_fixed() -> None:
    """Both ends of a sync may run different machines; a changed constant must not pass unnoticed."""
    assert of_kind(torch.arange(40_000, dtype=torch.float32), "sums") == "0995de5b7656be22"
    assert of_kind(torch.arange(40_000, dtype=torch.float32), "xxh3") == "d81a6a15644f333a"
    assert of_kind(torch.arange(400_000, dtype=torch.float32), "xxh3-sampled") == "1df03e9bc57da03a"


@settings(max_examples=80)
@given(
    shape=st.sampled_from([(rows, columns) for rows in (8, 48, 384, 3072) for columns in (96, 768, 1152, 7168, 14336, 16384)]).filter(
        lambda shape: shape[0] * shape[1] < 6e6
    ),
    parts=st.sampled_from([2, 3, 4, 6, 8, 16, 32]),
    by_row=st.booleans(),
    number=st.integers(0, 31),
)
def test_a_sample_shows_a_part_that_is_another_or_in_anothers_place(shape: tuple[int, int], parts: int, by_row: bool, number: int) -> None:
    """Whatever a rank of so many contributes, at whatever rank, in rows of up to 32 KiB."""
    tensor = random_tensor(shape[0] * shape[1], torch.bfloat16, 5).view(shape)
    dim = 0 if by_row else 1
    pieces = list(tensor.chunk(parts, dim))
    here, there = number % len(pieces), (number + 1) % len(pieces)
    wrong = [*pieces]
    wrong[here] = random_tensor(pieces[here].numel(), torch.bfloat16, 6).view(pieces[here].shape)
    swapped = [*pieces]
    swapped[here], swapped[there] = pieces[there], pieces[here]
    enough = pieces[here].nbytes >= SAMPLE_BYTES * SAMPLE_EVERY  # a smaller part may lie between two samples
    for other in (torch.cat(wrong, dim), torch.cat(swapped, dim)):
        shows = of_kind(other, "xxh3-sampled") != of_kind(tensor, "xxh3-sampled")
        assert shows or not enough, f"{parts} parts of {tuple(tensor.shape)}"


def test_a_sample_shows_whatever_befalls_its_blocks() -> None:
    tensor = random_tensor(SAMPLE_BYTES * SAMPLE_EVERY * 3 + 17, torch.uint8, 7)
    digest = of_kind(tensor, "xxh3-sampled")
    assert digest != of_kind(tensor, "xxh3")
    for position in (0, SAMPLE_BYTES - 1, SAMPLE_BYTES * SAMPLE_EVERY, 2 * SAMPLE_BYTES * SAMPLE_EVERY + 5, len(tensor) - 1):
        other = tensor.clone()
        other[position] ^= 1
        assert of_kind(other, "xxh3-sampled") != digest
    between = tensor.clone()
    between[SAMPLE_BYTES + 1] ^= 1
    assert of_kind(between, "xxh3-sampled") == digest, "and nothing else: that is what whole digests are for"


@given(st.dictionaries(st.text(max_size=8), st.text("0123456789abcdef", min_size=16, max_size=16), min_size=1, max_size=6), st.randoms())
def test_combining_ignores_order_and_nothing_else(digests: dict[str, str], random) -> None:  # type: ignore[no-untyped-def]
    names = list(digests)
    random.shuffle(names)
    combined = combine(digests)
    assert combine({name: digests[name] for name in names}) == combined
    assert combine({name + "x": d for name, d in digests.items()}) != combined
    assert combine(dict(list(digests.items())[1:])) != combined
