"""The garbage collector, which belongs to all threads of a process."""

from __future__ import annotations

import gc
import threading

from torchlift._system.memory import collection_paused


def test_another_thread_leaves_the_collector_to_the_main_thread() -> None:
    """Neither is it off while that thread works, nor is it on again where training put it off."""
    found = list[bool]()

    def work() -> None:
        with collection_paused():
            found.append(gc.isenabled())
            entered.set()
            assert paused.wait(60)
        left.set()

    entered, paused, left = threading.Event(), threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert entered.wait(60)
        gc.disable()
        paused.set()
        assert left.wait(60)
        assert found == [True]
        assert not gc.isenabled()
    finally:
        gc.enable()
        thread.join()


def test_the_main_thread_pauses_the_collector_and_restores_it() -> None:
    """Also after an error, and inside of another pause."""
    for nested in (False, True):
        try:
            with collection_paused():
                assert not gc.isenabled()
                if nested:
                    with collection_paused():
                        assert not gc.isenabled()
                    assert not gc.isenabled()
                raise KeyError
        except KeyError:
            assert gc.isenabled()
