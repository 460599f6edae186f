"""Checkpoints inside of a framework: one module for each, imported by its own name.

``torchlift.integrations.lightning``, ``.transformers``, ``.accelerate``, ``.torchtitan``, ``.peft``
and ``.vllm``. Nothing else in this package needs one of these frameworks.
"""
