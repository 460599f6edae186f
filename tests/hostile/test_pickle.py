"""Pickles that try to run, allocate, recurse or confuse: read as data or refused, never obeyed."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import subprocess
import sys
import time

import pytest
from checkpoint_files import Call, pickled, tensor, write_zip
from hypothesis import given, settings
from hypothesis import strategies as st
from pickle_programs import colliding_pairs

from torchlift.errors import FormatError
from torchlift.formats.detect import read_index
from torchlift.formats.torch_pickle import TorchWorld, read_torch_pickle
from torchlift.formats.unpickle import read_pickle


@pytest.fixture
def path(tmp_path):
    return tmp_path / "evil.pt"


MARKER = "torchlift-executed-something"


def _globals_by_every_opcode(command: str) -> dict[str, bytes]:
    text = command.encode()
    arguments = b"X" + struct.pack("<I", len(text)) + text
    short = b"\x8c" + bytes([len(text)]) + text
    return {
        "GLOBAL": b"\x80\x02cposix\nsystem\n(" + arguments + b"tR.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x05posix\x8c\x06system\x93(" + short + b"tR.",
        "OBJ": b"(cposix\nsystem\n" + arguments + b"o.",
        "NEWOBJ": b"\x80\x02cposix\nsystem\n(" + arguments + b"t\x81.",
        "NEWOBJ_EX": b"\x80\x04cposix\nsystem\n(" + arguments + b"t}\x92.",
        "BUILD": b"\x80\x02cposix\nsystem\n)R}X\x01\x00\x00\x00a" + arguments + b"sb.",
    }


@pytest.mark.parametrize("opcode", list(_globals_by_every_opcode("")))
def test_a_global_is_listed_and_never_run(path, tmp_path, opcode):
    """Whichever opcode names it, an unknown global stays a name."""
    marker = tmp_path / MARKER
    data = _globals_by_every_opcode(f"touch {marker}")[opcode]
    index = read_index(write_zip(path, data=data))
    assert index.blocked == ("posix.system",)
    assert index.blocked_keys == {"object": "posix.system"}
    assert not index.entries
    assert not marker.exists()


def test_the_file_would_have_run_in_an_unpickler(tmp_path):
    """The marker test can fail: the same pickle does run where pickles run."""
    marker = tmp_path / MARKER
    pickle.loads(_globals_by_every_opcode(f"touch {marker}")["GLOBAL"])
    assert marker.exists()


def test_a_blocked_global_does_not_hide_the_tensors(path, tmp_path):
    """Tensors beside something unknown are listed, and the unknown key is named."""
    marker = tmp_path / MARKER
    state = {"w": tensor(), "evil": Call(os.system, f"touch {marker}"), "in": [1, {"x": print}]}
    index = read_index(write_zip(path, state))
    assert list(index.entries) == ["w"]
    assert index.blocked_keys == {"evil": "posix.system", "in": "builtins.print"}
    assert not marker.exists()


def test_nothing_is_imported(path):
    """A global in a module that is not loaded does not load it."""
    assert "antigravity" not in sys.modules
    index = read_index(write_zip(path, data=b"\x80\x02cantigravity\nfly\n."))
    assert index.blocked == ("antigravity.fly",)
    assert "antigravity" not in sys.modules


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


_SHARED_TUPLE = b"N" + b"2\x86" * 60


def _nested_dicts(levels: int) -> bytes:
    """A dict that is twice in a dict that is twice in a dict ..."""
    step = b"q%c0}" + _text("a") + b"h%cs" + _text("b") + b"h%cs"
    return b"}" + b"".join(step.replace(b"%c", bytes([i])) for i in range(levels)) + b"."


_HAZARDS = {
    "a call of bytearray with a size": (
        b"cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x02\x85R.", "bytearray"),
    "bytes of 2**40": (b"\x8e" + struct.pack("<Q", 2**40) + b"x.", "ends early"),
    "bytes of 2**63": (b"\x8e" + struct.pack("<Q", 2**63) + b"x.", "ends early"),
    "a bytearray of 2**40": (b"\x96" + struct.pack("<Q", 2**40) + b"x.", "ends early"),
    "text of 2**32": (b"X" + b"\xff" * 4 + b"x.", "ends early"),
    "an integer of 2**31 bytes": (b"\x8b" + b"\xff\xff\xff\x7f" + b"x.", "is too long"),
    "an integer of negative length": (b"\x8b" + b"\xff\xff\xff\xff" + b"x.", "is too long"),
    "an integer of 10,000 digits": (b"I" + b"1" * 10_000 + b"\n.", "damaged"),
    "100,000 marks": (b"(" * 100_000 + b"t" * 100_000 + b".", "nests too deep"),
    "100,000 nested lists": (b"]" * 100_000 + b"a" * 99_999 + b".", "nest too deep"),
    "100,000 nested tuples": (b")" + b"\x85" * 100_000 + b".", "nest too deep"),
    "100,000 nested dicts": (
        (b"}" + _text("a")) * 100_000 + b"N" + b"s" * 100_000 + b".", "nest too deep"),
    "a nested tuple as a key": (b"})" + b"\x85" * 100_000 + b"Ns.", "nested tuple"),
    "a shared tuple as a key": (b"}" + _SHARED_TUPLE + b"Ns.", "nested tuple"),
    "a shared tuple in a set": (b"\x8f(" + _SHARED_TUPLE + b"\x90.", "nested tuple"),
    "a shared tuple in a frozenset": (b"(" + _SHARED_TUPLE + b"\x91.", "nested tuple"),
    "a shared tuple as a value": (
        b"}" + _text("k") + _SHARED_TUPLE + b"s.", "expands|nest too deep"),
    "dicts shared 60 levels deep": (_nested_dicts(60), "expands"),
    "a list as a key": (b"}]Ns.", "key is a container"),
    "a key of a thousand bits": (b"}\x8a\x7f" + b"\x01" * 127 + b"Ns.", "more than 64 bits"),
    "a dict that contains itself": (b"}q\0" + _text("a") + b"h\0s.", "contain themselves|deep"),
    "a list that contains itself": (b"]q\0h\0a.", "contain themselves|deep"),
    "a tuple with a list that contains it": (b"]q\0h\0\x85a.", "contain themselves|deep"),
    "nothing": (b"", "ends early"),
    "only STOP": (b".", "wrong number"),
    "no STOP": (b"\x80\x02}", "ends early"),
    "two objects": (b"NN.", "wrong number"),
    "an open mark": (b"(N.", "wrong number"),
    "a stack underflow": (b"R.", "more than its stack holds"),
    "an underflow below a mark": (b"N(R.", "more than its stack holds"),
    "a tuple without its mark": (b"Nt.", "more than its stack holds"),
    "an unknown memo index": (b"h\x07.", "has not made"),
    "an unknown opcode": (b"\xff.", "uses an opcode that torch"),
    "protocol 9": (b"\x80\x09N.", "pickle protocol is unknown"),
    "the extension registry": (b"\x82\x01.", "uses an opcode that torch"),
    "a text persistent id": (b"Pstorage\n.", "uses an opcode that torch"),
    "a class by INST": (b"(iposix\nsystem\n.", "uses an opcode that torch"),
    "a text memo": (b"}p9999999999999\n0Ng9999999999999\n.", "uses an opcode that torch"),
    "a text float": (b"F1_0\n.", "uses an opcode that torch"),
    "a text long": (b"L" + b"9" * 9**5, "uses an opcode that torch"),
    "a quoted text": (b"S'" + b"\\x41" * 9**5 + b"'\n.", "uses an opcode that torch"),
    "a raw text": (b"V\\ud800\n.", "uses an opcode that torch"),
    "an out-of-band buffer": (b"\x97.", "uses an opcode that torch"),
    "text that is not UTF-8": (b"X\x01\0\0\0\xff.", "not valid UTF-8"),
    "a lone surrogate": (b"X\x03\0\0\0\xed\xa0\x80.", r"not valid UTF-8.*xed.xa0"),
    "a call of a number": (b"K\x01)R.", "not a global"),
    "a call with a list": (b"ccollections\nOrderedDict\n]R.", "not a tuple"),
    "a state on a list": (b"]}b.", "without one"),
    "a state on an allowed global": (b"ccollections\nOrderedDict\n}b.", "without one"),
    "items put into a global": (b"ccollections\nOrderedDict\nNa.", "not a container"),
    "a persistent id that is a number": (b"K\x01Q.", "not a storage"),
    "a persistent id of another kind": (b"(K\x01K\x01K\x01K\x01K\x01tQ.", "not a storage"),
    "a tensor of a number": (
        b"ctorch._utils\n_rebuild_tensor\n(K\x01K\x01K\x01K\x01tR.", "does not accept"),
    "too few arguments": (b"ctorch._utils\n_rebuild_tensor_v2\n)R.", "does not accept"),
    "a key without a value": (b"(NNNd.", "damaged"),
    "bytes behind the pickle": (b"N.x", "followed by other bytes"),
}  # fmt: skip


@pytest.mark.timed
@pytest.mark.parametrize("name", list(_HAZARDS))
def test_a_hostile_pickle_is_refused(path, name):
    """Each of these is an error that says what is wrong, at once."""
    data, match = _HAZARDS[name]
    start = time.perf_counter()
    with pytest.raises(FormatError, match=match) as caught:
        read_index(write_zip(path, data=data))
    assert caught.value.file == str(path)
    assert time.perf_counter() - start < 5


def test_a_memo_index_of_two_billion_allocates_nothing(path):
    """An index is a key, not a length, so a large one is as good as a small one."""
    data = b"}r\xff\xff\xff\x7f" + _text("k") + b"j\xff\xff\xff\x7f0Ns."
    assert read_index(write_zip(path, data=data)).objects == {"k": None}


def test_colliding_integer_keys_do_not_hang(path):
    """Integers whose hashes are equal are refused before there are many."""
    keys = b"".join(
        b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") + b"N" for i in range(9000)
    )
    with pytest.raises(FormatError, match="more than 64 bits"):
        read_index(write_zip(path, data=b"}(" + keys + b"u."))


def test_colliding_tuples_are_refused_before_there_are_many(path):
    """Each one would be compared with all before it. No limit on integers prevents this."""
    keys = b"".join(
        b"".join(b"\x8a\x08" + struct.pack("<q", one) for one in pair) + b"\x86N"
        for pair in colliding_pairs(3_000)
    )
    with pytest.raises(FormatError, match="expands to far more data"):
        read_index(write_zip(path, data=b"}(" + keys + b"u."))


_LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))
from torchlift.errors import CheckpointError
from torchlift.formats.detect import read_index
for path in sys.argv[1:]:
    try:
        read_index(path)
    except CheckpointError as error:
        assert not isinstance(error.__cause__, MemoryError), path
    with open("/proc/self/status") as file:
        peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    assert peak < 150_000, (path, peak)
"""


