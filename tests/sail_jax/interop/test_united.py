"""Classes of one architecture as one table: a body, a tied head, two heads of one name, no head."""

from sail_jax.architectures.files import Table
from sail_jax.interop.united import united

BODY = {"{m.,}embed": "vocab* resid", "{m.,}pooler": "pooled resid*"}
WORDS = {"resid": "layernorm", "pooled": "odd", "vocab": "outer"}
MAIN = Table(
    axes={"{m.,}embed": "vocab* resid", "lm_head": "vocab resid*"}, spaces=WORDS,
    tied={"{m.,}embed": "vocab* resid | vocab resid*"}, head=("lm_head",), optional=("lm_head",),
    settings=(("hidden_size", "resid"),),
)  # fmt: skip
POOLED = Table(axes=BODY | {"classifier": "_ pooled*"}, spaces=WORDS)
TOKENS = Table(axes={"{m.,}embed": "_ resid", "classifier": "_ resid*"}, spaces=WORDS)
BARE = Table(axes={"{m.,}embed": "_ _", "{m.,}pooler": "_ _"})


def test_one_table_for_all_classes():
    table = united(MAIN, {"APooled": POOLED, "ATokens": TOKENS}, [BARE])
    assert table.axes["{m.,}embed"] == "vocab* resid"
    assert table.axes["classifier"] == "_ pooled*"
    # One class uses the tensor of that name in another way; that its vocabulary has no name is no
    # other way.
    assert table.classes == {"ATokens": {"classifier": "_ resid*"}}
    assert {*table.optional} == {"lm_head", "{m.,}pooler", "classifier"}
    # Without a head the stream is handed out, unless something reads it, or what is pooled of it.
    assert table.ends == {"resid": ("lm_head", "classifier"), "pooled": ("classifier",)}
    assert table.implied


def test_a_class_without_a_head_hands_out_its_states():
    table = united(MAIN, {"APooled": POOLED}, [BARE])
    ends = {
        name: table.rules({"architectures": [name]}).ends
        for name in ("AModel", "AForCausalLM", "AForTokenClassification")
    }
    # The tied head of the second has no tensor that could show it.
    tied = table.rules({"architectures": ["AForCausalLM"], "tie_word_embeddings": True})
    assert tied.ends == {}
    assert dict(tied.axes)["{m.,}embed"] == "vocab* resid | vocab resid*"
    assert all(own["resid"] == ("lm_head", "classifier") for own in ends.values())


def test_what_another_head_restricts_is_of_its_class():
    summed = POOLED._replace(spaces=WORDS | {"resid": "layernorm softmax"})
    table = united(MAIN, {"ASummed": summed}, [BARE])
    assert table.spaces["resid"] == "layernorm"
    spaces = table.rules({"architectures": ["ASummed"]}).spaces
    assert spaces["resid"].split() == ["layernorm", "softmax"]


def test_sizes_are_those_of_the_main_class():
    """What another class seems to have as a number was not varied."""
    sizes = {"resid": "8", "pooled": "8"}
    table = united(MAIN, {"APooled": POOLED._replace(sizes=sizes)}, [BARE])
    assert table.sizes == {"pooled": "8"}
    main = MAIN._replace(sizes={"resid": "hidden_size"})
    table = united(main, {"APooled": POOLED._replace(sizes=sizes)}, [BARE])
    assert table.sizes == {"resid": "hidden_size", "pooled": "8"}
