"""Frames that real sessions sent, and what a saboteur makes of them."""

from __future__ import annotations

import copy
import json
import operator
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
import torch
from support.network.fault_proxy import FaultProxy
from torch import nn

import djinn
from djinn_plugins.common.wire.frames import (
    ALIGNMENT,
    HEAD,
    MAGIC,
    SHORT_HEAD,
    SHORT_MARK,
    decode_head,
    encode_head,
    head_bytes,
)

CORPUS = Path(__file__).parents[3] / "specs" / "wire"
DEVICE = "remote_accelerator:0"
MAX_FITTED_BYTES = 2**16
"""How large a body is made to go with a header that was changed."""
Frames = list[bytes]


def record(port: int) -> list[Frames]:
    """Run real sessions against a server, and return what each said, frame by frame; the first of each greets."""
    sessions = []
    for act in (_generate, _train, _transfer):
        with FaultProxy(port, records=True) as proxy:
            djinn.init(server=proxy.address, owner=f"owner of {act.__name__}")
            act()
            djinn.init()
            sessions += [split(bytes(link.sent)) for link in proxy.links]
    assert all(len(frames) > 5 for frames in sessions)
    return sessions


def written() -> Frames:
    """The frames of the wire's own examples, behind an ordinary greeting."""
    return [bytes.fromhex(case["frame"]) for name in ("greeting", "batches", "results", "transfers", "malformed")
            for case in json.loads((CORPUS / f"{name}.json").read_text())["cases"]]


def split(data: bytes) -> Frames:
    """Split a stream into its frames."""
    frames = []
    while data:
        size = head_bytes(data[0])
        head = decode_head(data[:size])
        length = size + head.header_bytes + head.body_bytes
        assert len(data) >= length
        frames.append(data[:length])
        data = data[length:]
    return frames


def save(sessions: list[Frames], path: Path) -> None:
    path.write_bytes(msgspec.msgpack.encode(sessions))


def load(path: Path) -> list[Frames]:
    return msgspec.msgpack.decode(path.read_bytes(), type=list[Frames])


def _generate() -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=64, bos_token_id=0,
                                     eos_token_id=0)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval().to(DEVICE)
    for do_sample in (False, True):
        model.generate(torch.tensor([[1, 2, 3]]).to(DEVICE), max_new_tokens=12, do_sample=do_sample, pad_token_id=0,
                       eos_token_id=None).cpu()


def _train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1),
                          nn.Linear(4 * 36, 5)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        loss = nn.functional.cross_entropy(model(torch.randn(2, 3, 6, 6).to(DEVICE)), torch.tensor([1, 2]).to(DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()


def _transfer() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64):
        value = (torch.arange(24).reshape(2, 3, 4) % 5).to(dtype)
        remote = value.to(DEVICE)
        assert torch.equal(remote.transpose(0, 2).cpu(), value.transpose(0, 2))
        assert torch.equal(remote[:, 1:].contiguous().cpu(), value[:, 1:])
    large = torch.arange(2.0**12).reshape(64, 64).to(DEVICE)
    large[3:5].mul_(2).sum().item()
    torch.as_strided(large, (3, 3), (2, 1), 7).cpu()
    len(large.nonzero())
    large[large > 9].sum().item()
    large[torch.tensor([1, 5, 3]).to(DEVICE)].index_add_(1, torch.tensor([0, 2]).to(DEVICE), large[:3, :2]).cpu()
    torch.manual_seed(7)
    values, indices = torch.randn(6, 7, device=DEVICE).sort()
    indices.gather(1, indices).cpu(), values.tolist()
    torch.randperm(9, device=DEVICE).cpu()
    nn.functional.embedding(indices, torch.randn(20, 4, device=DEVICE)).cpu()


@attrs.frozen
class Mutated:
    """Frames that were tampered with.

    Attributes:
        kind: How.
        session: Which session they are from.
        at: Place in it of the first one.
        frames: What is said instead.
    """

    kind: str
    session: int
    at: int
    frames: Frames


EDGES = (0, 1, -1, 2, 7, 63, 64, 2**7, 2**8 - 1, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62,
         2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63))
ODDITIES: tuple[Any, ...] = (
    None, True, False, 0.0, -0.0, float("nan"), float("inf"), 1e308, "", "x" * 5000, "\x00", "aten::mm", "cpu",
    "object", b"", bytes(16), bytes(32), [], {}, [[]], {"real": 1.0, "imag": 2.0}, {0: 0}, {"type": "batch"},
    ["upload", 1, 2])
HUGE = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01", b"\xdc\xff\xff", b"\xdd\x00\x10\x00\x00", b"\xc1")


