"""`remap.merge` and `remap.split`: the tensors that torch would make, each byte read once."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from in_code import in_code
from safetensors.torch import save_file
from small_models import unchanged
from torch import nn
from zoo import Bag, Holder, same

import torchlift
from torchlift import remap
from torchlift.errors import CheckpointError, MismatchError, PlacementError

State = dict[str, torch.Tensor]


def model_of(state: Mapping[str, torch.Tensor], *, live: bool = True) -> nn.Module:
    """A model with the names and shapes of a state, and other values."""
    return Bag(state) if live else torchlift.skeleton(Bag, state)


def assert_loads(ckpt: Any, rule: Any, expected: State, **words: Any) -> Any:
    """Whatever the model was, and however it is read, it ends with these values."""
    reports = []
    for live in (True, False):
        for source in ("read", "mmap"):
            model = model_of(expected, live=live)
            planned = torchlift.plan(model, ckpt, rename=rule, source=source, **words)
            report = torchlift.load(model, ckpt, rename=rule, source=source, **words)
            found = model.state_dict()
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert same(found[name], tensor), name
                assert found[name].is_contiguous(), name
            assert report.bytes_read == planned.bytes_to_read
            assert report.merged == planned.merged
            reports.append(report)
    return reports[0]


# ---- every operation, against torch


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of this shape, laid out in memory in any way."""
    numel = torch.Size(shape).numel()
    first = draw(st.integers(0, 100))
    values = torch.arange(first, first + numel, dtype=torch.float32).view(shape)
    way = draw(st.sampled_from(["plain", "turned", "gaps", "tail"]))
    if way == "turned":
        return (
            values.permute(*reversed(range(len(shape))))
            .contiguous()
            .permute(*reversed(range(len(shape))))
        )
    if way == "gaps" and shape:
        return values.repeat_interleave(2, -1)[..., ::2]
    if way == "tail":
        return torch.cat([torch.zeros(3), values.flatten()])[3:].view(shape)
    return values


