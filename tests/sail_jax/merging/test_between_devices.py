"""Data that merges of sharded leaves send between devices, from the compiled programs:
sums, and only the necessary parts of split rows and of matrices. The results are tested in
`test_sharded`."""

import pytest

from experiments.bench import sharding
from experiments.bench._sharding_process import PLACEMENTS, Sent, collectives
from sail_jax import methods

ALL = "+".join(PLACEMENTS)
SLOW = (
    "linear",
    "ram",
    "dare_ties",
    "slerp",
    "sce",
    "arcee_fusion",
    "della",
    "ties",
    "iso_c",
    "wudi",
)
"""Of each kind: short and long programs, random, inner products, sums, rows, matrices, loops."""


@pytest.mark.parametrize(
    ("axes", "names"),
    [
        pytest.param("Auto", SLOW, marks=pytest.mark.slow, id="some"),
        pytest.param("Auto", tuple(methods.METHODS), marks=pytest.mark.soak, id="all"),
        pytest.param("Explicit", tuple(methods.METHODS), marks=pytest.mark.soak, id="explicit"),
    ],
)
def test_no_leaf_is_gathered_that_is_not_needed_whole(axes, names):
    found = {one["method"]: one for one in sharding.compiled(axes, [ALL], names)}
    assert set(found) == set(names)
    assert all(found[name]["sent"] for name in ("slerp", "sce", "wudi"))  # what is sent is found
    beyond = {name: why for name, one in found.items() if (why := sharding.excess(one))}
    assert not beyond


HLO = """
HloModule jit_f, entry_computation_layout={(f32[4]{0})->f32[8]{0}}

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %all-reduce.1 = (f32[], u16[2,3]{1,0}) all-reduce(%x, %y), to_apply=%sum
}

%cond (p: (s32[], f32[4])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[4]) -> f32[8] {
  %while = (s32[], f32[4]{0}) while(%t), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %all-gather.2 = f32[8]{0} all-gather(%q), dimensions={0}
  ROOT %conditional = f32[8]{0} conditional(%c, %t, %t), branch_computations={%body, %cond}
}
"""


def test_collectives_in_loops_count_as_often_as_they_turn():
    found = collectives(HLO)
    summed, gathered = Sent("all-reduce", ("f32[]", "u16[2,3]")), Sent("all-gather", ("f32[8]",))
    assert found == {summed: 5 + 1, gathered: 1}
    assert (summed.bytes, gathered.bytes) == (4 + 12, 32)
