"""Which attention backend serves a KV-cache group: what "auto" takes, and several of them in one model."""

import importlib
import sys
from dataclasses import replace

import pytest
from fake_packages import BACKEND, fresh_scan, install

import octavo
from octavo import EngineConfig, SamplingParams
from octavo.core.interfaces import AttentionSpec
from octavo.errors import ConfigError, PluginUnsuitable
from octavo.plugins.families import ATTENTION_BACKENDS
from octavo.plugins.registry import Plugin, Registry
from octavo.selection.backends import NamedBackends, choose_backend
from octavo.selection.select import select
from octavo.testing import tiny_models

OWN = f"octavo {octavo.__version__}"
FIRST = "by default; 'auto' takes the first of Octavo's own that can serve"
SUBJECT = "The attention backend theirs (their_module:Backend, from their-package 1.0)"
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
# What a source goes on with that answers otherwise.
ASKED = f"{BACKEND}\n    @classmethod\n    def cannot_serve(cls, spec):"
TRITON = "octavo.attention_backends.triton.backend.TritonBackend.cannot_serve"

SPEC = AttentionSpec(
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=16,
    head_dim_v=16,
    scale=0.25,
    block_size=16,
    dtype="float16",
    kv_dtype="float16",
    device="cuda:0",
)


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    """Whether Triton's is on differs from machine to machine, and with it whether triton could serve on a CPU."""
    monkeypatch.setattr(TRITON, classmethod(lambda cls, spec: ["No GPU."]))


def report(folder, **settings):
    config = EngineConfig.from_flat(model=str(folder), **{"num_kv_blocks": 20, **settings})
    return select(config, fresh_scan()).lines()


def refusal(error, folder, **settings):
    with pytest.raises(error) as caught:
        report(folder, **settings)
    return str(caught.value)


def install_backend(site, source):
    install(site, "their-package", "[octavo.attention_backends]\ntheirs = their_module:Backend\n", their_module=source)


def refusing(*reasons):
    return f"{ASKED} return {list(reasons)!r}\n"


# -- what "auto" takes ------------------------------------------------------------------------------------------


def take_automatically(site, sources, specs=(SPEC,)):
    """Return what "auto" chooses among backends of Octavo's own that are made up, and why not each other."""
    plugins = [Plugin(ATTENTION_BACKENDS, "theirs", "their_module:Backend", "their-package", "1.0")]
    for name, source in sources.items():
        (site / f"made_up_{name}.py").write_text(source)
        plugins.append(Plugin(ATTENTION_BACKENDS, name, f"made_up_{name}:Backend", "octavo", "1.0"))
    importlib.invalidate_caches()
    nothing_named = NamedBackends({}, None)
    chosen, rejected = choose_backend(EngineConfig(), Registry(plugins), nothing_named, "full_attention", specs)
    return chosen.part.plugin.name, {each.plugin.name: " ".join(each.reasons) for each in rejected}


def after(name):
    return f"'auto' asks {name} before it."


THEIRS = {"theirs": "'auto' takes only Octavo's own."}


@pytest.mark.parametrize(
    ("unable", "chosen", "others"),
    [
        ({}, "flash_attn", {"triton": after("flash_attn"), "torch_sdpa": after("flash_attn")}),
        ({"flash_attn": "Not A."}, "triton", {"flash_attn": "Not A.", "torch_sdpa": after("triton")}),
        ({"triton": "Not B."}, "flash_attn", {"triton": "Not B.", "torch_sdpa": after("flash_attn")}),
        ({"flash_attn": "Not A.", "triton": "Not B."}, "torch_sdpa", {"flash_attn": "Not A.", "triton": "Not B."}),
    ],
)
def test_on_a_gpu_auto_takes_the_first_that_can_and_says_of_the_others_what_keeps_them(site, unable, chosen, others):
    reasons = {"torch_sdpa": [], "triton": [], "flash_attn": []} | {name: [said] for name, said in unable.items()}
    sources = {name: refusing(*given) for name, given in reasons.items()}
    assert take_automatically(site, sources) == (chosen, others | THEIRS)


