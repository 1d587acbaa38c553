"""What a worker shares with its gateway cannot be taken from beneath it."""

from __future__ import annotations

import os

import pytest

from djinn_plugins.server.board import NOBODY, Board


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory here can be sealed")
def test_a_worker_can_neither_shorten_nor_lengthen_its_board() -> None:
    board, descriptor = Board.create()
    writer = Board(descriptor)
    for size in (0, 2**20):
        with pytest.raises(PermissionError):
            os.truncate(descriptor, size)
    os.close(descriptor)
    writer.begin(NOBODY)
    assert board.read() is not None
