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
    flags = "--xla_force_host_platform_device_count=8"
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), kind, *names],
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
