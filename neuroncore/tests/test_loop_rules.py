"""What a loop of the device refuses."""

import pytest
from instruction_runs import new, refuses, zeros
from samples import data

import neuroncore as nc
from neuroncore import isa as nisa
from neuroncore import language as nl


def broken_by_a_break(x):
    for _ in nl.dynamic_range(4):
        zeros(4, 4)
        break


def other_instructions(x):
    tiles = []

    def body(i):
        tiles.append(zeros(4, 4))
        if len(tiles) == 2:
            nisa.tensor_copy(tiles[0], tiles[1])

    nl.fori_loop(0, 4, body)


def fewer_instructions(x):
    left = [1]

    def body(i):
        zeros(4, 4)
        if left:
            nisa.memset(new(4, 4), left.pop())

    nl.fori_loop(0, 4, body)


def other_tensors(x):
    sizes = [4, 4, 5]
    nl.fori_loop(0, 3, lambda i: nl.zeros((4, sizes.pop()), nl.float32) and None)


def with_inner_loops(*bounds):
    """Each iteration has an inner loop of so many."""

    def kernel(x):
        left = list(bounds)
        nl.fori_loop(0, 2, lambda i: nl.fori_loop(0, left.pop(0), allocates))

    return kernel


def in_hbm(i):
    new(4, 4, buffer=nl.shared_hbm)


def allocates(i):
    zeros(4, 4)


def triangular(x):
    nl.fori_loop(1, 4, lambda i: nl.fori_loop(0, i, lambda j: None))


def in_order(x):
    with nl.no_reorder():
        nl.fori_loop(0, 4, lambda i: None)


def computed(x):
    nl.fori_loop(0, 4, lambda i: x[nl.ds(i * 2, 2), :] and None)


def branched(x):
    for i in nl.dynamic_range(4):
        if i:
            pass


def used_after(x):
    tiles = []
    nl.fori_loop(0, 4, lambda i: tiles.append(zeros(4, 4)))
    nisa.tensor_copy(new(4, 4), tiles[0])


def edge_out(x):
    found = []
    tile = new(4, 4)
    nl.fori_loop(0, 4, lambda i: found.append(nisa.memset(tile, 1.0)))
    nisa.memset(tile, 2.0).depends_on(found[0])


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (broken_by_a_break, "cannot be left by break or return"),
        (other_instructions, "tensor_copy: an iteration of a loop issues what its first did not"),
        (fewer_instructions, "an iteration of a loop issues less than its first"),
        (other_tensors, "an iteration allocates"),
        (with_inner_loops(0, 2), "an iteration has a loop that others have not"),
        (with_inner_loops(3, 2), "an inner loop runs 3 times, then 2"),
        (triangular, "a bound is the variable of an outer loop"),
        (in_order, "nl.fori_loop: a loop of the device cannot be in nl.no_reorder()"),
        (computed, "a register has its value on the device"),
        (branched, "a register has its value on the device"),
        (used_after, "allocated in the body of a loop"),
        (edge_out, "depends_on: .* is in a loop"),
        (lambda x: nl.fori_loop(0, 2, lambda i: 3), "nl.fori_loop: the body returns a value"),
        (lambda x: nl.fori_loop(0, 2.5, lambda i: None), "a bound must be an int or a register"),
        (lambda x: nl.fori_loop(0, 2, 3), "body_fun must be a function"),
        (lambda x: nl.while_loop(3, lambda r: r), "nl.while_loop: init must be a register"),
        (lambda x: nl.fori_loop(0, 2, in_hbm), "a loop's body cannot allocate in shared_hbm"),
        (lambda x: nl.exp(zeros(4, 8)[:, nisa.register_alloc(3)]), "has an index that is not a"),
    ],
)
def test_rules_of_loops(body, text):
    refuses(text, body, data((8, 8)), placed=body not in (used_after, edge_out))


def test_a_loop_that_runs_out_of_its_tensor():
    def kernel(x):
        def body(i):
            nisa.dma_copy(nl.ndarray((8, 8), nl.float32), x[nl.ds(i, 8), :])

        nl.fori_loop(0, 32, body, step=8)

    refuses("a dynamic index runs out of", kernel, data((24, 8)))
    with pytest.raises(nc.NkiValidationError, match="runs out of"):
        nc.simulate(kernel, nc.TensorSpec((24, 8), nl.float32), mode="trace", target="trn2")
