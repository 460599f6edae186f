"""Checks of the loader for vLLM, in a process of their own."""

from __future__ import annotations

import re
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

OUT = Path(sys.argv[1])


def the_entry_point() -> None:
    (point,) = [each for each in entry_points(group="vllm.general_plugins") if here(each)]
    register = point.load()
    for name in ("torch", "vllm", "numpy"):
        assert name not in sys.modules, name
    register()
    register()
    from vllm.model_executor import model_loader

    assert issubclass(model_loader.LOADERS["torchlift"], model_loader.BaseModelLoader)


def here(point: Any) -> bool:
    return point.name == "torchlift" and point.dist.name == "torchlift_for_vllm"


def loader(**extra: Any) -> Any:
    from vllm.model_executor.model_loader import get_model_loader

    config = SimpleNamespace(load_format="torchlift", model_loader_extra_config=extra)
    return get_model_loader(config)


def model(rank: int = 0, width: int = 8) -> Any:
    """As vLLM's: fused parameters, of which each rank has the rows of its own."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qk = torch.nn.Parameter(torch.zeros(width, 4))
            self.norm = torch.nn.Parameter(torch.zeros(4))
            self.seen: list[torch.Tensor] = []

        def load_weights(self, weights: Any) -> set[str]:
            loaded = set[str]()
            half = width // 2
            for name, tensor in weights:
                self.seen.append(tensor)
                name = name.removeprefix("model.")
                if name in ("q", "k"):
                    rows = self.qk.data[:half] if name == "q" else self.qk.data[half:]
                    rows.copy_(tensor[rank * half : (rank + 1) * half])
                    loaded.add("qk")
                elif name == "norm":
                    self.norm.data.copy_(tensor)
                    loaded.add("norm")
                else:
                    raise KeyError(name)
            return loaded

    return Model()


def weights(rows: int = 4, prefix: str = "model.") -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    found = {"q": torch.randn(rows, 4), "k": torch.randn(rows, 4), "norm": torch.randn(4)}
    return {prefix + name: tensor for name, tensor in found.items()}


def config(path: Path, quantization: str | None = None) -> Any:
    return SimpleNamespace(model=str(path), quantization=quantization, revision=None)


def folder(name: str) -> Path:
    """A folder as vLLM expects one, without weights."""
    path = OUT / name
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    return path


def check_loaded(path: Path, /, **extra: Any) -> None:
    import torch

    made, given = model(), loader(**extra)
    given.download_model(config(path))
    given.load_weights(made, config(path))
    whole = {name.removeprefix("model."): tensor for name, tensor in weights().items()}
    assert torch.equal(made.qk, torch.cat([whole["q"], whole["k"]]))
    assert torch.equal(made.norm, whole["norm"])
    names = [name for name, _ in given.get_all_weights(config(path), made)]
    assert len(names) == 3


def dcp() -> None:
    import torch.distributed.checkpoint as dcp

    path = folder("dcp")
    dcp.save({"model": weights(), "optim": {"lr": 0.1}}, checkpoint_id=path, no_dist=True)
    check_loaded(path, root="model")


def url() -> None:
    import torch
    from range_server import serving

    path = folder("served")
    torch.save({"model": weights()}, path / "x.pt")
    (path / "x.pt").rename(OUT / "x.pt")
    with serving(OUT) as server:
        check_loaded(path, path=server.url("x.pt"), root="model", storage_options={"tries": 2})


def slices() -> None:
    import torch

    path = folder("slices")
    torch.save(weights(rows=8), path / "x.pt")
    made = model(rank=1)
    loader().load_weights(made, config(path))
    whole = weights(rows=8)
    assert torch.equal(made.qk, torch.cat([whole["model.q"][4:], whole["model.k"][4:]]))
    mapped = Path("/proc/self/maps").read_text()
    assert str(path / "x.pt") in mapped  # the model has kept them
    del made
    assert str(path / "x.pt") not in Path("/proc/self/maps").read_text()


def missing() -> None:
    import torch

    from torchlift.errors import MismatchError

    path = folder("missing")
    torch.save({"model.q": weights()["model.q"], "model.k": weights()["model.k"]}, path / "x.pt")
    with pytest.raises(
        MismatchError, match=r"x\.pt.*The checkpoint has model\. Pass root"
    ) as caught:
        loader().load_weights(model(), config(path))
    assert caught.value.missing_keys == ["norm"]
    loader().load_weights(model(), config(path, "fp8"))


def unknown() -> None:
    import torch

    path = folder("unknown")
    torch.save({"state_dict": weights(), "optimizer": weights()}, path / "x.pt")
    with pytest.raises(KeyError) as caught:
        loader().load_weights(model(), config(path))
    (told,) = caught.value.__notes__
    assert "x.pt, root=None: state_dict, optimizer" in told


def unsafe() -> None:
    import torch

    from torchlift.errors import UnsafeError

    class Odd(torch.Tensor):
        pass

    sys.modules["odd_tensors"] = SimpleNamespace(Odd=Odd)  # type: ignore[assignment]
    Odd.__module__, Odd.__qualname__ = "odd_tensors", "Odd"
    path = folder("unsafe")
    odd = weights()["model.norm"].as_subclass(Odd)
    torch.save({**weights(), "model.norm": odd}, path / "x.pt")
    with pytest.raises(UnsafeError) as caught:
        loader().load_weights(model(), config(path, "fp8"))
    assert caught.value.entry == "model.norm"
    check_loaded(path, allow_classes=[Odd])


def options() -> None:
    for name, way in [("roots", "Did you mean 'root'?"), ("xyz", "It takes path, root, rename")]:
        with pytest.raises(ValueError, match=re.escape(way)):
            loader(**{name: 1})


def older() -> None:
    from vllm.model_executor import model_loader

    from torchlift.integrations import vllm

    known, model_loader.LOADERS = model_loader.LOADERS, {}
    function = model_loader.__dict__.pop("register_model_loader")
    vllm.register()
    assert not model_loader.LOADERS
    model_loader.LOADERS, model_loader.register_model_loader = known, function


if __name__ == "__main__":
    for check in (
        the_entry_point, dcp, url, slices, missing, unknown, unsafe, options, older,
    ):  # fmt: skip
        check()