def test_one_of_octavos_own_that_is_broken_does_not_keep_auto_from_the_next(site):
    sources = {"flash_attn": "raise OSError('no driver')", "triton": refusing(), "torch_sdpa": refusing()}
    chosen, others = take_automatically(site, sources)
    assert chosen == "triton"
    assert others["flash_attn"] == (
        "The attention backend flash_attn (made_up_flash_attn:Backend, from octavo 1.0) cannot be imported: OSError: "
        "no driver."
    )


def test_on_a_cpu_auto_does_not_even_import_what_is_made_for_gpus(site):
    unseen = "raise RuntimeError('imported')"
    sources = {"flash_attn": unseen, "triton": unseen, "torch_sdpa": refusing()}
    gpus = "'auto' takes it on cuda devices only."
    assert take_automatically(site, sources, [replace(SPEC, device="cpu")]) == (
        "torch_sdpa",
        {"flash_attn": gpus, "triton": gpus} | THEIRS,
    )
    assert not {"made_up_flash_attn", "made_up_triton"} & set(sys.modules)


def test_each_reason_of_each_is_given_where_none_can(site):
    sources = {name: refusing(f"{name} is old.", "No.") for name in ("torch_sdpa", "triton", "flash_attn")}
    with pytest.raises(PluginUnsuitable) as caught:
        take_automatically(site, sources)
    assert str(caught.value) == (
        "None of Octavo's own attention backends can serve this model here. flash_attn: flash_attn is old. No. triton: "
        "triton is old. No. torch_sdpa: torch_sdpa is old. No. No installed one could."
    )


def test_a_backend_serves_a_group_only_if_it_serves_all_of_its_layers(site):
    windowless = f"{ASKED} return ['No window.'] if spec.window else []\n"
    sources = {"flash_attn": windowless, "triton": refusing(), "torch_sdpa": refusing()}
    assert take_automatically(site, sources, [SPEC])[0] == "flash_attn"
    chosen, others = take_automatically(site, sources, [SPEC, replace(SPEC, window=9), replace(SPEC, window=8)])
    assert (chosen, others["flash_attn"]) == ("triton", "No window.")


# -- several in one model ---------------------------------------------------------------------------------------


def prefer_triton_without_windows(monkeypatch):
    """Let "auto" ask triton first on a CPU, and triton serve all but windows."""
    monkeypatch.setattr("octavo.selection.backends.AUTO_BACKENDS", {"cpu": ("triton", "torch_sdpa")})
    monkeypatch.setattr(TRITON, classmethod(lambda cls, spec: ["No windows."] if spec.window else []))


def test_groups_get_different_backends_where_one_serves_only_some_of_them(tmp_path, monkeypatch):
    prefer_triton_without_windows(monkeypatch)
    lines = report(tiny_models.tiny_gemma3(tmp_path))
    about_these = [line for line in lines if "attention backend" in line or line.startswith("  not t")]
    assert about_these == [
        f"attention backend of sliding_window (layers 0-4, 6): torch_sdpa ({OWN}), {FIRST}",
        f"  not triton ({OWN}): No windows.",
        f"attention backend of full_attention (layer 5): triton ({OWN}), {FIRST}",
        f"  not torch_sdpa ({OWN}): 'auto' asks triton before it.",
    ]


