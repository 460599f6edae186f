"""Pickles that try to run, allocate, recurse or confuse: read as data or refused, never obeyed."""

from __future__ import annotations

import pickle

from hypothesis import given, settings
from hypothesis import strategies as st

from torchlift.formats.torch_pickle import TorchWorld
from torchlift.formats.unpickle import read_pickle

_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63), st.floats(allow_nan=False), st.text(),
    st.binary(max_size=300), st.complex_numbers(allow_nan=False),
)  # fmt: skip
_keys = st.one_of(st.text(), st.integers(-(2**62), 2**62), st.tuples(st.integers(0, 9), st.text()))
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.tuples(inner, inner),
        st.dictionaries(_keys, inner, max_size=5),
        st.frozensets(_keys, max_size=5),
        st.sets(_keys, max_size=5),
    ),
    max_leaves=30,
)


@settings(max_examples=80, deadline=None)
@given(value=_values, protocol=st.integers(2, 5))
def test_plain_objects_are_read_as_pickle_reads_them(value, protocol):
    """For everything that is only data, the interpreter agrees with the standard library."""
    data = pickle.dumps(value, protocol)
    found, end = read_pickle(data, TorchWorld())
    assert end == len(data)
    assert found == pickle.loads(data)


def test_integers_of_python_2_are_read():
    """It writes those of more than 32 bits as text, in protocol 2, too."""
    data = b"\x80\x02]q\0(I2147483648\nI-9007199254740993\nU\x01ae."
    assert read_pickle(data, TorchWorld())[0] == pickle.loads(data) == [2**31, -(2**53) - 1, "a"]
