"""Checkpoints inside of a framework: one module for each, imported by its own name.

``torchlift.integrations.lightning``, ``.transformers``, ``.accelerate``, ``.torchtitan``, ``.peft``
and ``.vllm``. No other part of this package needs one of these frameworks.
"""