MIXTURES = {
    "windows by triton": {"attention_backends": {"sliding_window": "triton", "full_attention": "torch_sdpa"}},
    "the rest by triton": {"attention_backends": {"sliding_window": "torch_sdpa", "full_attention": "triton"}},
    "by auto": {},
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_layers_of_one_buffer_may_be_served_by_different_backends(tmp_path, make_llm, monkeypatch, mixture):
    """Groups take blocks from one pool: what one backend wrote lies in a block that another one gets later."""
    folder = tiny_models.add_byte_tokenizer(tiny_models.tiny_gemma3(tmp_path / "gemma"))
    # Few blocks, so that some are used again, and prompts in pieces.
    settings = {"num_kv_blocks": 40, "max_num_batched_tokens": 24, "max_num_seqs": 2, "max_model_len": 64}
    prompts = ["one two three four five", "a", "one two three four six"]

    def tokens_of(**chosen):
        llm = make_llm(folder, **settings, **chosen)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        kinds = {group.group.spec.kind: group.backend.part.plugin.name for group in llm.selection.groups}
        return [output.outputs[0].token_ids for output in outputs], kinds

    wanted, _ = tokens_of(attention_backend="torch_sdpa")
    monkeypatch.setattr(TRITON, classmethod(lambda cls, spec: []))
    if not MIXTURES[mixture]:
        prefer_triton_without_windows(monkeypatch)
    tokens, kinds = tokens_of(**MIXTURES[mixture])
    by_triton = "sliding_window" if mixture == "windows by triton" else "full_attention"
    assert kinds == {"sliding_window": "torch_sdpa", "full_attention": "torch_sdpa"} | {by_triton: "triton"}
    assert tokens == wanted


# -- options that matter ----------------------------------------------------------------------------------------

PICKY = f"""
from pydantic import BaseModel
{BACKEND}
    class Options(BaseModel):
        mode: str = "slow"
    def __init__(self, spec, *, options): super().__init__(spec)
    @classmethod
    def cannot_serve(cls, spec, options=None):
        mode = "slow" if options is None else options.mode
        return [] if mode == "fast" else ["Not in the mode " + mode + "."]
"""


def test_a_backend_is_asked_with_the_options_that_it_would_be_made_with(site, tiny_folder):
    install_backend(site, PICKY)
    fast = {"name": "theirs", "options": {"mode": "fast"}}
    assert report(tiny_folder, attention_backend=fast)[1] == (
        "attention backend of full_attention (layers 0-1): theirs (their-package 1.0) with Options(mode='fast'), by "
        "argument"
    )
    for name, mode in (("theirs", "slow"), ({"name": "theirs", "options": {"mode": "odd"}}, "odd")):
        assert refusal(PluginUnsuitable, tiny_folder, attention_backend=name) == (
            f"{SUBJECT} cannot serve this model here: Not in the mode {mode}. Installed ones that could: torch_sdpa."
        )


# -- formats of the KV cache ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "int8"])
def test_a_backend_without_quantised_formats_says_what_it_serves_and_who_could(site, tiny_folder, kv_cache_dtype):
    only_float32 = (
        f"{ASKED} return [] if spec.kv_dtype == 'float32' else ['Only float32, not ' + spec.kv_dtype + '.']\n"
    )
    install_backend(site, only_float32)
    assert refusal(PluginUnsuitable, tiny_folder, attention_backend="theirs", kv_cache_dtype=kv_cache_dtype) == (
        f"{SUBJECT} cannot serve this model here: Only float32, not {kv_cache_dtype}_per_token_head. Installed ones "
        "that could: torch_sdpa."
    )
    sentence = refusal(PluginUnsuitable, tiny_folder, attention_backend="flash_attn", kv_cache_dtype=kv_cache_dtype)
    assert sentence.endswith(
        "FlashAttention reads keys and values in the queries' dtype, float32, and kv_dtype is "
        f"'{kv_cache_dtype}_per_token_head'; set kv_cache_dtype='auto'. Installed ones that could: torch_sdpa."
    )


def test_a_format_that_nobody_knows_is_refused_with_those_there_are(tiny_folder):
    sentence = refusal(ConfigError, tiny_folder, kv_cache_dtype="fp4")
    for name in ("fp4", "auto", "float32", "float16", "bfloat16", "fp8_e4m3", "int8"):
        assert name in sentence
