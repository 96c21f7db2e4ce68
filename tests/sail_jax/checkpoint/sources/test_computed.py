"""Tensors computed when they are read: the same bits as in memory, in bounded memory."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fake_checkpoints import Fake
from small_checkpoints import CONFIG, shapes, tensors

from sail_jax import change_basis, growth, spec
from sail_jax.checkpoint.executor import MergeError, execute, limits, memory
from sail_jax.checkpoint.formats.files import CheckpointError
from sail_jax.checkpoint.sources.computed import Computed, rebased
from sail_jax.checkpoint.sources.grown import grown
from sail_jax.checkpoint.sources.programs import Programs
from sail_jax.growth import networks
from sail_jax.merging.tensors import Tensor


def pieces(tensor, count=3):
    """All entries of a tensor, read in pieces of unequal length."""
    out = np.empty(math.prod(tensor.shape), tensor.dtype)
    cuts = [0, *(out.size * (k + 1) ** 2 // count**2 for k in range(count - 1)), out.size]
    for start, stop in itertools.pairwise(cuts):
        tensor.read(out[start:stop], start)
    return out.reshape(tensor.shape)


GROWTHS = {
    "lemon, any size": ({"hidden_size": 20, "intermediate_size": 30, "head_dim": 4}, {}),
    "fpi, deeper": ({"width": 2, "depth": 2}, {}),
    "hypercloning": ({"width": 2}, {"snr_db": 20.0}),
    "sail_random": ({"width": 2}, {}),
    "aki": ({"width": 2}, {}),
    "mix": ({"depth": 2}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GROWTHS)
def test_grown_tensors_have_the_bits_of_growth_in_memory(name, tmp_path):
    to, of_method = GROWTHS[name]
    method, arrays = name.split(",")[0], tensors()
    made = networks.plan(arrays, CONFIG, to, method, key=jax.random.key(3), **of_method)
    view = grown(Fake(tmp_path, arrays), made)
    assert list(view.tensors) == list(made.leaves)
    # what draws compiles long: a matrix, a table and a gain
    some = [f"model.layers.1.{x}.weight" for x in ("mlp.up_proj", "input_layernorm")]
    some = view.tensors if method in ("lemon", "fpi") else [*some, "model.embed_tokens.weight"]
    for path in some:
        want, tensor = made.leaf(path, arrays), view.tensors[path]
        assert isinstance(tensor, Tensor)
        assert tensor.dtype == want.dtype == ml_dtypes.bfloat16
        assert tensor.shape == want.shape
        assert pieces(tensor).tobytes() == np.asarray(want).tobytes(), path


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_every_dtype_stays(dtype, tmp_path):
    arrays = tensors(dtype=dtype)
    with jax.enable_x64(dtype == np.float64):
        want, made = networks.grow(arrays, CONFIG, {"width": 2}, "lemon")
    view = grown(Fake(tmp_path, arrays), made)
    for path, tensor in view.tensors.items():
        assert tensor.dtype == dtype
        assert pieces(tensor).tobytes() == np.asarray(want[path]).tobytes(), path


def view_of(tmp_path, layers=2, method="lemon", of_method=MappingProxyType({}), **options):
    arrays = tensors(layers=layers)
    config = CONFIG | {"num_hidden_layers": layers}
    made = networks.plan(arrays, config, {"width": 2}, method, key=jax.random.key(0), **of_method)
    source = Fake(tmp_path, arrays)
    return source, grown(source, made, **options)


def compiled(view):
    """Counts the programs of the tensors of a view."""
    return len(next(iter(view.tensors.values()))._programs._compiled)


@pytest.mark.slow
def test_a_visit_forms_a_tensor_once_and_then_lets_it_go(tmp_path):
    source, view = view_of(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    stored, tensor = source.tensors[name], view.tensors[name]
    for visit in (1, 2):
        pieces(tensor, 7)
        assert stored.read_entries == visit * stored.array.size
        assert tensor._formed is None


def test_threads_read_the_same(tmp_path):
    _, view = view_of(tmp_path)
    tensor = view.tensors["model.layers.0.mlp.down_proj.weight"]
    want = pieces(tensor).tobytes()
    with ThreadPoolExecutor(6) as threads:
        found = threads.map(lambda k: pieces(tensor, k).tobytes(), range(2, 8))
    assert [*found] == [want] * 6


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lemon", "hypercloning"])
def test_compilation_does_not_grow_with_the_layers(method, tmp_path):
    """This includes noise on copies, for which every leaf uses a separate key."""
    of_method, counts = {"snr_db": 20.0} if method == "hypercloning" else {}, []
    for layers in (2, 4, 12):
        _, view = view_of(tmp_path, layers, method, of_method)
        for tensor in view.tensors.values():
            assert tensor.needs > 0
        counts.append(compiled(view))
    assert counts[0] == counts[1] == counts[2] < len(shapes(2))


def test_one_program_moves_all_layers_by_maps_of_their_own(tmp_path):
    """A stack of blocks, whose spaces have different names and maps in each."""
    rng, counts = np.random.default_rng(1), []
    for layers in (2, 5):
        arrays = {f"{i}/in": rng.normal(size=(3, 4)).astype("f4") for i in range(layers)}
        arrays |= {f"{i}/out": rng.normal(size=(4, 3)).astype("f4") for i in range(layers)}
        rules = {"{i}/in": "x* h{i}", "{i}/out": "h{i}* x"}
        s = spec(arrays, rules, spaces={"h{i}": "relu", "x": "outer"})
        maps = {f"h{i}": growth.permute(rng.permutation(4)) for i in range(layers)}
        view = rebased(Fake(tmp_path, arrays), s, maps)
        for path, want in change_basis(arrays, s, maps).items():
            assert pieces(view.tensors[path]).tobytes() == np.asarray(want).tobytes()
        counts.append(compiled(view))
    assert counts == [2, 2]


def test_programs_are_those_of_equal_functions():
    programs, x = Programs(), jax.ShapeDtypeStruct((3,), np.float32)
    for function in (jnp.add, jnp.subtract):
        for operand in (jnp.arange(3.0), jnp.ones(3)):
            found = programs(function, operand, [x])(operand, jnp.full(3, 5.0))
            assert found.tolist() == function(operand, 5.0).tolist()
    assert len(programs._compiled) == 2


@pytest.mark.slow
def test_memory_counts_what_is_held_and_the_limit_is_kept(tmp_path):
    _, view = view_of(tmp_path)
    for tensor, work in zip(view.tensors.values(), view.works(), strict=True):
        held = math.prod(tensor.shape) * 2 + sum(part.array.nbytes for part in tensor._parts)
        assert tensor.needs >= held
        assert memory(work) >= tensor.needs
        # no more than the parts, the outcome, and both in float32 beside them
        assert tensor.needs <= 3 * held
    with pytest.raises(MergeError, match=r"max_memory: .* needs"):
        limits(view.works(), 1 << 20)


class Sink(dict):
    finished = frozenset()

    def write(self, name, array, start=0):
        self.setdefault(name, {})[start] = array.copy()

    def done(self, name):
        pass


def test_the_executor_needs_no_special_case(tmp_path):
    _, view = view_of(tmp_path)
    sink, works = Sink(), view.works()
    execute(works, sink, limits(works, None, 2))
    for name, tensor in view.tensors.items():
        assert sink[name][0].tobytes() == pieces(tensor).tobytes()


def test_another_basis(tmp_path):
    arrays = {"in": np.arange(12, dtype=np.float32).reshape(3, 4), "out": np.ones((4, 2), "f4")}
    arrays["free"] = np.zeros(5, np.float32)
    s = spec(
        arrays, {"in": "x* h", "out": "h* y", "free": "_"}, spaces={"h": "relu", "{x,y}": "outer"}
    )
    maps = {"h": growth.permute([2, 0, 3, 1])}
    source = Fake(tmp_path, arrays)
    view = rebased(source, s, maps)
    assert view.tensors["free"] is source.tensors["free"]
    for path, want in change_basis(arrays, s, maps).items():
        assert pieces(view.tensors[path]).tobytes() == np.asarray(want).tobytes()
    with pytest.raises(ValueError, match="no space 'hid'"):
        rebased(source, s, {"hid": maps["h"]})


def test_refusals_name_the_tensor(tmp_path):
    source, view = view_of(tmp_path, allow_nonfinite=False)
    tensor = view.tensors["lm_head.weight"]
    for start in (-1, math.prod(tensor.shape) - 1):
        with pytest.raises(ValueError, match=r"lm_head.weight of .*entries"):
            tensor.read(np.empty(2, tensor.dtype), start)
    for buffer in (np.empty(2, np.float32), np.empty((2, 1), tensor.dtype)):
        with pytest.raises(ValueError, match=r"lm_head.weight of .*flat, contiguous bfloat16"):
            tensor.read(buffer)
    source.tensors["lm_head.weight"].array[3, 4] = np.nan
    with pytest.raises(CheckpointError, match=r"NaN or infinity in lm_head.weight"):
        pieces(tensor)
    made = networks.plan(tensors(), CONFIG, {"width": 2}, "lemon")
    del source.tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"model.norm.weight'.* missing"):
        grown(source, made)


def test_marks_tell_growths_apart(tmp_path):
    _, one = view_of(tmp_path, mark="one")
    _, two = view_of(tmp_path, mark="two")
    marks = {
        x.mark for view in (one, two) for x in view.tensors.values() if isinstance(x, Computed)
    }
    assert marks == {"one", "two"}
