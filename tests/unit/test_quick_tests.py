"""What makes tests quick changes nothing that a test sees."""

from __future__ import annotations

import logging

import pytest


def test_loggers_of_pytorch_are_heard_through_the_root(caplog: pytest.LogCaptureFixture) -> None:
    loggers = [logger for name, logger in logging.root.manager.loggerDict.items()
               if isinstance(logger, logging.Logger) and name.partition(".")[0] == "torch"]
    assert loggers
    assert all(logger.propagate for logger in loggers)
    logging.getLogger("torch._dynamo").warning("heard")
    assert [record.message for record in caplog.records] == ["heard"]
