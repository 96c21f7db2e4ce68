"""Models by their names on the Hub: from the cache of huggingface_hub, and downloaded into it.

A server on this machine stands for the Hub. The layout of the cache is made by huggingface_hub.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import fake_hub
import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _shared_blobs

from sail_jax import spec
from sail_jax.architectures import Rules
from sail_jax.checkpoint import (
    CheckpointError,
    RunOptions,
    align_checkpoints,
    compare_checkpoints,
    grow_checkpoint,
    load_checkpoint,
    merge_checkpoints,
    merge_recipe,
    open_checkpoint,
    save_checkpoint,
)
from sail_jax.checkpoint.formats import hub
from sail_jax.cli import main as cli

SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
WANTED = {"config.json", "model.safetensors.index.json", "tokenizer.json", *SHARDS}


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {f"layer.{i}.weight": rng.normal(size=(6, 5)).astype(np.float32) for i in range(4)}


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Files of a model in two shards with other files, of a model in one file, of an adapter."""
    folder = tmp_path_factory.mktemp("stored")
    extras = {"config.json": b'{"n": 1}', "tokenizer.json": b'{"model": {"vocab": {"a": 0}}}'}
    save_checkpoint(folder / "shards", arrays(1), extras=extras, shard_bytes=300)
    save_checkpoint(folder / "one", arrays(2), extras={"config.json": b'{"n": 1}'})
    factors = {"A": np.ones((2, 5), np.float32), "B": np.full((6, 2), 0.5, np.float32)}
    tensors = {f"base_model.model.layer.0.lora_{side}.weight": x for side, x in factors.items()}
    save_checkpoint(folder / "lora" / "adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (folder / "lora" / "adapter_config.json").write_text(json.dumps(config))
    beside = {"pytorch_model.bin": b"pickle", "modeling.py": b"code", "tokenizer.py": b"code"}
    beside |= {"consolidated.safetensors": b"again", "sub/model.safetensors": b"another"}
    shards, one = files(folder / "shards"), files(folder / "one")
    assert shards.keys() == WANTED
    return SimpleNamespace(shards=shards | beside, one=one, lora=files(folder / "lora"))


@pytest.fixture
def served(stored, tmp_path, monkeypatch):
    """The server, with `cache`, the folder of huggingface_hub's downloads."""
    with fake_hub.serving() as server:
        server.models["org/model"] = {"main": stored.shards, "v1/x": stored.one}
        server.models["org/other"] = {"main": stored.one}
        server.models["org/lora"] = {"main": stored.lora, "old": {"adapter_model.bin": b"pickle"}}
        server.cache = tmp_path / "cache"
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(server.cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        for name in ("HF_TOKEN_PATH", "AGENT_HARNESSES_PATH"):
            monkeypatch.setattr(constants, name, str(tmp_path / name))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        yield server


def equal(found, expected):
    return found.keys() == expected.keys() and all((found[n] == expected[n]).all() for n in found)


def refused(text, **options):
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(text, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.slow
def test_a_model_is_downloaded_once(served, capsys):
    with open_checkpoint("org/model") as checkpoint:
        assert checkpoint.about() == [f"commit {served.commit('org/model')} is read"]
        assert set(checkpoint.extras) == {"config.json", "tokenizer.json"}
        source = checkpoint.tensors["layer.0.weight"].source
        assert source == f"org/model@{served.commit('org/model')}/{SHARDS[0]}"
    assert served.got() == WANTED
    size = sum(len(served.models["org/model"]["main"][name]) for name in WANTED)
    home = served.cache / "models--org--model"
    said = f"org/model: downloads 5 files, {size / 1000:.1f} kB, to {home}\n"
    assert capsys.readouterr().err.startswith(said)
    served.asked.clear()
    assert equal(load_checkpoint("org/model"), arrays(1))
    assert equal(load_checkpoint("org/model", offline=True), arrays(1))
    assert served.asked == []
    assert capsys.readouterr().err == ""


def test_revisions(served, monkeypatch):
    assert equal(load_checkpoint("org/model@v1/x"), arrays(2))
    commit = served.commit("org/model", "v1/x")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    served.asked.clear()
    for text in (f"org/model@{commit}", "org/model@v1/x"):
        assert equal(load_checkpoint(text), arrays(2))
    home = served.cache / "models--org--model"
    assert refused("org/model").endswith(
        f"the cache holds no model of this name ({home}); without HF_HUB_OFFLINE it is downloaded"
    )
    assert "the cache lacks v2" in refused("org/model@v2")
    assert served.asked == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert refused("org/model@v2") == "org/model@v2: the model has no revision 'v2'"
    assert equal(load_checkpoint("org/model"), arrays(1))  # main, which the cache lacked


def test_folders_of_the_cache_are_checkpoints(served):
    for text in ("org/model", "org/model@v1/x"):
        load_checkpoint(text)
    served.asked.clear()
    home = served.cache / "models--org--model"
    assert equal(load_checkpoint(home), arrays(1))
    assert equal(load_checkpoint(f"{home}@v1/x"), arrays(2))
    assert equal(load_checkpoint(f"{home}@{served.commit('org/model', 'v1/x')}"), arrays(2))
    with open_checkpoint(home / "snapshots" / served.commit("org/model")) as checkpoint:
        assert served.commit("org/model") in checkpoint.about()[0]
    assert "has no revision 'v2': it holds @" in refused(f"{home}@v2")
    assert "has no revision '../main': it holds @" in refused(f"{home}@../main")
    recipe = f"{{merge_method: passthrough, dtype: float32, models: [{{model: '{home}@v1/x'}}]}}"
    assert equal(load_checkpoint(merge_recipe(recipe, "taken").out), arrays(2))
    assert served.asked == []
    assert hub.called(f"{home}@v1/x") == "org/model@v1/x"


def test_what_models_share_is_read(served):
    """huggingface_hub moves what Xet has fetched out of the model's folder, and leaves a link."""
    load_checkpoint("org/other")
    home = served.cache / "models--org--other"
    link = home / "snapshots" / served.commit("org/other") / "model.safetensors"
    blob, digest = home / "blobs" / link.resolve().name, "ab" * 32
    assert _shared_blobs.publish_blob_to_shared_store(
        blob_path=str(blob), xet_hash=digest, cache_dir=served.cache,
        expected_size=blob.stat().st_size,
    )  # fmt: skip
    assert link.resolve() == served.cache / "blobs" / "ab" / digest
    assert equal(load_checkpoint("org/other", offline=True), arrays(2))
    # a link past the blobs of the model, or to what is not named by a hash
    for target in (served.cache / "blobs" / "ab" / "secret", served.cache / "secret"):
        shutil.copy(link.resolve(), target)
        blob.unlink()
        blob.symlink_to(target)
        assert "is a link that leads out of the checkpoint's folder" in refused("org/other")


def test_hostile_caches(served, tmp_path):
    load_checkpoint("org/other")
    home = served.cache / "models--org--other"
    commit = served.commit("org/other")
    snapshot = home / "snapshots" / commit
    link = snapshot / "config.json"
    link.unlink()
    link.symlink_to("/etc/hostname")
    assert "config.json is a link that leads out" in refused("org/other")
    link.unlink()
    moved = shutil.move(snapshot, tmp_path / "moved")
    snapshot.symlink_to(moved)
    assert "is a link; expected a folder of the cache" in refused("org/other")
    assert "is a link; expected a folder of the cache" in refused(home)
    for ref in ("../../../moved", "0" * 41, "", "0" * 200):
        (home / "refs" / "main").write_text(ref)
        assert "refs/main is damaged" in refused(home)
    (home / "refs" / "main").write_text("0" * 40)
    assert "has no revision 'main'" in refused(home)


@pytest.mark.parametrize(
    "text",
    [
        *("../org/model", "org/..", "org/../model", "/org/model", "org//model", "org/model/", "a"),
        *("org/model/x", "org/mo\x1bdel", "org/model\n", "org/mo del", ".org/model", "org/-model"),
        *("org/a--b", "org/a..b", "org/model.git", "org/model.safetensors", "org/" + "m" * 96),
        *("org/model@../main", "org/model@a/../b", "org/model@.", "org/model@", "org/model@a\0"),
        *(
            "org/model@/etc",
            "org/model@a b",
            "org/model@" + "r" * 201,
            "org/model@last:2",
            "örg/m",
        ),
    ],
)
def test_what_is_no_name_is_not_looked_up(text, served):
    assert not hub.is_name(text)
    assert "does not exist" in refused(text)
    assert served.asked == []


def test_what_is_too_long_is_no_name():
    for text in ("models--a@" + "m" * 5000, "models--" + "m" * 5000 + "@main"):
        assert not hub.is_name(text)
        assert "name too long" in refused(text)


def test_a_path_comes_before_a_name(served, tmp_path):
    save_checkpoint(tmp_path / "org/model", arrays(7))
    assert equal(load_checkpoint("org/model"), arrays(7))
    (tmp_path / "org/dangling").symlink_to("nowhere")
    assert "does not exist" in refused("org/dangling")
    assert "does not exist" in refused("org/model@main")  # a step of a run without steps
    assert served.asked == []


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [
        ("org/none", None, "org/none does not exist, and the Hub shows no such model"),
        ("org/model", (401, "RepoNotFound"), "for a private one log in (hf auth login)"),
        ("org/model files", (403, "GatedRepo"), "is gated: accept its terms on its page"),
        ("org/model", (403, ""), "the Hub refuses it to this user; log in"),
        ("org/model", (503, ""), "does not exist, and the Hub does not answer: Server error '503"),
        (
            f"org/model {SHARDS[1]}",
            (404, "EntryNotFound"),
            "was not downloaded whole; what came is kept: ",
        ),
    ],
)
def test_the_hub_refuses(text, status, says, served):
    if status:
        served.refused[text] = status
    assert says in refused(text.partition(" ")[0])


def test_no_network(served, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the Hub does not answer: [Errno 111]" in refused("org/model")


def test_without_the_extra(served, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    said = refused("org/model")
    assert said.startswith("org/model does not exist; ")
    assert said.endswith("pip install 'sail-jax[hub]'")


def test_no_room(served, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    said = refused("org/model")
    assert "5 files, " in said
    assert f"do not fit in {served.cache}, where 1.0 kB are free" in said
    assert served.got() == set()


def test_pickles_alone_are_refused(served):
    said = "org/lora@old has no safetensors, and no other tensors are downloaded"
    assert refused("org/lora@old") == f"{said}: found adapter_model.bin"
    assert refused("org/lora@old", allow_pickle=True) == f"{said}: found adapter_model.bin"
    assert served.got() == set()


def test_which_files_are_wanted():
    names = [
        "a-00001-of-00002.safetensors",
        "b.safetensors",
        "vocab.txt",
        "tokenizer.pkl",
        ".x.json",
    ]
    assert hub.wanted("m", names) == [*names[:2], "vocab.txt"]
    index = "a.safetensors.index.json"
    assert hub.wanted("m", [*names, index]) == [index, names[0], "vocab.txt"]
    assert hub.wanted("m", [index, "x.safetensors"]) == [index, "x.safetensors"]
    with pytest.raises(CheckpointError, match=r"m has no safetensors.*: found no tensors"):
        hub.wanted("m", ["..", "../model.safetensors", "a/b.safetensors", "\x1b.safetensors"])


def test_what_is_missing_is_fetched(served, capsys):
    served.models["org/more"] = served.models["org/model"]
    for name, lost in (("org/model", SHARDS[1]), ("org/more", "tokenizer.json")):
        load_checkpoint(name)
        home = served.cache / f"models--{name.replace('/', '--')}"
        link = home / "snapshots" / served.commit(name) / lost
        link.resolve().unlink()
    assert "lacks some of its tensors" in refused("org/model", offline=True)
    # Other files may be missing if there is no network.
    with open_checkpoint("org/more", offline=True) as checkpoint:
        assert checkpoint.about()[1:] == ["the cache lacks tokenizer.json"]
    served.asked.clear()
    capsys.readouterr()
    assert equal(load_checkpoint("org/more"), arrays(1))
    assert equal(load_checkpoint("org/model"), arrays(1))
    assert served.got() == {"tokenizer.json", SHARDS[1]}
    assert "org/more: downloads 1 file, " in capsys.readouterr().err


def test_caches_of_other_programs(served):
    """They have no list of a model's files, and may contain only some of them."""
    load_checkpoint("org/model")
    home = served.cache / "models--org--model"
    snapshot = home / "snapshots" / served.commit("org/model")
    (home / "trees" / f"{snapshot.name}.json").write_text("damaged")
    served.asked.clear()
    assert equal(load_checkpoint("org/model"), arrays(1))
    shutil.rmtree(home / "trees")
    assert equal(load_checkpoint("org/model"), arrays(1))
    assert served.asked == []
    for name in (SHARDS[1], "config.json"):
        (snapshot / name).unlink()
        served.asked.clear()
        assert equal(load_checkpoint("org/model"), arrays(1))
        assert served.asked
        shutil.rmtree(home / "trees", ignore_errors=True)
    (snapshot / "model.safetensors.index.json").unlink()
    assert equal(load_checkpoint("org/model", offline=True), arrays(1))
    for name in SHARDS:
        (snapshot / name).unlink()
        assert "lacks some of its tensors" in refused("org/model", offline=True)


@pytest.mark.slow
def test_a_download_that_is_killed_goes_on(served):
    served.held = SHARDS[1]
    environment = os.environ | {
        "HF_ENDPOINT": served.url,
        "HF_HOME": str(served.cache.parent / "home"),
        "HF_HUB_CACHE": str(served.cache),
        "HF_HUB_OFFLINE": "0",
    }
    code = "from sail_jax.checkpoint.formats import hub; hub.resolved('org/model')"
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    # A download is complete when the snapshot links to it, shortly after its bytes have arrived.
    snapshots = served.cache / "models--org--model" / "snapshots"
    ends = time.monotonic() + 60
    while sum(not p.is_dir() for p in snapshots.rglob("*")) < len(WANTED) - 1:
        assert process.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert "lacks some of its tensors" in refused("org/model", offline=True)
    served.held = None
    served.asked.clear()
    assert equal(load_checkpoint("org/model"), arrays(1))
    assert served.got() == {SHARDS[1]}


RECIPE = """
merge_method: linear
dtype: float32
models:
  - {model: org/model+org/lora@main, parameters: {weight: 3}}
  - {model: {model: {path: org/model, revision: v1/x}, lora: org/lora}, parameters: {weight: 1}}
"""


def written(folder):
    """Returns the text of all files of an output except its tensors."""
    return {p.name: p.read_text() for p in folder.iterdir() if p.suffix != ".safetensors"}


def test_recipes_name_models_and_adapters(served, tmp_path, capsys):
    (tmp_path / "r.yaml").write_text(RECIPE)
    assert cli.main(["merge", "r.yaml", "out", "--offline"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "without --offline it is downloaded" in said
    assert cli.main(["merge", "r.yaml", "out", "--quiet"]) == 0
    found = load_checkpoint("out")
    added = {"layer.0.weight": np.float64(0.5 * 2)}  # B A, each entry
    for name, x in arrays(1).items():
        mean = (3 * x.astype(float) + arrays(2)[name]) / 4 + added.get(name, 0)
        np.testing.assert_allclose(found[name], mean, rtol=1e-6, atol=1e-6)  # up to 4
    texts = written(tmp_path / "out")
    assert not [name for name, text in texts.items() if str(tmp_path) in text]
    card = texts["README.md"]
    assert "base_model:\n- 'org/model'\n- 'org/lora'\n" in card
    assert "- `org/model+org/lora@main`\n- `org/model@v1/x+org/lora`\n" in card
    commits = [served.commit("org/model"), served.commit("org/model", "v1/x")]
    for commit in commits:
        assert f": commit {commit} is read" in card
    assert f"adapter: commit {served.commit('org/lora')} is read" in card


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ("org/modle", "org/modle does not exist, and the Hub shows no such model"),
        ("org/model@v2", "org/model@v2: the model has no revision 'v2'"),
        ("./modle", "modle does not exist"),
    ],
)
def test_all_models_are_looked_up_before_any_is_downloaded(last, says, served, capsys):
    with pytest.raises(CheckpointError, match=says):
        merge_checkpoints(["org/model", "org/other", last], "out")
    with pytest.raises(CheckpointError, match=says):
        compare_checkpoints(["org/model", last])
    document = "name: {}\nmerge_method: linear\nmodels: [{{model: {}, parameters: {{weight: 1}}}}]"
    texts = [document.format("a", "org/model"), document.format("b", last)]
    with pytest.raises(CheckpointError, match=says):
        merge_recipe("\n---\n".join(texts), "out")
    assert served.got() == set()
    assert "downloads" not in capsys.readouterr().err


def test_models_have_to_fit_together(served, monkeypatch):
    wanted = {n: hub.wanted(n, served.models[n]["main"]) for n in ("org/model", "org/other")}
    sizes = [sum(len(served.models[n]["main"][f]) for f in wanted[n]) for n in wanted]
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=sum(sizes) - 1))
    with pytest.raises(CheckpointError, match=r"org/model, org/other: 7 files, .* do not fit in"):
        merge_checkpoints(["org/model", "org/other"], "out")
    assert served.got() == set()


@pytest.mark.slow
def test_operations_name_models(served, tmp_path):
    merged = merge_checkpoints(["org/model", "org/other"], "out", run=RunOptions(sync=False))
    assert [model.name for model in merged.plan.inputs] == ["org/model", "org/other"]
    np.testing.assert_allclose(
        load_checkpoint("out")["layer.0.weight"],
        (arrays(1)["layer.0.weight"] + arrays(2)["layer.0.weight"]) / 2, rtol=1e-6,
    )  # fmt: skip
    sources = {x.source for t in merged.plan.treatments for x in t.models}
    one = f"org/other@{served.commit('org/other')}/model.safetensors"
    assert sources == {one, *(f"org/model@{served.commit('org/model')}/{name}" for name in SHARDS)}
    # by the folder of the cache; records still contain the name
    home = served.cache / "models--org--other"
    text = f"merge_method: passthrough\nmodels: [{{model: {home}}}]"
    ready = merge_recipe(text, "copy", run=RunOptions(sync=False, offline=True))
    assert [model.name for model in ready.plan.inputs] == ["org/other"]
    assert "- 'org/other'" in written(tmp_path / "copy")["README.md"]
    compared = compare_checkpoints(["org/model", home], offline=True)
    commits = [f"{name}@{served.commit(name)}" for name in ("org/model", "org/other")]
    assert compared.models == tuple(commits)


@pytest.mark.slow
def test_records_of_growth_and_alignment(served, tmp_path):
    small = {"in": np.diag(np.float32([1, 2, 3])), "out": np.ones((1, 3), np.float32)}
    save_checkpoint(tmp_path / "small", small)
    save_checkpoint(tmp_path / "again", {**small, "in": small["in"][[2, 0, 1]]})
    for name in ("small", "again"):
        served.models[f"org/{name}"] = {"main": files(tmp_path / name)}
    rules = Rules(
        (("in", "hidden x*"), ("out", "y hidden*")), {"x": "outer", "y": "outer", "hidden": "relu"}
    )
    grow_checkpoint("org/small", "large", {"hidden": 6}, rules=rules)
    grown = json.loads((tmp_path / "large" / "growth.json").read_text())
    assert grown["source"] == "org/small"
    assert f"commit {served.commit('org/small')} is read" in grown["notes"]
    spaces = spec(small, rules.axes, spaces=rules.spaces)
    home = served.cache / "models--org--again"
    load_checkpoint("org/again")
    align_checkpoints("org/small", home, "aligned", spec=spaces)
    record = json.loads((tmp_path / "aligned" / "align.json").read_text())
    assert (record["reference"], record["source"]) == ("org/small", "org/again")
    commits = [served.commit(f"org/{name}") for name in ("again", "small")]
    assert record["notes"][:2] == [
        f"commit {commits[0]} is read",
        f"org/small: commit {commits[1]} is read",
    ]
    assert equal(load_checkpoint("aligned"), small)


def test_commands_name_models(served, tmp_path, capsys):
    assert cli.main(["inspect", "org/other", "--json", "record.json", "--offline"]) == 2
    assert cli.main(["inspect", "org/other", "--json", "record.json"]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    commit = served.commit("org/other")
    assert record["checkpoint"] == f"org/other@{commit}"
    assert f"commit {commit} is read" in record["notes"]
    assert str(tmp_path) not in (tmp_path / "record.json").read_text()
    for name in ("org/model", "org/model@v1/x"):
        load_checkpoint(name)
    folder = served.cache / "models--org--model"
    assert cli.main(["average", "org/model", f"{folder}@v1/x", "mean", "--quiet", "--offline"]) == 0
    np.testing.assert_allclose(
        load_checkpoint("mean")["layer.3.weight"],
        (arrays(1)["layer.3.weight"] + arrays(2)["layer.3.weight"]) / 2, rtol=1e-6,
    )  # fmt: skip
    for command in ("merge", "grow", "align", "convert", "average", "inspect"):
        assert cli.main([command, "--help"]) == 0
        assert "--offline" in capsys.readouterr().out
