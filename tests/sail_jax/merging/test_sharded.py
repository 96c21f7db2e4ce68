"""Every method on arrays spread over a mesh of eight (emulated) devices, against one device.

The axes of a mesh are explicit by default in JAX: an array's type has its sharding, and operations
that could be sharded in several ways are refused. On automatic axes the compiler decides."""

import os
import subprocess
import sys
import textwrap

import merge_cases
import pytest

PROGRAM = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    import merge_cases

    kind, *names = sys.argv[1:]
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(getattr(AxisType, kind),) * 2)
    specs = {"kernel": P("x", "y"), "other": P("x", "y"), "bias": P("x"), "gain": P(), "steps": P()}
    rng = np.random.default_rng(0)

    def model(like=None):
        draw = lambda *shape: np.float32(rng.normal(size=shape))
        # those of one shape share a loop
        tree = {"kernel": draw(16, 12), "other": draw(16, 12), "bias": draw(8), "gain": draw()}
        if like is not None:
            tree = {name: like[name] + 0.1 * (common[name] + tree[name]) for name in tree}
        return {name: jnp.asarray(x) for name, x in tree.items()} | {"steps": jnp.arange(3)}

    base, common = model(), model()
    models = [model(base) for _ in range(3)]
    grams = [x.T @ x for x in np.float32(rng.normal(size=(3, 20, 16)))]
    spread = lambda name, x: jax.device_put(x, NamedSharding(mesh, specs[name]))
    place = lambda tree: {name: spread(name, x) for name, x in tree.items()}
    for name in names:
        options = {"wudi": {"steps": 5}, "regmean": {"grams": [{"kernel": gram} for gram in grams]}}
        method = merge_cases.make(name, **options.get(name, {}))
        some = merge_cases.as_many(method, models)
        merge = jax.jit(method)
        want = merge(some, base)
        got = merge([place(m) for m in some], place(base))
        assert len(place(base)["kernel"].sharding.device_set) == 8
        for leaf in base:
            apart = np.abs(np.asarray(got[leaf], float) - np.asarray(want[leaf], float)).max()
            # sums over devices are added in another order: 16 ulp of values below 4
            assert apart <= 16 * 2.0**-23 * 4, (name, leaf, apart)
        moved = np.abs(np.asarray(want["kernel"] - base["kernel"])).max()
        assert moved > 0.003, (name, moved)
        print(name)
"""


IN_SHARDS = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    import merge_cases

    kind, *names = sys.argv[1:]
    mesh = jax.make_mesh((8,), ("x",), axis_types=(getattr(AxisType, kind),))
    rng = np.random.default_rng(0)
    shapes = {"kernel": (16, 12), "other": (16, 12), "bias": (8,), "long": (8, 1 << 14)}
    model = lambda: {n: jnp.asarray(rng.normal(size=v), jnp.float32) for n, v in shapes.items()}
    base, models = model(), [model() for _ in range(3)]
    # with explicit axes, shard_map requires arrays that are sharded already
    place = lambda tree: jax.device_put(tree, NamedSharding(mesh, P("x")))
    shard = lambda tree, k: {name: np.split(x, 8)[k] for name, x in tree.items()}
    for name in names:
        method = merge_cases.make(name, **{"wudi": {"steps": 5}}.get(name, {}))
        some = merge_cases.as_many(method, models)
        split = jax.shard_map(method, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"))
        got, alone = jax.jit(split)(place(some), place(base)), jax.jit(method)
        for k in (0, 7):
            want = alone([shard(m, k) for m in some], shard(base, k))
            for leaf, x in shard(jax.device_get(got), k).items():
                apart = np.abs(np.asarray(x) - np.asarray(want[leaf])).max()
                assert apart <= 16 * 2.0**-23 * 4, (name, leaf, apart)
        print(name)
"""


OTHERS = [name for name in merge_cases.NAMES if name not in merge_cases.KINDS]
FACTORED = ("opcm", "regmean")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        pytest.param(
            "Explicit", (*merge_cases.KINDS, *FACTORED), marks=pytest.mark.slow, id="some"
        ),
        *(
            pytest.param("Explicit", OTHERS[k::4], marks=pytest.mark.soak, id=f"others {k}")
            for k in range(4)
        ),
        *(
            pytest.param("Auto", names, marks=pytest.mark.soak, id=f"automatic {names[0]}")
            for names in (merge_cases.KINDS, *(OTHERS[k::4] for k in range(4)))
        ),
    ],
)
def test_methods_on_a_mesh(kind, names):
    check(PROGRAM, kind, names)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        pytest.param("Auto", ("ties", "della", "tsv_m"), marks=pytest.mark.slow, id="some"),
        *(
            pytest.param(kind, merge_cases.NAMES[k::4], marks=pytest.mark.soak, id=f"{kind} {k}")
            for kind in ("Auto", "Explicit")
            for k in range(4)
        ),
    ],
)
def test_under_shard_map_each_device_merges_its_own_shard(kind, names):
    check(IN_SHARDS, kind, names)


def check(program, kind, names):
    flags = "--xla_force_host_platform_device_count=8"
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), kind, *names],
        env=os.environ
        | {
            "XLA_FLAGS": flags,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.path.dirname(merge_cases.__file__),
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.split() == list(names)