@st.composite
def divisions(draw: st.DrawFn) -> tuple[State, Any, State]:
    """A state, a rule that merges it, and what torch makes of it."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    patterns = ["*.a.{i}", "*.b.{i}", "*.c.{i}"][: draw(st.integers(1, 3))]
    numbered = draw(st.booleans())
    stack = cat = sizes = None
    if not numbered:
        patterns = [part.replace(".{i}", "") for part in patterns]
    if numbered and len(patterns) > 1:
        stack = draw(st.integers(-len(shape) - 1, len(shape)))
        cat = draw(st.integers(0, len(shape)))
    elif draw(st.booleans()):
        stack = draw(st.integers(-len(shape) - 1, len(shape)))
    else:
        cat = draw(st.integers(-len(shape), len(shape) - 1))
    transpose = None
    if len(shape) > 1 and draw(st.booleans()):
        transpose = draw(st.permutations(range(len(shape))).map(lambda dims: tuple(dims[:2])))
    count = draw(st.integers(1, 3)) if numbered else 1
    if cat is not None and (len(patterns) > 1) != numbered and draw(st.booleans()):
        sizes = tuple(
            draw(st.lists(st.integers(1, 3), min_size=max(count, len(patterns)),
                          max_size=max(count, len(patterns))))
        )  # fmt: skip
    state: State = {}
    for layer in range(draw(st.integers(1, 2))):
        for at, part in enumerate(patterns):
            for number in range(count):
                name = part.replace("*", f"l.{layer}").replace("{i}", str(number))
                sized = list(shape)
                if sizes:
                    # In the dimension that becomes `cat` once two are exchanged.
                    dim = list(range(len(shape)))[cat]  # type: ignore[index]
                    if transpose and dim in [d % len(shape) for d in transpose]:
                        one, two = (d % len(shape) for d in transpose)
                        dim = two if dim == one else one
                    sized[dim] *= sizes[at if len(patterns) > 1 else number]
                state[name] = draw(tensors(tuple(sized)))
    keys = draw(st.permutations(list(state)))
    if cat is not None and numbered and len(patterns) == 1 and sizes is None:
        sizes = (1,) * count  # without them, there is no way back
    rule = remap.merge(patterns, "*.whole", stack=stack, cat=cat, sizes=sizes, transpose=transpose)

    def member(layer: int, part: str, number: int) -> torch.Tensor:
        name = part.replace("*", f"l.{layer}").replace("{i}", str(number))
        return state[name].transpose(*transpose) if transpose else state[name]

    expected: State = {}
    for layer in range(len(state) // (len(patterns) * count)):
        rows = [[member(layer, part, n) for n in range(count)] for part in patterns]
        if numbered and stack is not None:
            rows = [[torch.stack(row, stack)] for row in rows]
        together = [tensor for row in rows for tensor in row]
        if cat is not None:
            made = torch.cat(together, cat)
        elif numbered:
            (made,) = together
        else:
            made = torch.stack(together, stack)  # type: ignore[arg-type]
        expected[f"l.{layer}.whole"] = made
    return {key: state[key] for key in keys}, rule, expected


@settings(deadline=None, max_examples=120)
@given(divisions(), st.sampled_from(["file", "memory"]))
def test_a_merge_is_what_torch_makes_and_its_way_back_is_what_was_there(case, kind) -> None:
    """Every combination of operations, from files and memory, laid out in any way."""
    state, rule, expected = case
    for given_state, rename, made in (
        (state, rule, expected),
        ({key: value.clone() for key, value in expected.items()}, rule.reversed(), state),
    ):
        ckpt: Any = given_state
        if kind == "file":
            ckpt = io.BytesIO()
            torch.save(given_state, ckpt)
            ckpt.seek(0)
        model = model_of({name: value.contiguous() for name, value in made.items()})
        report = torchlift.load(model, ckpt, rename=rename)
        found = model.state_dict()
        assert found.keys() == made.keys()
        assert all(torch.equal(found[name], made[name]) for name in made)
        from_all = {key for item in report.loaded.values() for key in item.entries}
        assert from_all == set(given_state)
    assert rule.reversed().reversed() == rule
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert eval(repr(rule), {"merge": remap.merge, "split": remap.split}) == rule
    back = rule.reversed()
    assert eval(repr(back), {"merge": remap.merge, "split": remap.split}) == back


# ---- files, bytes, memory


def experts(layers: int = 2, count: int = 4, rows: int = 64, columns: int = 96) -> State:
    """Experts as a list of modules, and fused attention."""
    torch.manual_seed(0)
    state: State = {}
    for layer in range(layers):
        for expert in range(count):
            name = f"model.layers.{layer}.experts.{expert}"
            state[f"{name}.gate.weight"] = torch.randn(rows, columns)
            state[f"{name}.up.weight"] = torch.randn(rows, columns)
            state[f"{name}.down.weight"] = torch.randn(columns, rows)
        state[f"model.layers.{layer}.qkv.weight"] = torch.randn(4 * rows, columns)
        state[f"model.layers.{layer}.norm"] = torch.randn(columns)
    return state


FUSE = (
    remap.strip("model.")
    | remap.merge(
        ["*.experts.{e}.gate.weight", "*.experts.{e}.up.weight"], "*.gate_up", stack=0, cat=1
    )
    | remap.merge("*.experts.{e}.down.weight", "*.down", stack=0)
    | remap.split("*.qkv.*", ["*.q.*", "*.k.*", "*.v.*"], chunk=0, sizes=(2, 1, 1))
)


def fused(state: State) -> State:
    """What the rules above make, by torch."""
    made: State = {}
    for layer in range(sum(key.endswith("norm") for key in state)):
        old, new = f"model.layers.{layer}", f"layers.{layer}"
        count = sum(key.startswith(f"{old}.") and key.endswith("up.weight") for key in state)

        def stacked(name: str, old: str = old, count: int = count) -> torch.Tensor:
            return torch.stack([state[f"{old}.experts.{e}.{name}.weight"] for e in range(count)])

        made[f"{new}.gate_up"] = torch.cat([stacked("gate"), stacked("up")], 1)
        made[f"{new}.down"] = stacked("down")
        whole = state[f"{old}.qkv.weight"]
        sizes = [len(whole) // 2, len(whole) // 4, len(whole) // 4]
        for name, part in zip("qkv", whole.split(sizes), strict=True):
            made[f"{new}.{name}.weight"] = part
        made[f"{new}.norm"] = state[f"{old}.norm"]
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A safetensors file of `experts`."""
    save_file(experts(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_rules_compose_and_the_report_says_which_keys_gave_which(path) -> None:
    """One rule covers all layers; names, counts and sources of every tensor are in the report."""
    expected = fused(experts())
    report = assert_loads(path, FUSE, expected)
    assert report.loaded["layers.1.down"].entries == tuple(
        f"model.layers.1.experts.{e}.down.weight" for e in range(4)
    )
    assert report.loaded["layers.0.q.weight"].entries == ("model.layers.0.qkv.weight",)
    assert report.merged["layers.0.gate_up"] == tuple(
        f"model.layers.0.experts.{e}.{name}.weight" for name in ("gate", "up") for e in range(4)
    )
    assert report.split["model.layers.1.qkv.weight"] == (
        "layers.1.q.weight", "layers.1.k.weight", "layers.1.v.weight",
    )  # fmt: skip
    assert report.renamed == {f"model.layers.{n}.norm": f"layers.{n}.norm" for n in range(2)}
    assert "merged (4): layers." in str(report)
    assert "layers.0.down of 4 (model.layers.0.experts.0" in str(report)
    assert "split (2): model.layers.0.qkv.weight into layers.0.q.weight + " in str(report)


def test_neighbours_in_a_file_are_mapped_as_one(tmp_path) -> None:
    """A split file, merged again, is what it was: nothing is read or copied."""
    state = {f"w{n}": torch.randn(4, 6) for n in range(3)}
    save_file(state, tmp_path / "model.safetensors")
    for rule, made in (
        (remap.merge("w{n}", "w", stack=0), torch.stack([*state.values()])),
        (remap.merge("w{n}", "w", cat=0), torch.cat([*state.values()])),
    ):
        model = torchlift.skeleton(Bag, {"w": made})
        report = torchlift.load(model, tmp_path / "model.safetensors", rename=rule)
        assert (report.bytes_read, report.loaded["w"].route) == (0, "view")
        assert same(model.w, made)


def test_dtype_device_modes_and_transforms_see_the_merged_tensor(path) -> None:
    """A merged tensor is one entry to every rule."""
    expected = fused(experts())
    seen: list[tuple[str, tuple[int, ...]]] = []

    def dtype(entry: torchlift.TensorEntry) -> torch.dtype | None:
        seen.append((entry.key, entry.shape))
        return torch.bfloat16 if entry.key.endswith("gate_up") else None

    for mode in ("assign", "copy", "swap"):
        model = model_of(expected, live=False)
        torchlift.load(model, path, rename=FUSE, dtype=dtype, mode=mode)
        gate_up = model.state_dict()["layers.0.gate_up"]
        assert same(gate_up, expected["layers.0.gate_up"].bfloat16())
        assert same(model.state_dict()["layers.0.down"], expected["layers.0.down"])
    assert ("layers.0.gate_up", (4, 128, 96)) in seen
    model = model_of(expected)
    torchlift.load(model, path, rename=FUSE, transform=lambda key, tensor: tensor * 2)
    assert all(same(model.state_dict()[key], value * 2) for key, value in expected.items())
    model = model_of(expected, live=False)

    def device(entry: torchlift.TensorEntry) -> str:
        return "meta" if entry.key.endswith("down") else "cpu"

    torchlift.load(model, path, rename=FUSE, device=device)
    assert model.state_dict()["layers.0.down"].is_meta


def test_several_checkpoints_may_give_the_members_of_one_tensor(path, tmp_path) -> None:
    """A file and a state dict that has one expert anew."""
    state = experts()
    name = "model.layers.1.experts.2.up.weight"
    new = {name: torch.randn(64, 96)}
    expected = fused(state | new)
    assert_loads([path, new], FUSE, expected)
    torch.save(new, tmp_path / "new.pt")
    report = assert_loads([path, tmp_path / "new.pt"], FUSE, expected)
    assert report.loaded["layers.1.gate_up"].path == f"{path}, {tmp_path / 'new.pt'}"
    assert report.loaded["layers.1.down"].path == str(path)


def test_a_state_dict_may_share_its_memory_with_the_model() -> None:
    """Rows trade places in place: none is read after another was written over it."""
    model = Holder({"w": torch.arange(12.0).view(4, 3)})
    before = model.w.detach().clone()
    state = {"b": model.w.detach()[:2], "a": model.w.detach()[2:]}
    torchlift.load(model, state, rename=remap.merge(["a", "b"], "w", cat=0))
    assert same(model.w, torch.cat([before[2:], before[:2]]))


def test_ties_dropped_keys_and_names_that_fit_no_rule(tmp_path) -> None:
    """Two names of one merged tensor must agree; what no pattern fits goes its way."""
    model = Holder({"one": torch.zeros(4, 3)})
    model.two = model.one
    rows = {"a": torch.ones(2, 3), "b": torch.full((2, 3), 2.0), "other": torch.ones(1)}
    rename = remap.merge(["a", "b"], "one", cat=0) | remap.rules([("^other$", None)])
    report = torchlift.load(model, rows, rename=rename)
    assert (report.tied, report.merged) == ((("one", "two"),), {"one": ("a", "b")})
    fused = remap.merge(["a", "b"], "one", cat=0)
    torchlift.load(model, {"one": model.one.detach()}, rename=fused)  # as it is already
    torch.save(rows | {"two": torch.zeros(4, 3)}, tmp_path / "model.pt")
    with pytest.raises(MismatchError, match="ties two keys that have different values"):
        torchlift.load(model, tmp_path / "model.pt", rename=rename)


SETUP = """
import torch, torchlift
from torch import nn
from torchlift import remap
import torchlift._load.loading
torch.set_num_threads(2)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.empty(16, 2048, 1024))

RULE = remap.merge(["{e}.gate", "{e}.up"], "experts", stack=0, cat=1)
"""


def test_merging_takes_the_memory_of_the_result_and_no_second_copy(tmp_path) -> None:
    """128 MiB of experts fused: the destination and the fixed budget, as planned."""

    mib = 1 << 20
    state = {f"{e}.{name}": torch.ones(1024, 1024) for e in range(16) for name in ("gate", "up")}
    save_file(state, tmp_path / "model.safetensors")
    code = """
model = torchlift.skeleton(Model)
planned = torchlift.plan(model, args[0], rename=RULE, dtype=args[1]).peak_bytes
torchlift.load(model, args[0], rename=RULE, dtype=args[1])
result = planned
"""
    for dtype, size in ((None, 128), ("bfloat16", 64)):
        path = str(tmp_path / "model.safetensors")
        child = in_code(code, path, dtype, setup=SETUP)
        added = child.memory.added_anonymous
        assert 0.9 * size * mib <= added <= (size + 64) * mib
        assert size * mib <= child.value <= (size + 64) * mib


# ---- what does not fit


def test_a_missing_expert_is_named(path) -> None:
    """Of a list, of patterns; a load that fails leaves the model as it was."""
    state = experts()
    model = model_of(fused(state))
    for lost in ("gate", "down"):
        key = f"model.layers.1.experts.2.{lost}.weight"
        rest = {name: value for name, value in state.items() if name != key}
        with unchanged(model), pytest.raises(MismatchError) as error:
            torchlift.load(model, rest, rename=FUSE)
        assert error.value.missing_keys == [key.removeprefix("model.")]
        assert f"Missing: {key.removeprefix('model.')}" in str(error.value)
    with pytest.raises(
        MismatchError, match=r"'w': the checkpoint does not .* Missing: w\.1, .* and 94 "
    ):
        torchlift.load(model, {"w.100": torch.ones(1), "w.0": torch.ones(1)},
                       rename=remap.merge("*.{n}", "*", stack=0))  # fmt: skip


QK = remap.merge(["q", "k"], "w", cat=0)
ones = torch.ones
#: A rule, a state, and what is said of them.
MISFITS = [
    (remap.merge("w{n}", "w", stack=0), {"w0": ones(2, 3), "w1": ones(2, 4)},
     r"'w': these tensors cannot be merged: .*; found 'w0': float32 \[2, 3\], 'w1': .*4\]"),
    (QK, {"q": ones(4, 3), "k": ones(2, 3)},
     r"sizes in dimension 0 are 4, 2.* Pass sizes=\(4, 2\)"),
    (QK, {"q": ones(4, 3), "k": ones(4, 3, dtype=torch.half)},
     "'q' is float32 and 'k' is float16. Convert them to one dtype first"),
    (QK, {"q": ones(2), "k": ones(2), "w": ones(2)},
     "'q': rename gives two keys one name, 'w'; found w"),
    (QK, {f"{name}": ones(1 if name == "k" else 2, 2).to_sparse() for name in "qk"},
     "only plain tensors can be"),
    (remap.merge(["q", "k"], "w", cat=2), {"q": ones(4, 3), "k": ones(4, 3)},
     r"'w': these tensors cannot be merged: Dimension out of range .* but got 2"),
    (remap.merge("x.{}", "y", cat=0), {f"x.{at}": ones(1 if at else 2, 2) for at in range(1000)},
     "are 2, 1, 1, 1, 1, and 995 more"),
    (remap.split("w", ["q", "k", "v"], chunk=0), {"w": ones(8, 3)},
     r"'w': this tensor cannot be split: dimension 0 does not divide .* found .*\[8, 3\]"),
    (remap.split("w", ["q", "k"], unstack=0), {"w": ones(3, 3)},
     "dimension 0 must be 2, the number of names"),
    (remap.split("w", ["q", "k"], chunk=0, sizes=(2, 1)), {"w": ones(4, 3)},
     r"does not divide into slices of \(2, 1\)"),
    (remap.split("w", ["q", "k"], chunk=0), {"q": ones(2), "w": ones(2)},
     "rename gives two keys one name, 'q'"),
    (remap.merge("*.{i}.w", "*", stack=0), {"l.1.w": ones(2), "l.0.w": 3},
     r"Missing: l\.0\.w\. In .* not a tensor: l\.0\.w"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "state", "message"), MISFITS)
def test_what_does_not_fit_together_is_told_by_name(rule, state, message, tmp_path) -> None:
    """From memory and from a file, by the plan already, and shortly."""
    torch.save(state, tmp_path / "model.pt")
    for ckpt in (state, tmp_path / "model.pt"):
        with pytest.raises(CheckpointError, match=message) as error:
            torchlift.plan(nn.Linear(2, 2), ckpt, rename=rule)
        assert error.value.file is not None
        assert len(str(error.value)) < 1000


def test_members_may_be_deflated_and_stored_side_by_side(tmp_path) -> None:
    """And empty: what is stored in another way than that is told by what differs."""
    state = {"a": torch.ones(2, 3), "b": torch.zeros(0, 3), "c": torch.full((2, 3), 2.0)}
    np.savez(tmp_path / "stored.npz", **{key: value.numpy() for key, value in state.items()})
    path = tmp_path / "model.npz"
    with ZipFile(tmp_path / "stored.npz") as old, ZipFile(path, "w", ZIP_DEFLATED) as new:
        for info in old.infolist():
            kind = ZIP_STORED if info.filename == "a.npy" else ZIP_DEFLATED
            new.writestr(info.filename, old.read(info), kind)
    with torchlift.open(path) as ckpt:
        assert {ckpt.entries[key].encoding for key in "ac"} == {(), ("deflated",)}
    for order in (["a", "c"], ["c", "a"]):
        rule = remap.merge(order, "w", cat=0)
        expected = {"w": torch.cat([state[key] for key in order])}
        assert_loads(path, rule, expected, allow_unexpected=["b"])
    empty = {"a": torch.zeros(2, 0), "c": torch.zeros(2, 0, dtype=torch.complex64).real}
    assert_loads(empty, remap.merge(["a", "c"], "w", cat=0), {"w": torch.zeros(4, 0)})
    odd = torch.ones(2, 3, dtype=torch.complex64)
    path = tmp_path / "odd.pt"
    torch.save({"a": odd, "c": odd.conj()}, path)
    with pytest.raises(MismatchError, match=r"'a' \(plain\), 'c' \(conjugate\) are stored diff"):
        torchlift.plan(model_of({"w": odd}), path, rename=remap.merge(["a", "c"], "w", cat=0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: remap.merge([], "w"), "one pattern, or several different"),
        (lambda: remap.merge("*.a", "w"), "every pattern must contain *"),
        (lambda: remap.merge(["a{i}", "b"], "w", cat=0, stack=0), "every pattern contains one {"),
        (lambda: remap.merge(["a{i}", "b{i}"], "w", stack=0), "and cat= for the patterns"),
        (lambda: remap.merge(["a", "b"], "w", stack=0, cat=0), "numbers in several patterns"),
        (lambda: remap.merge(["a", "b"], "w"), "pass stack= or cat="),
        (lambda: remap.split("w", ["a", "b"]), "pass unstack= or chunk="),
        (lambda: remap.merge(["a", "b"], "w", stack=0, sizes=(1, 1)), "together with cat="),
        (lambda: remap.merge(["a", "b"], "w", cat=0, sizes=(1, 0)), "numbers above 0"),
        (lambda: remap.merge(["a", "b"], "w", cat=0, sizes=(1,)), "1 sizes for 2 patterns"),
        (lambda: remap.split("w", "a{i}", chunk=0), "pass sizes=, one for each"),
        (lambda: remap.merge("a{i}", "w", cat=0).reversed(), "cannot be reversed without sizes="),
        (lambda: remap.strip("a.").reversed(), "strip('a.') cannot be reversed"),
        (lambda: (str.lower | remap.merge("a", "b")).reversed(), "a function that you wrote"),
    ],
)  # fmt: skip
def test_a_rule_that_says_nothing_definite_is_refused(call, message) -> None:
    """When it is made, with the call that made it."""
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_what_is_in_several_places_cannot_stay_on_disk(path) -> None:
    """It would take memory, which is what the caller did not ask for."""
    model = torchlift.skeleton(Bag, fused(experts()))
    with pytest.raises(PlacementError, match="cannot stay on disk, where it is in several places"):
        torchlift.load(model, path, rename=FUSE, device="disk")
    some = remap.by_pattern({r"q\.weight$": "disk", "": "cpu"})
    report = torchlift.load(model, path, rename=FUSE, device=some)
    assert report.loaded["layers.0.q.weight"].route == "view"


def test_leaves_that_are_no_tensors_keep_their_names_where_a_merge_gives_them_one(tmp_path) -> None:
    """They are not in the way of a load or a conversion."""
    rule, path = remap.merge("l.{i}.*", "*", stack=0), tmp_path / "model.pt"
    state = {"l": {str(n): {"w": torch.full((2,), float(n)), "lr": n / 10} for n in range(2)}}
    torch.save(state, path)
    expected = {"w": torch.stack([torch.zeros(2), torch.ones(2)])}
    assert_loads(path, rule, expected, strict=False)
    torchlift.convert(path, tmp_path / "made.pt", rename=rule)
    with torchlift.open(tmp_path / "made.pt") as ckpt:
        assert same(ckpt["w"], expected["w"])
        assert dict(ckpt.objects) == {"l.0.lr": 0.0, "l.1.lr": 0.1}
