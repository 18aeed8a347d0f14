"""The guard notices every kind of change that is documented."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.memoryless import KINDS
from tvmify.runtime import Guard

WEIGHTS, STRUCTURE = 1, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("offset", torch.zeros(4))
        self.scale = 2.0
        self.table = torch.ones(3)


def guard(module: nn.Module) -> Guard:
    slots: list[tuple[dict[Any, Any], Any, Any]] = []
    sizes: list[tuple[dict[Any, Any], int]] = []
    for part in module.modules():
        for members in (part.__dict__, part._parameters, part._buffers, part._modules):
            sizes.append((members, len(members)))
            slots += [(members, name, value) for name, value in members.items()]
    tensors = [value for _, _, value in slots if isinstance(value, torch.Tensor)]
    return Guard(slots, sizes, tensors)


def _write(net: Any) -> None:
    with torch.no_grad():
        net.layer.weight.add_(1)


def _step(net: Any) -> None:
    net.layer(torch.ones(4)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()


def _set_data(net: Any) -> None:
    net.layer.weight.data = net.layer.weight.data.clone()


def _set_data_twice(net: Any) -> None:
    # The second tensor may get the address of the first.
    for _ in range(2):
        net.layer.weight.data = torch.randn(4, 4)


def _transpose_data(net: Any) -> None:
    net.layer.weight.data = net.layer.weight.data.T


def _write_to_data(net: Any) -> None:
    net.layer.weight.data.normal_()


def _write_through_numpy(net: Any) -> None:
    net.layer.bias.detach().numpy()[:] = 3.0


def _set_item(net: Any) -> None:
    net.offset[1] = 3.0


def _write_through_view(net: Any) -> None:
    net.table[1:].fill_(5.0)


def _load(net: Any) -> None:
    net.load_state_dict(Net().state_dict())


def _freeze(net: Any) -> None:
    net.layer.bias.requires_grad_(False)


def _to_double(net: Any) -> None:
    net.double()


def _resize(net: Any) -> None:
    net.offset.resize_(8)


def _swap(net: Any) -> None:
    net.layer.weight = nn.Parameter(net.layer.weight.detach())


def _set_buffer(net: Any) -> None:
    net.offset = torch.zeros(4)


def _set_attribute(net: Any) -> None:
    net.scale = 3.0


def _add_attribute(net: Any) -> None:
    net.extra = 1


def _delete_attribute(net: Any) -> None:
    del net.scale


def _replace_attribute(net: Any) -> None:
    # As many attributes as before, but not the same.
    del net.scale
    net.other = 2.0


def _set_module(net: Any) -> None:
    net.layer = nn.Linear(4, 4)


def _add_module(net: Any) -> None:
    net.layer.add_module("child", nn.ReLU())


def _delete_parameter(net: Any) -> None:
    net.layer.bias = None


def _train(net: Any) -> None:
    net.layer.train(not net.layer.training)


CHANGES = {
    WEIGHTS: [
        _write,
        _step,
        _set_data,
        _set_data_twice,
        _transpose_data,
        _write_to_data,
        _write_through_numpy,
        _set_item,
        _write_through_view,
        _load,
        _freeze,
    ],
    STRUCTURE: [
        _to_double,
        _resize,
        _swap,
        _set_buffer,
        _set_attribute,
        _add_attribute,
        _delete_attribute,
        _replace_attribute,
        _set_module,
        _add_module,
        _delete_parameter,
        _train,
    ],
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [(change, expected) for expected, changes in CHANGES.items() for change in changes],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_change_is_detected(change, expected):
    net = Net()
    watching = guard(net)
    assert watching.changed() == 0
    change(net)
    assert watching.changed() == expected
    assert watching.changed() == expected, "asking must not make it forget"


def test_repeated_and_undone_changes_are_detected():
    net = Net()
    watching = guard(net)
    for _ in range(3):
        assert watching.changed() == 0
    scale, net.scale = net.scale, 3.0
    assert watching.changed() == STRUCTURE
    net.scale = scale
    assert watching.changed() == 0
    del net.scale
    assert watching.changed() == STRUCTURE


def test_calling_a_module_is_not_a_change():
    net = Net().eval()
    watching = guard(net)
    net.layer(torch.randn(3, 4)).sum().backward()
    net.state_dict()
    net.zero_grad()
    assert repr(net) and watching.changed() == 0


def test_structure_outweighs_weights():
    net = Net()
    watching = guard(net)
    _write(net)
    _set_attribute(net)
    assert watching.changed() == STRUCTURE


def test_replaced_memory_is_freed_while_the_guard_lives():
    tensor = torch.zeros(1000)
    storage = weakref.ref(tensor.untyped_storage())
    watching = Guard([], [], [tensor])
    tensor.data = torch.zeros(1000)
    gc.collect()
    assert storage() is None and watching.changed() == WEIGHTS


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_odd_tensors_can_be_watched():
    with torch.inference_mode():
        inference = torch.zeros(3)
    parts = [torch.zeros(2), torch.zeros(3)]
    tensors = [
        inference,
        torch.zeros(0),
        torch.zeros(()),
        torch.zeros(2, device="meta"),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, 2).to_mkldnn(),
        torch.nested.nested_tensor(parts),
        torch.nested.nested_tensor(parts, layout=torch.jagged),
    ]
    watching = Guard([], [], tensors)
    assert watching.changed() == 0
    with torch.inference_mode():
        inference.add_(1)  # PyTorch does not count it, but the values tell
    assert watching.changed() == WEIGHTS


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_without_memory_can_be_watched(kind):
    tensor = KINDS[kind](torch.randn(8))
    for counts_writes in (True, False):
        watching = Guard([], [], *([[tensor], []] if counts_writes else [[], [tensor]]))
        assert watching.changed() == 0


def test_freed_and_reallocated_memory_is_a_change():
    tensor = torch.ones(8)
    storage = tensor.untyped_storage()
    for size in (0, 32, 16, 4096):
        watching = Guard([], [], [tensor])
        assert watching.changed() == 0
        storage.resize_(size)
        assert watching.changed() == WEIGHTS


@pytest.mark.parametrize("kind", KINDS)
def test_losing_its_memory_is_a_change(kind):
    tensor, other = torch.ones(8), KINDS[kind](torch.ones(8))
    watching = Guard([], [], [tensor])
    try:
        torch.utils.swap_tensors(tensor, other)
    except (RuntimeError, TypeError, AttributeError):
        pytest.skip("PyTorch does not swap it")
    assert watching.changed() != 0


def test_a_write_past_versions_shows_in_transposed_weights():
    tensor = torch.zeros(4, 8).T
    watching = Guard([], [], [tensor])
    tensor.data.fill_(1)
    assert watching.changed() == WEIGHTS


def test_an_error_of_a_dicts_key_is_not_lost():
    class Odd:
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            raise ValueError("not comparable")

    members: dict[Any, Any] = {Odd(): 1}
    with pytest.raises(ValueError, match="not comparable"):
        Guard([(members, Odd(), 1)], [], []).changed()


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ([], []),
        ((), [], []),
        ([1], [], []),
        ([({}, "a")], [], []),
        ([([], "a", 1)], [], []),
        ([], [({}, "a")], []),
        ([], [], [1]),
    ],
)
def test_wrong_arguments_are_a_type_error(arguments):
    with pytest.raises(TypeError):
        Guard(*arguments)


def test_every_write_of_a_loop_is_detected() -> None:
    # CPython writes an attribute in another way once the line has run some times.
    net = Net()
    for number in range(200):
        watched = guard(net)
        assert [watched.changed() for _ in range(3)] == [0, 0, 0]
        net.scale = float(number)
        assert watched.changed() == STRUCTURE


def test_guards_of_one_module_notice_by_themselves() -> None:
    net = Net()
    first, second = guard(net), guard(net)
    assert first.changed() == second.changed() == 0
    del first
    net.scale = 3.0
    assert second.changed() == STRUCTURE
    third = guard(net)
    assert third.changed() == third.changed() == 0
    del second
    net.extra = 1
    assert third.changed() == STRUCTURE


def test_module_can_be_guarded_again() -> None:
    net = Net()
    for _ in range(3):
        watched = guard(net)
        assert watched.changed() == 0
        del watched
        net.scale += 1.0
    assert guard(net).changed() == 0


def test_guard_cycle_is_collected():
    net = Net()
    net.__dict__["guard"] = guard(net)
    alive = weakref.ref(net)
    del net
    gc.collect()
    assert alive() is None


def test_guards_do_not_leak():
    net = Net()
    parameter = net.layer.weight
    before = sys.getrefcount(parameter), sys.getrefcount(net.__dict__)
    for _ in range(100):
        watching = guard(net)
        watching.changed()
        with pytest.raises(TypeError):
            Guard([(net.__dict__, "a", parameter), (1, 2)], [], [parameter])  # type: ignore[list-item]
    del watching
    gc.collect()
    assert (sys.getrefcount(parameter), sys.getrefcount(net.__dict__)) == before


@pytest.mark.parametrize(
    "edit",
    [
        lambda names, _: names.append("c"),
        lambda names, _: names.reverse(),
        lambda names, _: names.__setitem__(0, "z"),
        lambda names, _: names.clear(),
        lambda _, numbers: numbers.add(3),
        lambda _, numbers: numbers.remove(1),
        lambda _, numbers: (numbers.remove(1), numbers.add(5)),
    ],
)
def test_edits_of_lists_and_sets_are_noticed(edit: Any) -> None:
    names, numbers = ["a", "b"], {1, 2}
    watching = Guard([], [], [], collections=[(x, tuple(x)) for x in (names, numbers)])
    assert watching.changed() == 0
    edit(names, numbers)
    assert watching.changed() == STRUCTURE


def test_a_collection_is_a_list_or_a_set() -> None:
    with pytest.raises(TypeError, match="lists and sets, not dict"):
        Guard([], [], [], collections=[({}, ())])  # type: ignore[list-item]
