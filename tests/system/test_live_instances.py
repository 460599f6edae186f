"""The search for live objects beside threads that make new ones."""

from __future__ import annotations

import threading

from torch import nn

from torchlift import swap
from torchlift._system.memory import live_instances


def _fill_tuples(ended: threading.Event, filled: list[int], errors: list[SystemError]) -> None:
    while not ended.is_set():
        try:
            filled.append(len(tuple(sum(range(50)) for _ in range(200))))
        except SystemError as error:
            errors.append(error)


def _list_beside_threads(count: int) -> list[SystemError]:
    """List modules while other threads fill tuples. Return what these threads met."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(10)])
    view = model[0].weight.view(-1)
    ended, filled, errors = threading.Event(), list[int](), list[SystemError]()
    arguments = ended, filled, errors
    threads = [threading.Thread(target=_fill_tuples, args=arguments) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        while len(filled) < count and not errors:
            found = live_instances(nn.Module)
            assert {id(module) for module in model.modules()} <= {id(each) for each in found}
        assert [blocker.key for blocker in swap.preflight(model)] == ["0.weight"]
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert view.shape == (4,)
    return errors


def test_other_threads_go_on_filling_their_tuples() -> None:
    """CPython fills only a tuple that nobody else holds; a list of all objects would hold it."""
    assert _list_beside_threads(4000) == []


def test_each_object_is_found_once_and_not_kept() -> None:
    class Kept(nn.Linear):
        pass

    kept = [Kept(1, 1) for _ in range(5)]
    assert sorted(map(id, live_instances(Kept))) == sorted(map(id, kept))
    del kept
    assert live_instances(Kept) == []