class Mutator:
    """Tampers with frames, the same for the same seed."""

    def __init__(self, sessions: Sequence[Frames], seed: int) -> None:
        self._sessions = sessions
        self._random = random.Random(seed)
        self._kinds: dict[str, Callable[[bytes], bytes]] = {
            "bits": self._flip_bits, "header-bits": self._flip_header_bits, "truncated": self._truncate,
            "extended": self._extend, "head": self._change_head, "fields": self._change_fields,
            "more-fields": self._change_more_fields, "swapped": self._swap_fields, "spliced": self._splice,
            "nested": self._nest, "huge": self._declare_huge, "plausible": self._change_plausibly,
        }

    def next(self, session: int | None = None) -> Mutated:
        """Tamper with a frame, or with the order of some."""
        choose = self._random
        session = choose.randrange(len(self._sessions)) if session is None else session
        frames = self._sessions[session]
        at = choose.randrange(len(frames))
        kind = choose.choice([*self._kinds, "fields", "more-fields", "duplicated", "reordered", "foreign",
                              "plausible", "plausible", "plausible", "plausible"])
        if kind == "duplicated":
            return Mutated(kind, session, at, [frames[at]] * 2)
        if kind == "reordered":
            some = frames[at:at + choose.randrange(2, 5)]
            choose.shuffle(some)
            return Mutated(kind, session, at, some)
        if kind == "foreign":
            return Mutated(kind, session, at, [choose.choice(choose.choice(self._sessions))])
        return Mutated(kind, session, at, [self._kinds[kind](frames[at])])

    def _flip_bits(self, frame: bytes) -> bytes:
        changed = bytearray(frame)
        for _ in range(self._random.randrange(1, 9)):
            changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def _flip_header_bits(self, frame: bytes) -> bytes:
        head, header, body = parts(frame)
        return head + self._flip_bits(header) + body if header else frame

    def _truncate(self, frame: bytes) -> bytes:
        if self._random.random() < 0.5:
            return frame[:self._random.randrange(len(frame))]
        _, header, body = parts(frame)
        return joined(header[:self._random.randrange(len(header) + 1)], body)

    def _extend(self, frame: bytes) -> bytes:
        more = self._random.randbytes(self._random.choice([1, 31, 64, 128]))
        _, header, body = parts(frame)
        return self._random.choice([lambda: frame + more, lambda: joined(header + more, body),
                                    lambda: joined(header, body + more)])()

    def _change_head(self, frame: bytes) -> bytes:
        if frame[0] == SHORT_MARK:
            return self._flip_bits(frame[:SHORT_HEAD.size]) + frame[SHORT_HEAD.size:]
        fields = list(HEAD.unpack_from(frame.ljust(HEAD.size, b"\0")))
        place = self._random.randrange(len(fields))
        bits = (0, 16, 16, 64, 32, 32, 64)[place]
        if place == 0:
            fields[0] = self._random.choice([b"GET ", b"\x16\x03\x01\x02", b"DJNM", MAGIC[::-1]])
        else:
            near = fields[place] + self._random.choice([-64, -1, 1, 64])
            fields[place] = self._random.choice([*EDGES, near]) % 2**bits
        return HEAD.pack(*fields) + frame[HEAD.size:]

    def _change_fields(self, frame: bytes) -> bytes:
        return self._with_tree(frame, 1)

    def _change_more_fields(self, frame: bytes) -> bytes:
        return self._with_tree(frame, self._random.randrange(2, 6))

    def _change_plausibly(self, frame: bytes) -> bytes:
        """Replace numbers and texts by others that the frame has, or that are near: types stay what they are."""
        _, header, body = parts(frame)
        tree = decoded(header)
        places = places_of(tree)
        leaves = [(node, key) for node, key in places if isinstance(node[key], (int, float, str)) and key != "type"]
        for node, key in self._random.sample(leaves, min(len(leaves), self._random.randrange(1, 4))):
            value = node[key]
            same = [other[at] for other, at in leaves if type(other[at]) is type(value)]
            if type(value) is int:
                same += [value + 1, max(0, value - 1), self._random.choice(EDGES), self._random.randrange(40)]
            node[key] = self._random.choice(same)
        return self._fitted(tree, body)

    def _with_tree(self, frame: bytes, count: int) -> bytes:
        _, header, body = parts(frame)
        tree = decoded(header)
        for _ in range(count):
            tree = self._changed(tree)
        return self._fitted(tree, body)

    def _changed(self, tree: Any) -> Any:
        """Change one place of a tree, which is not copied on the way there."""
        keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
        if not keys or self._random.random() < 0.08:
            return self._other(tree)
        key = self._random.choice(keys)
        tree[key] = self._changed(tree[key])
        return tree

    def _other(self, value: Any) -> Any:
        choose = self._random
        if choose.random() < 0.2:
            # A copy: what is put in may be changed in its turn.
            return copy.deepcopy(choose.choice(ODDITIES))
        if isinstance(value, bool) or value is None:
            return not value
        if isinstance(value, int):
            return choose.choice([choose.choice(EDGES), value + choose.choice([-2, -1, 1, 2, 64]), choose.randrange(12),
                                  -value if value < 2**63 else 0]) % 2**64 - 2**63 * (choose.random() < 0.05)
        if isinstance(value, float):
            return choose.choice([-value, value * 2, float(choose.choice(EDGES)), float("nan")])
        if isinstance(value, (str, bytes)):
            at = choose.randrange(len(value) + 1)
            return value[:at] + choose.choice([value[at:], value[:3], value[:0]]) + value[at + 1:]
        if isinstance(value, list):
            at = choose.randrange(len(value) + 1)
            return choose.choice([value[:at] + value[at + 1:], value[:at] + value[at:at + 1] * 2 + value[at:],
                                  value[::-1], value * 2, value[:at]])
        return {key: value[key] for key in list(value)[choose.randrange(len(value) + 1):]}

    def _swap_fields(self, frame: bytes) -> bytes:
        _, header, body = parts(frame)
        tree = decoded(header)
        places = places_of(tree)
        if len(places) > 1:
            (one, here), (other, there) = self._random.sample(places, 2)
            # A branch that is swapped with its own twig would hang from itself.
            first, second = one[here], other[there]
            if not contains(first, other) and not contains(second, one):
                one[here], other[there] = second, first
        return self._fitted(tree, body)

    def _splice(self, frame: bytes) -> bytes:
        other = self._random.choice(self._random.choice(self._sessions))
        if self._random.random() < 0.5:
            return joined(parts(frame)[1], parts(other)[2])
        return frame[:self._random.randrange(len(frame))] + other[self._random.randrange(len(other)):]

    def _nest(self, frame: bytes) -> bytes:
        depth = self._random.choice([5, 100, 500, 900, 5000])
        return self._with_bytes(frame, self._random.choice([b"\x91", b"\x81\x01", b"\x92\x01"]) * depth + b"\x90")

    def _declare_huge(self, frame: bytes) -> bytes:
        return self._with_bytes(frame, self._random.choice(HUGE))

    def _with_bytes(self, frame: bytes, data: bytes) -> bytes:
        """Put bytes where a value was, by way of a mark, so that what is around it stays well formed."""
        _, header, body = parts(frame)
        mark = f"mark{self._random.randrange(10**9):09}"
        tree = self._marked(decoded(header), mark)
        return joined(msgspec.msgpack.encode(tree).replace(msgspec.msgpack.encode(mark), data, 1), body)

    def _marked(self, tree: Any, mark: str) -> Any:
        keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
        if not keys or self._random.random() < 0.1:
            return mark
        key = self._random.choice(keys)
        tree[key] = self._marked(tree[key], mark)
        return tree

    def _fitted(self, tree: Any, body: bytes) -> bytes:
        """A frame whose body is mostly as long as its header announces: whoever lies is not looked at any further."""
        try:
            header = msgspec.msgpack.encode(tree)
        except (OverflowError, RecursionError):
            return joined(b"\xc1", body)
        if body and self._random.random() < 0.9:
            needed = announced(tree)
            if 0 <= needed <= MAX_FITTED_BYTES:
                body = (body * (needed // len(body) + 1))[:needed]
        return joined(header, body)


def parts(frame: bytes) -> tuple[bytes, bytes, bytes]:
    """Head, header and body of a frame, which need not be one."""
    size = head_bytes(frame[0]) if frame else HEAD.size
    if len(frame) < size:
        return frame, b"", b""
    end = size + (SHORT_HEAD.unpack_from(frame)[2] if size == SHORT_HEAD.size else HEAD.unpack_from(frame)[4])
    return frame[:size], frame[size:end], frame[end:]


def joined(header: bytes, body: bytes) -> bytes:
    return encode_head(1, len(header), len(body)) + header + body


def decoded(header: bytes) -> Any:
    """What a header says, as plain lists and maps; an empty batch if it says nothing."""
    try:
        return msgspec.msgpack.decode(header)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return {"type": "batch", "commands": []}


def places_of(tree: Any) -> list[tuple[Any, Any]]:
    """List the places of a tree: the container of each, and its key there."""
    places: list[tuple[Any, Any]] = []
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (list, dict)):
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            places += [(node, key) for key in keys]
            pending += [node[key] for key in keys]
    return places


def contains(branch: Any, twig: Any) -> bool:
    """Whether a container is, or has within, another."""
    pending = [branch]
    while pending:
        node = pending.pop()
        if node is twig:
            return True
        if isinstance(node, (list, dict)):
            pending += node.values() if isinstance(node, dict) else node
    return False


def announced(tree: Any) -> int:
    """Bytes of tensors that a header seems to announce; -1 if that makes no sense."""
    total = 0
    commands = tree.get("commands", []) if isinstance(tree, dict) else []
    for command in commands if isinstance(commands, list) else []:
        try:
            if command[0] == "upload":
                _, name, size, _ = command[2]
                length = getattr(torch, name).itemsize
                for extent in size:
                    length *= operator.index(extent)
                total += length + -length % ALIGNMENT
        except (TypeError, ValueError, IndexError, AttributeError, KeyError):
            return -1
    return total


