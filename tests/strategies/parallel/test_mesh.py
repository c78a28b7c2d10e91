"""The mesh: text to axes, ranks to coordinates and back, groups that cover the world, and one line for each mistake."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.parallel.mesh import Mesh
from strategies.parallel.meshes import AXES
from traces.errors import ConfigError


def test_ranks_are_numbered_as_torch_does() -> None:
    mesh = Mesh.parse("pp=2,dp=2,tp=4")
    table = np.arange(16).reshape(2, 2, 4)
    assert mesh.world == 16
    for rank in range(16):
        place = mesh.coordinates(rank)
        assert table[place["pp"], place["dp"], place["tp"]] == rank
    for dimension, axis in enumerate(("pp", "dp", "tp")):
        along = np.moveaxis(table, dimension, -1).reshape(-1, table.shape[dimension]).tolist()
        assert mesh.groups(axis) == tuple(map(tuple, along))
    assert mesh.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15))


def test_sizes() -> None:
    mesh = Mesh.of({"dp": 3, "tp": 2})
    assert (str(mesh), mesh.size("dp"), mesh.size("tp"), mesh.size("pp")) == ("dp=3,tp=2", 3, 2, 1)
    mesh.check_world(6)
    with pytest.raises(ConfigError, match=r"^mesh: dp=3,tp=2 has 6 ranks, but world is 8$"):
        mesh.check_world(8)
    with pytest.raises(ConfigError, match=r"^mesh: rank 6 is outside dp=3,tp=2, whose last rank is 5$"):
        mesh.coordinates(6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no axis"),
        (" , ", "names no axis"),
        ("dp", "'dp' in 'dp' is not of the form axis=size"),
        ("=2", "is not of the form axis=size"),
        ("dp=", "dp=: the size of an axis is a whole number from 1"),
        ("dp=0", "dp=0: the size of an axis is a whole number from 1"),
        ("dp=-2", "dp=-2: the size"),
        ("dp=2.5", "dp=2.5: the size"),
        ("dp=\u00b2", "the size of an axis"),
        ("dp=2,dp=2", "names the axis dp twice"),
        ("fsdp=2", "there is no axis 'fsdp'; did you mean fsdp"),
        ("context=2", "there is no axis 'context'; known: pp, dp"),
        ("dp=999999999", "the most is"),
    ],
)
def test_mistakes_get_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Mesh.parse(text, AXES)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truth_value_is_no_size() -> None:
    with pytest.raises(ConfigError, match="whole number from 1"):
        Mesh.of({"dp": True})


MESHES = st.lists(st.tuples(st.sampled_from(AXES), st.integers(1, 4)), max_size=4, unique_by=lambda axis: axis[0])


@given(MESHES)
def test_no_two_ranks_have_one_place(axes: list[tuple[str, int]]) -> None:
    mesh = Mesh.of(dict(axes))
    places = {tuple(mesh.coordinates(rank).items()) for rank in range(mesh.world)}
    assert len(places) == mesh.world
    assert not axes or Mesh.parse(str(mesh)) == mesh


@given(MESHES, st.sampled_from(AXES))
def test_groups_cover_the_world_once(axes: list[tuple[str, int]], axis: str) -> None:
    mesh = Mesh.of(dict(axes))
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
    for group in groups:
        places = [mesh.coordinates(rank) for rank in group]
        assert [place.pop(axis, 0) for place in places] == list(range(mesh.size(axis)))
        assert all(place == places[0] for place in places), "they differ along the axis alone"
