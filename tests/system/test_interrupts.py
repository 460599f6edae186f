"""An interrupt is held back while a block runs, whatever opened the block."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from torchlift._system.interrupts import uninterrupted


@contextmanager
def _wrapped() -> Iterator[None]:
    with uninterrupted():
        yield


@contextmanager
def _wrapped_twice() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(_wrapped())
        yield


@pytest.mark.parametrize("block", [uninterrupted, _wrapped, _wrapped_twice])
def test_an_interrupt_waits_for_the_end_of_the_outer_block(block: object) -> None:
    """A block inside it, which ends before, does not deliver it."""
    steps = []

    def run() -> None:
        with block():  # type: ignore[operator]
            os.kill(os.getpid(), signal.SIGINT)
            steps.append("held")
            with uninterrupted():
                steps.append("inside")
            steps.append("after the block inside")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert steps == ["held", "inside", "after the block inside"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
