"""Laws of model stores."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from djinn_conformance.assertions import expect, expect_equal, expect_raises
from djinn_conformance.laws import law
from djinn_conformance.subjects import Subject
from djinn_plugins.common.operators.stored_models import KeepReply
from djinn_plugins.server.kinds.store import ModelStoreFactory, StoreSample, TensorExtent

Make = Callable[[], StoreSample]


@pytest.fixture(scope="module")
def make(plugin: Any, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Writes models, into another folder each time."""

    def made() -> StoreSample:
        sample: StoreSample = plugin.sample(tmp_path_factory.mktemp("store"))
        return sample

    return made


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _described(plugin: ModelStoreFactory, path: Path) -> Mapping[str, TensorExtent]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return plugin.tensors(descriptor)
    finally:
        os.close(descriptor)


def _cut(path: Path, by: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-(by % len(data) + 1)])


@law("store.lists_models")
def test_lists_models(subject: Subject, plugin: ModelStoreFactory, make: Make) -> None:
    """List them twice."""
    sample = make()
    store: Any = plugin.open(sample.options)
    for _ in range(2):
        found = store.models()
        expect_equal(sorted((model.name, len(model.files), model.problem) for model in found),
                     sorted((name, len(files), "") for name, files in sample.files.items()), "the models", str(subject))


@law("store.digests_content")
def test_digests_content(subject: Subject, plugin: ModelStoreFactory, make: Make) -> None:
    """Replace a file by another one while the store is open."""
    sample = make()
    store: Any = plugin.open(sample.options)
    files = [path for paths in sample.files.values() for path in paths]
    for _ in range(2):
        digests = sorted(file.digest for model in store.models() for file in model.files)
        expect_equal(digests, sorted(map(_digest, files)), "the digests", str(subject))
        data = bytearray(files[0].read_bytes())
        data[-1] ^= 1
        files[0].write_bytes(data)


@law("store.damage_named", effort=0.2)
@given(which=st.integers(0, 20), by=st.integers(0, 1000), early=st.booleans())
def test_damage_named(subject: Subject, plugin: ModelStoreFactory, make: Make, which: int, by: int, early: bool
                      ) -> None:
    """Truncate a file, before the store sees it or afterwards."""
    sample = make()
    store: Any = plugin.open(sample.options)
    if early:
        store.models()
    name, path = [(name, path) for name, paths in sample.files.items() for path in paths][
        which % sum(map(len, sample.files.values()))]
    _cut(path, by)
    for model in store.models():
        if model.name == name:
            expect(path.name in model.problem and not model.files, "the model with a truncated file", got=model,
                   wanted=f"no files, and a problem with {path.name}", where=str(subject))
        else:
            expect(not model.problem and bool(model.files), "another model", got=model, wanted="no problem",
                   where=str(subject))
    expect_equal({model.name for model in store.models()}, set(sample.files), "the models", str(subject))


@law("store.opens_listed_only")
def test_opens_listed_only(subject: Subject, plugin: ModelStoreFactory, make: Make) -> None:
    """Open files that are listed, others, and one that has changed."""
    sample = make()
    store: Any = plugin.open(sample.options)
    digests = [file.digest for model in store.models() for file in model.files]
    for digest in digests:
        descriptor = store.open(digest)
        with open(descriptor, "rb") as file:  # noqa: PTH123  # a descriptor, not a path
            expect_equal(hashlib.sha256(file.read()).hexdigest(), digest, "the content", str(subject))
    first = next(iter(sample.files.values()))[0]
    for other in ("", "0" * 64, digests[0].upper() + "0", first.name, str(first), "../" + first.name):
        expect_raises(LookupError, partial(store.open, other), f"open({other!r})", str(subject))
    before = _digest(first)
    first.write_bytes(first.read_bytes() + b"\0")
    expect_raises(LookupError, partial(store.open, before), "open of what has changed", str(subject))


@law("store.tensors_exact")
def test_tensors_exact(subject: Subject, plugin: ModelStoreFactory, make: Make) -> None:
    """Read each tensor where it is said to be."""
    sample = make()
    for name, tensors in sample.models.items():
        found: dict[str, bytes] = {}
        for path in sample.files[name]:
            data = path.read_bytes()
            described = _described(plugin, path)
            expect(not described.keys() & found.keys(), "tensors of a file", got=sorted(described),
                   wanted="no name of another file", where=str(subject))
            found |= {tensor: data[extent.begin:extent.end] for tensor, extent in described.items()}
        expect_equal(found, dict(tensors), f"tensors of {name}", str(subject))


@law("store.damage_refused", effort=0.5)
@given(which=st.integers(0, 20), by=st.integers(0, 1000),
       changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_damage_refused(subject: Subject, plugin: ModelStoreFactory, make: Make, which: int, by: int,
                        changes: list[tuple[int, int]]) -> None:
    """Truncate a file, and change bytes of another one."""
    sample = make()
    files = [path for paths in sample.files.values() for path in paths]
    path = files[which % len(files)]
    data = bytearray(path.read_bytes())
    _cut(path, by)
    expect_raises(ValueError, lambda: _described(plugin, path), "a truncated file", str(subject))
    for position, byte in changes:
        data[position % len(data)] = byte
    path.write_bytes(data)
    try:
        described = _described(plugin, path)
    except ValueError:
        return
    for tensor, extent in described.items():
        length = math.prod(extent.size) * getattr(torch, extent.dtype).itemsize
        expect(0 <= extent.begin <= extent.end <= len(data) and extent.end - extent.begin == length,
               f"where {tensor!r} lies", got=extent, wanted=f"{length} bytes of {len(data)}", where=str(subject))


def _send(store: Any, tenant: str, data: bytes) -> None:
    digest, reply = hashlib.sha256(data).hexdigest(), KeepReply()
    while not (reply.is_stored or reply.problem):
        reply = store.receive(tenant, digest, tenant, reply.position, len(data), data[reply.position:][:60])


@law("store.keeps_parts", effort=0.3)
@given(sent=st.lists(st.tuples(st.sampled_from(["b", "c"]), st.integers(0, 20)), min_size=1, max_size=8))
def test_keeps_parts(subject: Subject, plugin: ModelStoreFactory, make: Make, sent: list[tuple[str, int]]) -> None:
    """Send files of others when a tenant has one that is as large as its part."""
    sample = make()
    files = [path.read_bytes() for paths in sample.files.values() for path in paths]
    limit_bytes = 3 * max(map(len, files))
    store: Any = plugin.open(attrs.evolve(sample.options, keep_model_bytes=limit_bytes))
    mine = max(files, key=len)
    digest = hashlib.sha256(mine).hexdigest()
    _send(store, "a", mine)
    for tenant, which in sent:
        _send(store, tenant, files[which % len(files)])
    with os.fdopen(store.open_kept("a", digest), "rb") as file:
        expect_equal(hashlib.sha256(file.read()).hexdigest(), digest, "the content", str(subject))
    expect_raises(LookupError, partial(store.open_kept, "d", digest), "open_kept of another tenant", str(subject))
