"""Serve any checkpoint with vLLM, without conversion: ``vllm serve --load-format torchlift``.

vLLM calls `register` in each of its processes, through the entry point ``vllm.general_plugins``.
Before that, this module imports neither torch nor vLLM.
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
    """The weight loader of ``--load-format torchlift``. `register` adds it to vLLM.

    The model's folder contains the configuration, the tokenizer, and a checkpoint of any format
    that `torchlift.open` reads. ``--model-loader-extra-config`` is a JSON object with these keys:

    - ``path``: The path or URL of the weights, if they are not in the model's folder.
    - ``root``: The container of the weights, such as ``"model"``.
    - ``rename``: Pairs of a pattern and its replacement, as for `torchlift.remap.rules`. The new
      names must be those of the model on the Hugging Face Hub.
    - ``storage_options``: Options of a URL. See `torchlift.open`.
    - ``allow_classes``: Tensor subclasses that may be rebuilt, from Python only.

    The model gets one tensor at a time, mapped from the file if possible. Ranks of tensor
    parallelism read the pages of their slices, and share the page cache. No code in the file runs.

    Args:
        load_config: vLLM's ``LoadConfig``.

    Raises:
        ValueError: If the extra config has another key.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)  # type: ignore[call-arg]
        self.options = dict(load_config.model_loader_extra_config or {})
        for name in self.options:
            if name not in _OPTIONS:
                known = did_you_mean(name, _OPTIONS) or f"It takes {', '.join(_OPTIONS)}."
                raise ValueError(f"unknown key {name!r} in model_loader_extra_config. {known}")

    def download_model(self, model_config: Any) -> None:
        """Open the checkpoint, so that its errors are raised early. Nothing is downloaded."""
        with self._open(model_config):
            pass

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield one name and tensor at a time.

        Raises:
            CheckpointError: If the checkpoint cannot be read, or two tensors get one name.
            UnsafeError: If only code in the file could rebuild a tensor.
        """
        with self._open(model_config) as ckpt:
            yield from self._weights(ckpt)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load the weights of the model, and check that no parameter is missing.

        Raises:
            MismatchError: If the checkpoint lacks parameters.
        """
        with self._open(model_config) as ckpt:
            tops = clipped_list(list(dict.fromkeys(name.partition(".")[0] for name in ckpt)))
            try:
                loaded = model.load_weights(self._weights(ckpt))
            except Exception as error:
                root = self.options.get("root")
                note(error, f"its weights are those of {ckpt.path}, root={root!r}: {tops}")
                raise
        # As in vLLM's own loader: a quantisation changes the names of parameters.
        if loaded is None or model_config.quantization is not None:
            return
        missing = [name for name, _ in model.named_parameters() if name not in loaded]
        if missing:
            raise MismatchError(
                "the checkpoint lacks parameters of the model",
                file=ckpt.path,
                missing_keys=missing,
                lists=[f"missing ({len(missing)}): {clipped_list(missing)}"],
                hint=f"The checkpoint has {tops}. Pass root and rename in "
                "--model-loader-extra-config.",
            )

    def _weights(self, ckpt: Any) -> Iterator[tuple[str, torch.Tensor]]:
        from torchlift._plan.rules import rename_keys
        from torchlift.remap import rules

        pairs = [tuple(pair) for pair in self.options.get("rename", ())]
        keys = (*ckpt, *ckpt.blocked_tensors)  # the latter raise an error below
        for key, name in rename_keys(keys, rules(pairs) if pairs else None, ckpt.path).items():
            yield name, ckpt[key]

    def _open(self, model_config: Any) -> Any:
        """Open the checkpoint as `torchlift.load` does."""
        from torchlift._sources.opening import checkpoint

        given = {name: self.options[name] for name in _OPTIONS[3:] if name in self.options}
        path = self.options.get("path", model_config.model)
        return checkpoint(path, self.options.get("root"), **given)


def register() -> None:
    """Add the load format ``torchlift`` to vLLM. A second call changes nothing."""
    from vllm.model_executor import model_loader

    if hasattr(model_loader, "register_model_loader"):
        made = type("TorchliftLoader", (Loader, model_loader.BaseModelLoader), {})
        model_loader.register_model_loader("torchlift")(made)
    # vLLM before 0.10 lacks this function. An error here would stop every such vLLM in the same
    # environment. Without it, vLLM lists the load formats that it has.
