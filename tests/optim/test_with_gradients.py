"""Which parameters of param groups have gradients. Trusted: torch's parameters. Faked: engines."""

import torch
from torch import nn

from infinity.autograd.slice_watch import SliceWatch
from infinity.optim.with_gradients import WithGradients


def parameters(count):
    return [nn.Parameter(torch.zeros(1)) for _ in range(count)]


def give(watch, *some):
    for one in some:
        one.grad = torch.ones(1)
        watch.assigned(one, "grad")


def places(found, groups):
    """Return the group and the place in it of each parameter that was found."""
    numbers = {
        id(one): (number, at) for number, group in enumerate(groups) for at, one in enumerate(group["params"])
    }
    assert all(group is groups[numbers[id(one)][0]] for group, one in found)
    return [numbers[id(one)] for _, one in found]


def test_slices_and_others_come_in_the_order_of_the_groups():
    first, second = parameters(4), parameters(3)
    groups, watch, finds = [{"params": first}, {"params": second}], SliceWatch(), WithGradients()
    watch.follow([first[1], first[2], second[0]])
    assert finds.of(groups, [watch]) == []
    give(watch, second[2], second[0], first[3], first[2], first[0])
    assert places(finds.of(groups, [watch]), groups) == [(0, 0), (0, 2), (0, 3), (1, 0), (1, 2)]
    first[2].grad = first[3].grad = None
    assert places(finds.of(groups, [watch]), groups) == [(0, 0), (1, 0), (1, 2)]


def test_slices_of_other_optimizers_are_left_to_these():
    mine, others, watch = parameters(2), parameters(2), SliceWatch()
    watch.follow([*mine, *others])
    give(watch, mine[1], others[0])
    groups = [{"params": mine}]
    for _ in range(2):
        assert places(WithGradients().of(groups, [watch]), groups) == [(0, 1)]


def test_groups_parameters_and_slices_that_come_later_are_seen():
    first, watch, finds = parameters(3), SliceWatch(), WithGradients()
    groups = [{"params": first[:2]}]
    watch.follow(first[:1])
    give(watch, *first)
    assert places(finds.of(groups, [watch]), groups) == [(0, 0), (0, 1)]
    groups[0]["params"].append(first[2])
    assert places(finds.of(groups, [watch]), groups) == [(0, 0), (0, 1), (0, 2)]
    watch.follow(first[1:])
    groups.append({"params": parameters(1)})
    give(watch, groups[1]["params"][0])
    assert places(finds.of(groups, [watch]), groups) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    groups[0] = dict(groups[0])  # as load_state_dict makes new groups of the same lists
    assert places(finds.of(groups, [watch]), groups) == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_members_that_change_places_or_groups_are_found_where_they_are_now():
    first, second = parameters(3), parameters(3)
    groups, watch, finds = [{"params": first}, {"params": second}], SliceWatch(), WithGradients()
    watch.follow([first[0], second[0], second[1]])
    give(watch, *first, *second)
    assert places(finds.of(groups, [watch]), groups) == [(number, at) for number in (0, 1) for at in range(3)]
    sorts = finds.sorts
    finds.of(groups, [watch])
    assert finds.sorts == sorts
    first[0], second[0] = second[0], first[0]  # slices
    first[2], second[2] = second[2], first[2]
    second[0], second[1] = second[1], second[0]
    assert places(finds.of(groups, [watch]), groups) == [(number, at) for number in (0, 1) for at in range(3)]
    assert finds.sorts == sorts + 1


def test_a_slice_without_a_gradient_that_changes_its_group_is_noticed_too():
    first, second, watch, finds = parameters(2), parameters(2), SliceWatch(), WithGradients()
    watch.follow([*first, *second])
    groups = [{"params": first}, {"params": second}]
    assert finds.of(groups, [watch]) == []
    sorts = finds.sorts
    first[1], second[1] = second[1], first[1]
    assert finds.of(groups, [watch]) == []
    assert finds.sorts == sorts + 1


def test_what_may_have_a_gradient_holds_all_that_have_one_and_no_slice_that_was_dropped():
    mine, others, watch, finds = parameters(4), parameters(1), SliceWatch(), WithGradients()
    watch.follow([*mine[1:], *others])
    groups = [{"params": mine}]
    give(watch, mine[0], mine[2], others[0])
    finds.of(groups, [watch])
    assert list(map(id, finds.that_may_have(groups, [watch]))) == [id(mine[0]), id(mine[2])]
    for one in mine:
        one.grad = None
    finds.dropped([watch])
    assert list(map(id, finds.that_may_have(groups, [watch]))) == [id(mine[0])]
    assert watch.with_gradients().tolist() == [3], "another optimizer's"


def test_slices_that_were_found_are_known_by_the_numbers_of_each_watch():
    first, second, finds = parameters(3), parameters(2), WithGradients()
    groups, watches = [{"params": [*second, *first]}], [SliceWatch(), SliceWatch()]
    watches[0].follow(first)
    watches[1].follow(second)
    give(watches[0], first[2], first[0])
    give(watches[1], second[1])
    assert places(finds.of(groups, watches), groups) == [(0, 1), (0, 2), (0, 4)]
    assert [sorted(one.tolist()) for one in finds.slices] == [[0, 2], [1]]


def test_no_parameter_is_asked_whether_members_are_still_the_same():
    class Asked(nn.Parameter):
        def __eq__(self, other):
            raise AssertionError("asked")

        __hash__ = nn.Parameter.__hash__

    params, watch, finds = [Asked(torch.zeros(1)) for _ in range(3)], SliceWatch(), WithGradients()
    groups = [{"params": params}]
    for _ in range(2):
        assert finds.of(groups, [watch]) == []
    assert finds.sorts == 1


def test_slices_that_are_all_members_one_behind_the_other_come_as_others_do():
    before, members, watch, finds = parameters(1), parameters(4), SliceWatch(), WithGradients()
    watch.follow(members)
    groups = [{"params": before}, {"params": members}]
    watch.with_gradients()
    give(watch, members[3], before[0], members[1])
    assert places(finds.of(groups, [watch]), groups) == [(0, 0), (1, 1), (1, 3)]
    groups[1]["params"][:2] = reversed(members[:2])
    assert places(finds.of(groups, [watch]), groups) == [(0, 0), (1, 0), (1, 3)]
    groups[1]["params"].pop()
    assert places(finds.of(groups, [watch]), groups) == [(0, 0), (1, 0)]
