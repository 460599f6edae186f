"""Serve any checkpoint with vLLM, without conversion: ``vllm serve --load-format torchlift``.

vLLM finds `register` by itself, by the entry point ``vllm.general_plugins``, in each of its
processes; this module imports neither torch nor vLLM before that is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchlift._system.text import clipped_list
from torchlift.errors import MismatchError, did_you_mean, note

if TYPE_CHECKING:
    import torch

_OPTIONS = ("path", "root", "rename", "allow_classes", "storage_options")


class Loader:
    """What ``--load-format torchlift`` loads weights by; `register` makes it a loader of vLLM's.

    The model's folder has the configuration and the tokenizer, as for any model that vLLM serves,
    and a checkpoint of any format that `torchlift.open` reads: a DCP directory, a training state in
    one ``.pt`` file, ZeRO's shards. ``--model-loader-extra-config`` takes a JSON object with

    - ``path``: where the weights are, if not in the model's folder: a path or a URL.
    - ``root``: the container that holds them, such as ``"model"``.
    - ``rename``: pairs of a pattern and its replacement, as `torchlift.remap.rules` takes them,
      that make the names those of the model on the Hugging Face Hub, which vLLM's models expect.
    - ``storage_options``: of a URL; and ``allow_classes``, from Python: as for `torchlift.open`.

    Tensors are given to the model one at a time. What lies in the file in one piece is mapped: each
    rank of tensor parallelism reads the pages of its slices, from a page cache that all of them
    share. Nothing in the file is executed.

    Args:
        load_config: vLLM's ``LoadConfig``.

    Raises:
        ValueError: the extra config has a name that is none of these.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)  # type: ignore[call-arg]
        self.options = dict(load_config.model_loader_extra_config or {})
        for name in self.options:
            if name not in _OPTIONS:
                known = did_you_mean(name, _OPTIONS) or f"It takes {', '.join(_OPTIONS)}."
                raise ValueError(f"model_loader_extra_config has no {name!r} here. {known}")

    def download_model(self, model_config: Any) -> None:
        """Open the checkpoint, so that what is wrong with it is said early; nothing is fetched."""
        with self._open(model_config):
            pass

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor, one at a time.

        Raises:
            CheckpointError: it cannot be read, or two tensors get one name.
            UnsafeError: a tensor in it could only be had by running code.
        """
        with self._open(model_config) as ckpt:
            yield from self._weights(ckpt)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Give the model its weights, and see that it has taken all of its parameters.

        Raises:
            MismatchError: the checkpoint lacks some.
        """
        with self._open(model_config) as ckpt:
            tops = clipped_list(list(dict.fromkeys(name.partition(".")[0] for name in ckpt)))
            try:
                loaded = model.load_weights(self._weights(ckpt))
            except Exception as error:
                root = self.options.get("root")
                note(error, f"its weights are those of {ckpt.path}, root={root!r}: {tops}")
                raise
        # As vLLM's own loader: what a quantisation makes of parameters, only it knows.
        if loaded is None or model_config.quantization is not None:
            return
        missing = [name for name, _ in model.named_parameters() if name not in loaded]
        if missing:
            raise MismatchError(
                "the checkpoint lacks parameters of the model",
                file=ckpt.path,
                missing_keys=missing,
                lists=[f"missing ({len(missing)}): {clipped_list(missing)}"],
                hint=f"It has {tops}: root and rename, in --model-loader-extra-config, choose and "
                "rename.",
            )

    def _weights(self, ckpt: Any) -> Iterator[tuple[str, torch.Tensor]]:
        from torchlift._plan.rules import rename_keys
        from torchlift.remap import rules

        pairs = [tuple(pair) for pair in self.options.get("rename", ())]
        keys = (*ckpt, *ckpt.blocked_tensors)  # the latter are refused where they are asked for
        for key, name in rename_keys(keys, rules(pairs) if pairs else None, ckpt.path).items():
            yield name, ckpt[key]

    def _open(self, model_config: Any) -> Any:
        """Open what `torchlift.load` would load."""
        from torchlift._sources.opening import checkpoint

        given = {name: self.options[name] for name in _OPTIONS[3:] if name in self.options}
        path = self.options.get("path", model_config.model)
        return checkpoint(path, self.options.get("root"), **given)


def register() -> None:
    """Make ``torchlift`` a load format of vLLM's; calling it again changes nothing."""
    from vllm.model_executor import model_loader

    if hasattr(model_loader, "register_model_loader"):
        made = type("TorchliftLoader", (Loader, model_loader.BaseModelLoader), {})
        model_loader.register_model_loader("torchlift")(made)
    # Before 0.10 there is no such function, and a vLLM that is asked for the format names those it
    # knows: an error here would end every one that is installed beside torchlift.