def test_no_hazard_takes_memory(tmp_path):
    """All of them together stay far below what one of them asks for."""
    paths = []
    for i, (data, _) in enumerate(_HAZARDS.values()):
        paths.append(str(write_zip(tmp_path / f"{i}.pt", data=data)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, "-c", _LIMITED, *paths], check=True, env=environment, timeout=120
    )


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


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_mutation_of_a_pickle_is_read_or_refused(data):
    """Bytes changed, removed and inserted never raise anything but a FormatError."""
    content = bytearray(_CORPUS[data.draw(st.integers(0, len(_CORPUS) - 1))])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        if not content:
            break
    with contextlib.suppress(FormatError):
        read_pickle(bytes(content), TorchWorld())


_CORPUS = [
    pickled({f"k{i}": tensor() for i in range(3)}),
    pickled({"a": [1, 2.5, "x", None, {"s": {1, 2}}], "b": (b"x" * 9, 2**80)}, 4),
    pickled([tensor((), ()), tensor((4,), (1,)), {"n": {"m": True}}], 3),
]


def test_a_tensor_whose_name_is_not_text_leaves_no_storage_behind():
    """Its name is refused first."""
    data = pickled({f"k{i}": tensor(storage=str(i)) for i in range(3)})
    world = TorchWorld()
    with pytest.raises(FormatError, match="not valid UTF-8"):
        read_torch_pickle(data.replace(b"k2", b"\xff2"), world)
    assert list(world.storages) == ["0", "1"]
