"""Runs of trainers on four devices: `save FOLDER` and, of their averages, `restore FOLDER`.

The trees are those of a Flax TrainState, of an NNX module with dropout, and of MaxText and Tunix.
"""

import json
import sys
from pathlib import Path

NAMES = ("linen", "maxtext", "nnx", "tunix")
STEPS = (10, 20, 40)
WEIGHTS = (0.1, 0.2, 0.7)
CUSTOM = {"scan_layers": True}


def placed(tree, mesh):
    """Matrices are sharded along their last or first axis, and everything else is replicated."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    def place(x):
        shape = getattr(x, "shape", ())
        spec = PartitionSpec()
        if len(shape) >= 2 and shape[-1] % 4 == 0:
            spec = PartitionSpec(*[None] * (len(shape) - 1), "x")
        elif len(shape) == 2 and shape[0] % 4 == 0:
            spec = PartitionSpec("x")
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


def values(seed, shapes):
    """Normal numbers in the shapes and dtypes of a tree; keys and counts follow the seed."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(seed)

    def draw(x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(rng.normal(size=x.shape), x.dtype)
        return jnp.full(x.shape, seed, x.dtype)

    return jax.tree.map(draw, shapes)


def states():
    """Returns the abstract state of each kind of run, by name; the items of a step for Tunix."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from flax.training.train_state import TrainState

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(0.1)))
    params = {"dense": {"kernel": jnp.zeros((6, 8)), "bias": jnp.zeros(8, jnp.bfloat16)}}
    linen = TrainState.create(apply_fn=None, params=params, tx=tx).replace(step=jnp.int32(0))
    scanned = {"decoder": {"layers": {"mlp": {"wi": jnp.zeros((4, 3, 8))}}, "norm": jnp.zeros(4)}}
    maxtext = {
        "step": jnp.int32(0),
        "params": {"params": scanned},
        "opt_state": tx.init({"params": scanned}),
    }

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)])
            self.drop = nnx.Dropout(0.1, rngs=rngs)

    net = nnx.state(Net(nnx.Rngs(0)))
    # as trainers do: orbax stores no keys, and what is below them are integers
    keys = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    tunix = {"layers": {"0": {"attn": {"w": jnp.zeros((8, 4), jnp.bfloat16)}}}}
    trees = {
        "linen": {"default": linen},
        "maxtext": {"items": maxtext},
        "nnx": {"default": jax.tree.map(keys, net)},
        "tunix": {"model_params": tunix, "optimizer_state": tx.init(tunix)},
    }
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.asarray(x).dtype), trees)


def manager(folder, items, **options):
    """Makes the manager of a run whose steps have these items."""
    import orbax.checkpoint as ocp

    return ocp.CheckpointManager(folder, item_names=tuple(items), **options)


def save(folder):
    """Writes three steps of each run."""
    import jax
    import orbax.checkpoint as ocp

    mesh = jax.make_mesh((4,), ("x",))
    # together they cover all ways in which orbax stores arrays
    ways = {
        "linen": {},
        "nnx": {"use_ocdbt": False},
        "maxtext": {"use_zarr3": True},
        "tunix": {"use_ocdbt": True},
    }
    for name, items in states().items():
        handlers = {item: ocp.PyTreeCheckpointHandler(**ways[name]) for item in items}
        with ocp.CheckpointManager(
            folder / name, item_names=tuple(items), item_handlers=handlers
        ) as m:
            for step in STEPS:
                trees = {item: placed(values(step, x), mesh) for item, x in items.items()}
                saves = {item: ocp.args.PyTreeSave(tree) for item, tree in trees.items()}
                m.save(
                    step, args=ocp.args.Composite(**saves), custom_metadata={"scan_layers": True}
                )


def restore(folder):
    """Restores each average as a trainer does; prints the names of those that are right.

    They are next to the runs, with their default names and the weights `WEIGHTS`.
    """
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    mesh, right = jax.make_mesh((4,), ("x",)), []
    averaged = {
        "linen": lambda path: path.startswith("params/"),
        "maxtext": lambda path: path.startswith("params/params/"),
        "nnx": lambda path: "rngs" not in path,
        "tunix": lambda path: True,
    }
    for name, items in states().items():
        drawn = {item: [values(step, x) for step in STEPS] for item, x in items.items()}
        like = {item: placed(steps[-1], mesh) for item, steps in drawn.items()}
        args = {
            item: ocp.args.PyTreeRestore(
                tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree)
            )
            for item, tree in like.items()
        }
        with manager(folder / f"{name}-average", items) as m:
            assert m.all_steps() == [STEPS[-1]]
            got = m.restore(STEPS[-1], args=ocp.args.Composite(**args))
            custom = m.metadata(STEPS[-1]).custom_metadata
        assert custom == CUSTOM, custom
        for item, tree in like.items():
            assert jax.tree.structure(got[item]) == jax.tree.structure(tree)
            leaves = zip(
                jax.tree.leaves_with_path(got[item]), jax.tree.leaves(tree),
                *map(jax.tree.leaves, drawn[item]), strict=True,
            )  # fmt: skip
            moved = 0
            for (keys, x), place, *each in leaves:
                path = jax.tree_util.keystr(keys, simple=True, separator="/")
                assert x.sharding == place.sharding, (path, x.sharding)
                assert x.dtype == place.dtype
                floating = jax.numpy.issubdtype(x.dtype, jax.numpy.floating)
                if floating and averaged[name](path) and item != "optimizer_state":
                    want = sum(
                        w * np.asarray(y, np.float64) for w, y in zip(WEIGHTS, each, strict=False)
                    )
                    # the sum of three numbers below 4 in float32, then one rounding
                    eps = float(jax.numpy.finfo(x.dtype).eps)
                    error = np.abs(np.asarray(x, np.float64) - want).max()
                    assert error <= 4 * (eps / 2 + 6 * 2.0**-24), (path, error)
                    moved += 1
                else:
                    assert np.array_equal(x, each[-1]), path
            assert moved or item == "optimizer_state", (name, item)
        right.append(name)
    print(json.dumps(sorted(right)))


if __name__ == "__main__":
    {"save": save, "restore": restore}[sys.argv[1]](Path(sys.argv[2]))
