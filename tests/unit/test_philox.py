"""Philox4x32-10 against published known answers, and the meaning of its arguments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m31.engine.philox import Purpose, philox4x32, uniform, uniforms
from m31.errors import RequestError

# The known-answer vectors of the Random123 distribution for philox4x32, 10 rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    got = philox4x32(np.array(counter, dtype=np.uint32), np.array(key, dtype=np.uint32))
    assert got.dtype == np.uint32
    assert tuple(int(word) for word in got) == expected


def test_known_answers_as_one_batch():
    counters = np.array([row[0] for row in KNOWN], dtype=np.uint32)
    keys = np.array([row[1] for row in KNOWN], dtype=np.uint32)
    assert philox4x32(counters, keys).tolist() == [list(row[2]) for row in KNOWN]


def _plain(counter: list[int], key: list[int]) -> list[int]:
    """The same function in Python's own integers, word by word."""
    for _ in range(10):
        even, odd = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (odd >> 32) ^ counter[1] ^ key[0],
            odd & 0xFFFFFFFF,
            (even >> 32) ^ counter[3] ^ key[1],
            even & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


@given(
    seed=st.integers(0, 2**64 - 1),
    request=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**32 - 1),
    purpose=st.sampled_from(Purpose),
)
def test_layout_of_counter_and_key_and_the_53_bits(seed, request, position, purpose):
    words = _plain([position, int(purpose), request & 0xFFFFFFFF, request >> 32], [seed & 0xFFFFFFFF, seed >> 32])
    expected = ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53
    got = uniform(seed, request, position, purpose)
    assert got == expected
    assert 0 <= got < 1


def test_every_argument_matters_in_every_bit_that_it_has():
    base = uniform(5, 6, 7, Purpose.SAMPLE)
    others = [uniform(5 ^ 1 << bit, 6, 7, Purpose.SAMPLE) for bit in range(64)]
    others += [uniform(5, 6 ^ 1 << bit, 7, Purpose.SAMPLE) for bit in range(64)]
    others += [uniform(5, 6, 7 ^ 1 << bit, Purpose.SAMPLE) for bit in range(32)]
    others += [uniform(5, 6, 7, purpose) for purpose in Purpose if purpose is not Purpose.SAMPLE]
    assert len({base, *others}) == 1 + 64 + 64 + 32 + 3


def test_vectorised_equals_single_and_looks_uniform():
    many = uniforms(1, 2, np.arange(20_000), Purpose.ACCEPT)
    assert many[:50].tolist() == [uniform(1, 2, i, Purpose.ACCEPT) for i in range(50)]
    counts = np.bincount((many * 20).astype(int), minlength=20)
    assert (abs(counts - 1000) < 5 * np.sqrt(1000)).all()
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.03


def test_purposes_are_fixed_numbers():
    assert {p.name: p.value for p in Purpose} == {"SAMPLE": 0, "DRAFT": 1, "ACCEPT": 2, "RESIDUAL": 3}


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ((-1, 0, 0), "seed"),
        ((2**64, 0, 0), "seed"),
        ((True, 0, 0), "seed"),
        ((0, -1, 0), "request"),
        ((0, 0, -1), "position"),
        ((0, 0, 2**32), "position"),
        ((0, 0, 1.0), "position"),
    ],
)
def test_out_of_range_is_refused(args, name):
    with pytest.raises(RequestError, match=rf"^{name}: {name} is .*; expected an integer from 0 to 2\*\*(32|64) - 1$"):
        uniform(*args, Purpose.SAMPLE)


def test_positions_out_of_range_are_refused():
    with pytest.raises(RequestError, match="positions are"):
        uniforms(0, 0, np.array([-1]), Purpose.SAMPLE)
    with pytest.raises(RequestError, match="positions are"):
        uniforms(0, 0, np.array([0.5]), Purpose.SAMPLE)
