"""Sparse tensors on the device: made, moved, converted, multiplied, differentiated, trained with, as in eager."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recording.eager import DEVICE, Program, assert_same, outcome, programs

import djinn
from djinn.errors import UnsupportedTensorError
from djinn.record.dispatcher import pending_errors

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
INDICES = [[0, 1, 1, 0], [2, 0, 2, 2]]
VALUES = [3.0, 4.0, 5.0, 1.5]


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    """PyTorch warns unless a program says whether constructors check."""
    before = torch.sparse.check_sparse_tensor_invariants.is_enabled()
    torch.sparse.check_sparse_tensor_invariants.disable()
    yield
    if before:
        torch.sparse.check_sparse_tensor_invariants.enable()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_as_indices_become_pointers_and_indices_again(dtype: torch.dtype) -> None:
    def converted(device: Any) -> list[torch.Tensor]:
        rows = torch.tensor([0, 0, 1, 3, 3, 3], dtype=dtype, device=device)
        columns, is_short = rows.flip(0), dtype is torch.int32
        pointers = torch._convert_indices_from_coo_to_csr(rows, 5, out_int32=is_short)
        return [pointers, torch._convert_indices_from_coo_to_csr(rows[:0], 2), *(
            torch._convert_indices_from_csr_to_coo(pointers, columns, out_int32=is_short, transpose=transpose)
            for transpose in (False, True))]

    for there, here in zip(converted(DEVICE), converted("cpu"), strict=True):
        assert (there.dtype, there.tolist()) == (here.dtype, here.tolist())


def parts(sparse: torch.Tensor) -> Any:
    """All that a user can see of a sparse tensor."""
    shared = (tuple(sparse.shape), str(sparse.layout), sparse.dtype, sparse._nnz(), sparse.requires_grad, sparse.dim())
    if sparse.layout is torch.sparse_coo:
        return (*shared, sparse._indices().clone(), sparse._values().detach().clone(), sparse.is_coalesced(),
                sparse.sparse_dim(), sparse.dense_dim(), sparse.is_sparse)
    rows = sparse.layout in (torch.sparse_csr, torch.sparse_bsr)
    return (*shared, sparse.values().detach().clone(), *(index.clone() for index in (
        (sparse.crow_indices(), sparse.col_indices()) if rows else (sparse.ccol_indices(), sparse.row_indices()))))


def coo(device: str) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor(INDICES, device=device), torch.tensor(VALUES, device=device), (2, 3))


def matrix(device: str) -> torch.Tensor:
    return torch.tensor([[0, 1.0, 0], [2, 0, 3]], device=device)


def right(device: str) -> torch.Tensor:
    return torch.arange(12.0, device=device).view(3, 4)


def constructors(device: str) -> Any:
    csr = torch.sparse_csr_tensor(torch.tensor([0, 1, 3], device=device), torch.tensor([1, 0, 2], device=device),
                                  torch.tensor([1.0, 2, 3], device=device), (2, 3))
    here = torch.sparse_coo_tensor(torch.tensor(INDICES), torch.tensor(VALUES), device=device)
    hybrid = torch.sparse_coo_tensor([[0, 1]], torch.ones(2, 4), (3, 4), device=device)
    return [parts(made) for made in (
        coo(device), coo(device).coalesce(), csr, here, hybrid,
        torch.zeros(2, 3, layout=torch.sparse_coo, device=device), torch.eye(3).to_sparse().to(device),
        torch.eye(3).to_sparse_csr().to(device), coo("cpu").to(device))]


def conversions(device: str) -> Any:
    dense = matrix(device)
    sparse, csr = dense.to_sparse(), dense.to_sparse_csr()
    blocks = torch.ones(4, 4, device=device).to_sparse_bsr((2, 2))
    batched = torch.ones(2, 2, 3, 2, device=device).to_sparse_csc(dense_dim=1)
    return [*(parts(made) for made in (
        sparse, csr, dense.to_sparse_csc(), dense.to_sparse(1), sparse.to_sparse_csr(), csr.to_sparse(), blocks,
        coo(device).double(), coo(device).clone(), coo(device).t(), coo(device).detach())),
        *((made.sparse_dim(), made.dense_dim()) for made in (sparse, blocks, batched, dense.to_sparse(1))),
        csr.to_dense(), coo(device).to_dense(),
        coo(device).cpu().to_dense().tolist()]


def products(device: str) -> Any:
    sparse, csr, x, start = coo(device), matrix(device).to_sparse_csr(), right(device), torch.ones(2, 4, device=device)
    return [torch.sparse.mm(sparse, x), torch.mm(sparse, x), torch.spmm(sparse, x), sparse @ x, sparse.matmul(x),
            csr @ x, torch.sparse.mm(csr, x), torch.addmm(start, sparse, x, beta=2, alpha=0.5),
            torch.addmm(start, csr, x), torch.sparse.addmm(start, sparse, x),
            parts(torch.sparse.mm(sparse, sparse.t())),
            torch.bmm(torch.eye(3, device=device).expand(2, 3, 3).to_sparse(), x.expand(2, 3, 4)),
            parts(torch.sparse.sampled_addmm(csr, start, right(device).t())),
            torch.sparse.mm(coo("cpu"), x)]


def arithmetic(device: str) -> Any:
    sparse, unique = coo(device), coo(device).coalesce()
    changed = sparse.clone()
    changed.mul_(3)
    dense = torch.ones(2, 3, device=device)
    dense.add_(sparse, alpha=-2)
    hybrid = torch.stack([sparse.to_dense()] * 2, 2).unsqueeze(3).to_sparse(2)
    return [*(parts(made) for made in (
        torch.sparse.sum(hybrid, [2, 3]), torch.sparse.sum(hybrid, [0, -1]),
        sparse * 2, unique / 2, sparse + unique, unique + unique, unique - unique, unique * unique, -unique,
        unique.abs(), unique.pow(2), unique.sqrt(), torch.sparse.sum(sparse, 1), changed,
        unique * torch.full((2, 3), 3.0, device=device),
        torch.sparse.softmax(unique, 1), dense.sparse_mask(unique))), dense, torch.ones(2, 3, device=device) + sparse,
        torch.sparse.sum(sparse), torch.sparse.sum(sparse, [0, 1]), sparse.sum(), unique.norm(),
        torch.sparse.sum(hybrid, [-3, 0, 3])]


def made_like(device: str) -> Any:
    """Constructors that tell no size or no elements, and tensors made like others."""
    sparse, csr = coo(device), matrix(device).to_sparse_csr()
    pointers, places = torch.tensor([0, 1, 3], device=device), torch.tensor([1, 0, 2], device=device)
    unsized = [torch.sparse_compressed_tensor(pointers, places, torch.ones(size, device=device), layout=layout)
               for layout, size in ((torch.sparse_csr, 3), (torch.sparse_csc, (3, 2)), (torch.sparse_bsr, (3, 2, 1)),
                                    (torch.sparse_bsc, (3, 2, 1)))]
    blocks = torch.ones(4, 4, device=device).to_sparse_bsc((2, 2))
    hybrid, rows = (torch.ones(2, 4, 2, device=device).to_sparse(1),
                    torch.ones(2, 4, 2, device=device).to_sparse_csr(dense_dim=1))
    torch.manual_seed(0)
    like = [*((made.sparse_dim(), made.dense_dim(), tuple(made.shape)) for made in (
                torch.zeros_like(hybrid), torch.empty_like(hybrid), torch.zeros_like(rows),
                torch.zeros_like(rows, layout=torch.sparse_csc), torch.zeros_like(rows, layout=torch.sparse_coo),
                torch.zeros_like(blocks, layout=torch.sparse_bsr))),
            outcome(lambda: torch.zeros_like(blocks, layout=torch.sparse_csc)),
            torch.empty_like(csr)._nnz(), torch.zeros_like(sparse, layout=torch.strided),
            torch.empty_like(sparse, layout=torch.strided).shape]
    return [*(parts(made) for made in (
        *unsized, torch.sparse_coo_tensor((2, 3), device=device), sparse.new_zeros((3, 3)), sparse.new_empty((2, 2)),
        torch.zeros_like(csr), torch.zeros_like(sparse), torch.zeros_like(hybrid), torch.zeros_like(rows),
        torch.zeros_like(torch.ones(4, 4, device=device).to_sparse_bsr((2, 2))),
        torch.zeros_like(torch.ones(2, 4, 6, device=device).to_sparse_bsc((2, 3)), dtype=torch.float64),
        torch.zeros(3, 3, layout=torch.sparse_csr, device=device), torch.ones_like(csr), torch.full_like(csr, 2.5),
        torch.randn_like(csr), (sparse * 1j).conj_physical(),
        torch.sum(sparse, 0), sparse.int().sum(1, keepdim=True), sparse.sum(0, dtype=torch.float64))), *like,
        sparse.sum((0, 1)), outcome(lambda: torch.zeros_like(sparse, memory_format=torch.preserve_format))]


def writes(device: str) -> Any:
    """A write keeps the dtype of what it writes, and is refused where eager refuses it."""
    def tried(dtype: torch.dtype, other: torch.dtype, write: Any, *, is_dense: bool = False) -> Any:
        target = matrix(device).to(dtype) if is_dense else matrix(device).to(dtype).to_sparse()
        added = matrix(device).to(other).to_sparse()
        assert write(target, added) is target
        return target.clone() if is_dense else parts(target)

    pairs = ((torch.uint8, torch.int16), (torch.int32, torch.float32), (torch.float32, torch.float64))
    binary = (torch.Tensor.add_, torch.Tensor.sub_, torch.Tensor.mul_, lambda x, y: x.add_(y, alpha=2))
    unary = (lambda x, _: x.mul_(2), lambda x, _: x.mul_(2.5), lambda x, _: x.div_(2), lambda x, _: x.neg_(),
             lambda x, _: x.floor_divide_(2), lambda x, _: x.coalesce().sqrt_().add_(x), lambda x, _: x.zero_(),
             lambda x, _: x.div_(2, rounding_mode="trunc"))
    outs = (lambda x, y: torch.neg(y, out=x), lambda x, y: torch.mul(y, y, out=x),
            lambda x, y: torch.add(y, x, out=x))
    return [outcome(partial(tried, *pair, write)) for pair in pairs for write in (*binary, *unary, *outs)] + [
        outcome(partial(tried, *pair, write, is_dense=True)) for pair in pairs for write in binary]


def rows(device: str) -> Any:
    sparse = coo(device)
    hybrid = torch.sparse_coo_tensor([[0, 2, 0]], torch.ones(3, 2), (3, 2)).to(device)
    chosen = torch.tensor([1, 0, -1, 1], device=device)
    return [parts(made) for made in (
        sparse.index_select(0, chosen), sparse.coalesce().index_select(1, chosen), hybrid.index_select(0, chosen),
        hybrid.index_select(1, chosen.clamp(0)), sparse[0], sparse.coalesce()[:, 2], sparse.narrow_copy(1, 1, 2),
        sparse.permute(1, 0), torch.stack([sparse, sparse]), sparse.coalesce().nan_to_num(1.0))] + [
        hybrid[0], sparse.any(), outcome(lambda: sparse.index_select(0, chosen + 5).cpu())]


def gradients(device: str) -> Any:
    values = torch.tensor(VALUES, device=device, requires_grad=True)
    x = right(device).requires_grad_()
    product = torch.sparse.mm(torch.sparse_coo_tensor(torch.tensor(INDICES, device=device), values, (2, 3)), x)
    product.square().sum().backward()
    leaf = coo(device).coalesce().detach().requires_grad_()
    torch.sparse.mm(leaf, right(device)).square().sum().backward()
    dense = matrix(device).requires_grad_()
    torch.sparse.mm(dense.to_sparse_csr(), right(device)).square().sum().backward()
    # Whether a gradient counts as coalesced depends on who else holds it when autograd keeps it.
    return values.grad, x.grad, product.detach(), parts(leaf.grad.coalesce()), dense.grad


def texts(device: str) -> Any:
    return [repr(made).replace(", device='remote_accelerator:0'", "")
            for made in (coo(device), coo(device).coalesce(), matrix(device).to_sparse_csr())]


def lacking(device: str) -> Any:
    """Components that a layout does not have."""
    names = ("indices", "_indices", "_values", "row_indices", "ccol_indices", "crow_indices", "col_indices",
             "is_coalesced")
    return [outcome(getattr(made, name)) for made in (coo(device).coalesce(), *compressed(device)) for name in names]


def compressed(device: str) -> list[torch.Tensor]:
    """A batch of matrices in each compressed layout."""
    batch = torch.stack([matrix(device), matrix(device).flip(1)])
    blocks = torch.tensor([[[0.0, 1, 2, 0], [3, 0, 0, 0]], [[4, 0, 0, 5], [0, 0, 6, 0]]], device=device)
    return [batch.to_sparse_csr(), batch.to_sparse_csc(), blocks.to_sparse_bsr((2, 2)), blocks.to_sparse_bsc((2, 2))]


def conversions_of_batches(device: str) -> Any:
    made: list[Any] = []
    for number, sparse in enumerate(compressed(device)):
        for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
            size = None if layout in (torch.sparse_csr, torch.sparse_csc) else (2, 3 if number < 2 else 2)
            made.append(outcome(lambda sparse=sparse, layout=layout, size=size: parts(
                sparse.to_sparse(layout=layout, blocksize=size))))
    return made


def refusals(device: str) -> Any:
    sparse = coo(device)
    return [outcome(action) for action in (
        sparse.indices, sparse.values, lambda: torch.mm(sparse, torch.ones(2, 2, device=device)),
        lambda: sparse + torch.sparse_coo_tensor(torch.tensor([[0], [0]]), torch.ones(1), (5, 5), device=device))]


def compressed_rows(device: str) -> Any:
    found = [matrix(device).to_sparse(layout=layout) for layout in (torch.sparse_csr, torch.sparse_csc)]
    return [parts(made) for sparse in found for made in (sparse[0], sparse.select(1, 1), sparse.angle())]


@programs(compressed_rows, constructors, made_like, conversions, conversions_of_batches, lacking, products, arithmetic,
          writes, rows, gradients, texts)
def test_sparse_tensors_do_what_they_do_in_eager(program: Program) -> None:
    assert_same(program)


def test_what_eager_refuses_is_refused_in_its_words() -> None:
    assert [text.partition(":")[0] for text in refusals(str(DEVICE))] == [
        text.partition(":")[0] for text in refusals("cpu")]


@pytest.mark.parametrize("size", [(), (2, 3)])
def test_a_dense_tensor_has_dense_dimensions_only(size: tuple[int, ...]) -> None:
    assert_same(lambda device: [(x.sparse_dim(), x.dense_dim()) for x in (torch.ones(size, device=device),)])


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("include_last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_bag_has_sparse_gradients(mode: str, include_last: bool, is_weighted: bool,
                                               dtype: torch.dtype) -> None:
    def program(device: str) -> Any:
        torch.manual_seed(0)
        table = torch.nn.EmbeddingBag(6, 3, mode=mode, sparse=True, include_last_offset=include_last,
                                      padding_idx=None if include_last else 4, dtype=dtype).to(device)
        items = torch.tensor([1, 5, 1, 4, 2], device=device)
        offsets = torch.tensor([0, 2, 2, 5] if include_last else [0, 2, 2], device=device)
        weights = (torch.arange(5.0, device=device).to(dtype) / 2).requires_grad_() if is_weighted else None
        bags = table(items, offsets, weights)
        bags.square().sum().backward()
        gradient = table.weight.grad
        assert gradient is not None
        return bags, parts(gradient), weights if weights is None else weights.grad

    assert_same(lambda device: outcome(lambda: program(device)))


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad])
def test_an_embedding_with_sparse_gradients_is_trained(optimizer: Any) -> None:
    def program(device: str) -> Any:
        table = torch.nn.Embedding(6, 3, sparse=True).to(device)
        steps = optimizer(table.parameters(), lr=0.1)
        for step in range(3):
            steps.zero_grad()
            words = torch.tensor([1, 3, 1, step]).to(device)
            (table(words).square().sum() + table(torch.tensor([2, 1]).to(device)).sum()).backward()
            steps.step()
        return table.weight.detach(), parts(table.weight.grad.coalesce())

    assert_same(program)


def test_a_graph_convolution_is_trained_without_a_round_trip_a_step() -> None:
    """What scripts for graphs do: a product with a sparse adjacency in each layer."""
    def step(adjacency: torch.Tensor, x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        hidden = torch.relu(torch.spmm(adjacency, x @ weights[0]))
        loss = torch.spmm(adjacency, hidden @ weights[1]).log_softmax(1)[:, 0].mean().neg()
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            with torch.no_grad():
                weight.sub_(gradient, alpha=0.1)
        return loss.detach()

    def program(device: str) -> Any:
        adjacency = torch.rand(8, 8).relu().gt(0.6).float().to_sparse().to(device)
        x = torch.rand(8, 5).to(device)
        weights = [torch.rand(size).to(device).requires_grad_() for size in ((5, 4), (4, 3))]
        losses = [step(adjacency, x, weights) for _ in range(3)]
        before = djinn.stats().get("round_trips", 0)
        losses += [step(adjacency, x, weights) for _ in range(3)]
        assert djinn.stats().get("round_trips", 0) == before
        return losses, [weight.detach() for weight in weights]

    assert_same(program)


def test_copies_and_files_hold_what_the_tensor_holds() -> None:
    for sparse in (coo(str(DEVICE)), matrix(str(DEVICE)).to_sparse_csr()):
        file = io.BytesIO()
        torch.save(sparse, file)
        file.seek(0)
        for made in (copy.deepcopy(sparse), torch.load(file)):
            assert made.device == DEVICE
            assert torch.equal(made.to_dense().cpu(), sparse.to_dense().cpu())


def test_what_has_no_remote_form_says_what_to_do() -> None:
    with pytest.raises(UnsupportedTensorError, match="to_dense"):
        torch.hspmm(coo(str(DEVICE)), torch.ones(3, 2, device=DEVICE))


@pytest.mark.parametrize("asks", [torch.autograd.grad, torch.autograd.backward], ids=["grad", "backward"])
def test_a_gradient_without_a_remote_form_says_so_wherever_the_sparse_tensor_stands(asks: Any) -> None:
    leaf = matrix(str(DEVICE)).to_sparse_csr().requires_grad_()
    x = torch.ones(leaf.shape[1], 2, device=DEVICE, requires_grad=True)
    loss = torch.sparse.mm(leaf, x, "mean").sum()
    with pytest.raises(UnsupportedTensorError, match="to_dense"):
        asks(loss, inputs=[leaf])
    assert not pending_errors


LAYOUTS = ("to_sparse", "to_sparse_csr", "to_sparse_csc")


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    rows, columns = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    return {"size": (rows, columns), "seed": draw(st.integers(0, 99)), "layout": draw(st.sampled_from(LAYOUTS)),
            "dtype": draw(st.sampled_from((torch.float32, torch.float64, torch.complex64, torch.int64))),
            "repeats": draw(st.booleans()), "transposed": draw(st.booleans()),
            "filled": draw(st.sampled_from((0.0, 0.3, 1.0)))}


@given(case=cases())
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_drawn_sparse_tensors_equal_eager(case: dict[str, Any]) -> None:
    rows, columns = case["size"]

    def program(device: str) -> Any:
        torch.manual_seed(case["seed"])
        filled = torch.rand(rows, columns) < case["filled"]
        dense = (torch.rand(rows, columns) * 4 * filled).to(case["dtype"]).to(device)
        sparse = getattr(dense, case["layout"])()
        if case["repeats"] and sparse.layout is torch.sparse_coo:
            sparse = sparse + torch.sparse_coo_tensor(sparse._indices().flip(1), sparse._values(), (rows, columns))
        x = torch.rand(3, columns).t() if case["transposed"] else torch.rand(columns, 3)
        x = x.to(case["dtype"]).to(device)
        return [outcome(lambda: parts(sparse)), outcome(lambda: torch.mm(sparse, x)), outcome(sparse.to_dense),
                outcome(lambda: parts(sparse * 2)), outcome(lambda: parts(sparse + sparse)),
                outcome(lambda: parts(sparse.t())), outcome(lambda: parts(sparse.abs())), outcome(sparse.sum),
                outcome(lambda: parts(sparse.to_sparse_csr())), outcome(lambda: parts(sparse.to_sparse()))]

    assert_same(program)
