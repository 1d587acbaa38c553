"""What a process does once: by one of its threads, and again only if it failed."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from djinn_plugins.common.once import once, registering


def test_threads_wait_for_the_one_that_does_it() -> None:
    calls: list[int] = []

    @once
    def made(number: int) -> object:
        time.sleep(0.05)
        calls.append(number)
        return object()

    barrier, found = threading.Barrier(8), []

    def use(number: int) -> None:
        barrier.wait()
        found.append((number, made(number)))

    threads = [threading.Thread(target=use, args=(number % 2,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(calls) == [0, 1]
    assert len(set(found)) == 2, "all threads have the same object"


def test_what_failed_is_done_again_and_left_nothing() -> None:
    attempts: list[bool] = []

    @once
    def define() -> None:
        attempts.append(True)
        with registering("once_of_tests", "FRAGMENT") as library:
            library.define("f(Tensor x) -> Tensor")
            if len(attempts) == 1:
                raise KeyboardInterrupt
            library.impl("f", torch.neg, "CPU")

    with pytest.raises(KeyboardInterrupt):
        define()
    define()
    define()
    assert len(attempts) == 2
    assert torch.ops.once_of_tests.f(torch.ones(1)).tolist() == [-1]
