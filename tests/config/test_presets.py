"""Every preset and recipe loads, fits together, and has the parameters its source published.

Two vocabularies are counted: OpenAI and Meta publish the ids without padding, NVIDIA the padded rows. Published numbers
are rounded: one printed as 1.2B is compared at its two digits, one with three digits or more to within 0.5 %.
"""

import re
from dataclasses import replace

import pytest

from megajax.config import InputError, ModelConfig, check_config, load_config
from megajax.config.presets import CONFIGS, find_bundled, find_config, list_presets
from megajax.costs.weights import model_leaves, parameter_count

# preset: (exact count, published, where)
IDS_COUNT = {
    "gpt2_124m": (124_439_808, "124M", "released weights"),
    "gpt2_355m": (354_823_168, "355M", "released weights"),
    "gpt2_774m": (774_030_080, "774M", "released weights"),
    "gpt2_1.5b": (1_557_611_200, "1558M", "released weights"),
    "gpt3_125m": (125_226_240, "125M", "2005.14165 table D.1"),
    "gpt3_350m": (355_871_744, "356M", "2005.14165 table D.1"),
    "gpt3_760m": (760_300_032, "760M", "2005.14165 table D.1"),
    "gpt3_1.3b": (1_315_723_264, "1320M", "2005.14165 table D.1"),
    "gpt3_2.7b": (2_651_553_280, "2650M", "2005.14165 table D.1"),
    "gpt3_6.7b": (6_658_404_352, "6660M", "2005.14165 table D.1"),
    "gpt3_13b": (12_853_386_240, "12850M", "2005.14165 table D.1"),
    "gpt3_175b": (174_604_259_328, "174600M", "2005.14165 table D.1"),
    "llama2_7b": (6_738_415_616, "6738M", "released weights"),
    "llama2_13b": (13_015_864_320, "13016M", "released weights"),
    "llama2_70b": (68_976_648_192, "68977M", "released weights"),
    "llama3_8b": (8_030_261_248, "8030M", "released weights"),
    "llama3.1_8b": (8_030_261_248, "8030M", "released weights"),
    "llama3.1_70b": (70_553_706_496, "70554M", "released weights"),
    "llama3.1_405b": (405_853_388_800, "405853M", "released weights"),
    "mistral_7b": (7_241_732_096, "7242M", "released weights"),
    "starcoder2_3b": (3_030_371_328, "3030M", "released weights"),
    "qwen2_7b": (7_615_616_512, "7616M", "released weights"),
    "qwen3_8b": (8_190_735_360, "8191M", "released weights"),
    "gemma2_2b": (2_614_341_888, "2614M", "released weights"),
    "gemma2_9b": (9_241_705_984, "9242M", "released weights"),
    "gemma2_27b": (27_227_128_320, "27227M", "released weights"),
    "gemma3_1b": (999_885_952, "1000M", "released weights"),
    "smollm2_135m": (134_515_008, "134515008", "released weights"),
    "mixtral_8x7b": (46_702_792_704, "46703M", "released weights"),
    "mixtral_8x22b": (140_630_071_296, "140630M", "released weights"),
    "qwen3_30b_a3b": (30_532_122_624, "30532M", "released weights"),
    "bloom_560m": (559_214_592, "559214592", "released weights"),
    "bloom_7b1": (7_069_016_064, "7069M", "2211.05100"),
    "bloom_176b": (176_247_271_424, "176247M", "2211.05100"),
    "llama_tiny": (820_352, "820352", "this repository"),
    "bert_base": (110_106_428, "110M", "released weights"),
    "bert_large": (336_226_108, "336M", "released weights"),
    "roberta_base": (124_697_433, "125M", "released weights"),
    "roberta_large": (355_412_057, "355M", "1907.11692 section 5"),
    "megatron_bert_345m": (336_226_108, "336M", "1909.08053 table 4"),
    "megatron_bert_1.3b": (1_280_595_772, "1.3B", "1909.08053 table 4"),
    "megatron_bert_3.9b": (3_869_081_404, "3.9B", "1909.08053 table 4"),
    "gatortron_3.9b": (3_919_415_298, "3.9B", "Yang et al. 2022"),
    "t5_small": (60_506_624, "60506624", "released weights"),
    "t5_220m": (222_903_552, "223M", "1910.10683 section 3.1.2"),
    "t5_3b": (2_851_598_336, "2852M", "released weights"),
    "t5_11b": (11_135_332_352, "11135M", "released weights"),
}
ROWS_COUNT = {
    "megatron_1.2b": (1_213_479_936, "1.2B", "1909.08053 table 1"),
    "megatron_2.5b": (2_490_408_960, "2.5B", "1909.08053 table 1"),
    "megatron_4.2b": (4_199_109_120, "4.2B", "1909.08053 table 1"),
    "megatron_8.3b": (8_317_040_640, "8.3B", "1909.08053 table 1"),
    "turing_nlg_17b": (17_180_859_136, "17B", "Microsoft 2020"),
    "mt_nlg_530b": (529_600_819_200, "529.6B", "2104.04473 table 1"),
    "megatron_22b": (22_074_273_792, "22B", "2205.05198 table 3"),
    "megatron_175b": (174_615_846_912, "175B", "2205.05198 table 3"),
    "megatron_530b": (529_600_819_200, "530B", "2205.05198 table 3"),
    "megatron_1t": (1_008_038_758_400, "1008.0B", "2104.04473 table 1"),
}
# Named by a number that the shape gives roughly: the vocabulary, or what is counted, is not published.
ROUGHLY = {
    "biomegatron_345m": (336_226_108, "345M", "2010.06060"),
    "biomegatron_800m": (751_431_484, "800M", "2010.06060"),
    "biomegatron_1.2b": (1_280_595_772, "1.2B", "2010.06060"),
    "gatortron_345m": (356_371_458, "345M", "Yang et al. 2022"),
    "gatortron_8.9b": (8_841_928_706, "8.9B", "Yang et al. 2022"),
    "nemotron4_15b": (15_628_775_424, "15.7B", "2402.16819 section 2"),
}
UNITS = {"M": 10**6, "B": 10**9}


def model(name: str) -> ModelConfig:
    return load_config(f"models/{name}.yaml").config.model


def matches(count: int, published: str) -> bool:
    digits, unit = published.rstrip("MB"), UNITS.get(published[-1], 1)
    decimals = len(digits.partition(".")[2])
    same_digits = f"{count / unit:.{decimals}f}" == digits
    close = abs(count / unit / float(digits) - 1) < 0.005
    return close if len(digits.replace(".", "")) > 2 else same_digits


def test_every_preset_is_in_the_tables():
    assert {path.stem for path in (CONFIGS / "models").glob("*.yaml")} == {*IDS_COUNT, *ROWS_COUNT, *ROUGHLY}


@pytest.mark.parametrize("name", IDS_COUNT)
def test_parameters_counted_by_ids(name):
    exact, published, _ = IDS_COUNT[name]
    assert parameter_count(model(name)) == exact
    assert matches(exact, published)


@pytest.mark.parametrize("name", ROWS_COUNT)
def test_parameters_counted_by_rows(name):
    exact, published, _ = ROWS_COUNT[name]
    assert parameter_count(model(name), padded=True) == exact
    assert model(name).padded_vocab_size == 51_200
    assert matches(exact, published)


@pytest.mark.parametrize("name", ROUGHLY)
def test_parameters_that_the_name_rounds(name):
    exact, published, _ = ROUGHLY[name]
    assert parameter_count(model(name)) == exact
    assert exact == pytest.approx(float(published[:-1]) * UNITS[published[-1]], rel=0.07)


@pytest.mark.parametrize("name", [*ROWS_COUNT, *(name for name in IDS_COUNT if name.startswith("gpt"))])
def test_gpt_shapes_follow_the_formula_of_the_paper(name):
    # 2104.04473 eq. 2: P = 12 L D^2 (1 + 13 / (12 D) + (V + S) / (12 L D)), written out; it leaves out the final norm.
    shape = model(name)
    L, D, V, S = shape.num_layers, shape.hidden_size, shape.padded_vocab_size, shape.max_positions
    assert parameter_count(shape, padded=True) == 12 * L * D * D + 13 * L * D + (V + S) * D + 2 * D


def test_counts_of_a_grouped_llama_with_all_switches():
    shape = ModelConfig(
        num_layers=2, hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=6, ffn_hidden_size=10, vocab_size=5,
        vocab_multiple=4, positions="rope", norm="rmsnorm", activation="swiglu", bias=False, qkv_bias=True,
        qk_norm=True, tied_head=False,
    )  # fmt: skip
    counts = {
        "word_embedding": 5 * 8,
        "blocks.attention_norm.scale": 2 * 8,
        "blocks.attention.qkv": 2 * 8 * (4 + 2 + 2) * 6,
        "blocks.attention.qkv_bias": 2 * (4 + 2 + 2) * 6,
        "blocks.attention.q_norm.scale": 2 * 6,
        "blocks.attention.k_norm.scale": 2 * 6,
        "blocks.attention.out": 2 * 4 * 6 * 8,
        "blocks.mlp_norm.scale": 2 * 8,
        "blocks.mlp.fc1": 2 * 2 * 8 * 10,
        "blocks.mlp.fc2": 2 * 10 * 8,
        "final_norm.scale": 8,
        "head": 5 * 8,
    }
    assert {leaf.name: leaf.size(5) for leaf in model_leaves(shape)} == counts
    assert parameter_count(shape) == sum(counts.values())
    assert parameter_count(shape, padded=True) - parameter_count(shape) == 2 * 3 * 8  # three unused rows, twice


def test_norms_of_query_and_key_heads_have_a_shift_when_layernorm_has():
    """Each of two norms has a gain, and a shift if it is a LayerNorm, for the 4 dims of a head."""
    shape = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, vocab_size=4, qk_norm=True)
    for norm, weights in (("layernorm", 2 * (4 + 4)), ("rmsnorm", 2 * 4)):
        leaves = model_leaves(replace(shape, norm=norm))
        assert sum(leaf.row for leaf in leaves if re.search(r"\b[qk]_norm\.", leaf.name)) == weights


def test_the_vocabulary_has_to_be_known():
    with pytest.raises(InputError, match=r"model\.vocab_size is not set"):
        parameter_count(ModelConfig())
    with pytest.raises(InputError, match=r"model\.vocab_size is not known yet"):
        _ = ModelConfig().padded_vocab_size


@pytest.mark.parametrize(
    "path", sorted([*CONFIGS.glob("models/*.yaml"), *CONFIGS.glob("recipes/*.yaml")]), ids=lambda path: path.stem
)
def test_presets_and_recipes_fit_together(path):
    config = load_config(path).config
    check_config(config)
    assert config.data.seq_length <= config.model.max_positions
    assert path.read_text().startswith("# ")


def test_the_175b_recipe_is_for_128_gpus():
    from megajax.config import check_batch, resolve_mesh

    config = load_config("recipes/gpt3_175b_128gpu.yaml").config
    mesh = resolve_mesh(config.parallel, num_devices=128)
    assert mesh == {"pipe": 8, "data": 2, "fsdp": 1, "expert": 1, "context": 1, "tensor": 8}
    check_batch(config.train, config.parallel, mesh["data"])
    assert config.train.samples * 2048 == 300 * 10**9


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("models/*.yaml")), ids=lambda path: path.stem)
def test_every_preset_says_what_its_model_was_trained_in(path):
    """With the source, in the file itself or in its preset."""
    loaded = load_config(path)
    assert loaded.origins["train.precision"] != "default"
    own = path.read_text()
    assert "precision:" not in own or f"precision: {loaded.config.train.precision} # " in own


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("llama3_8b", "models/llama3_8b.yaml"),
        ("llama3.1_8b", "models/llama3.1_8b.yaml"),
        ("llama3_8b.yaml", "models/llama3_8b.yaml"),
        ("models/llama3_8b", "models/llama3_8b.yaml"),
        ("models/llama3_8b.yaml", "models/llama3_8b.yaml"),
        ("configs/models/llama3_8b.yaml", "models/llama3_8b.yaml"),
        ("quickstart", "quickstart.yaml"),
        ("configs/quickstart.yaml", "quickstart.yaml"),
        ("gpt3_175b_128gpu", "recipes/gpt3_175b_128gpu.yaml"),
        ("llama_tiny", "models/llama_tiny.yaml"),
        ("verify/llama_tiny", "verify/llama_tiny.yaml"),
    ],
)
def test_configurations_are_found_by_name_from_anywhere(tmp_path, monkeypatch, name, file):
    monkeypatch.chdir(tmp_path)
    assert find_config(name) == CONFIGS / file
    (tmp_path / "mine.yaml").write_text(f"preset: {name}")
    assert load_config("mine.yaml").config == load_config(name).config == load_config(None, [f"preset={name}"]).config


def test_a_file_of_the_user_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2_124m").mkdir()  # such as a run of that name
    assert find_config("gpt2_124m") == CONFIGS / "models/gpt2_124m.yaml"
    (tmp_path / "gpt2_124m.yaml").write_text("preset: configs/models/gpt2_124m.yaml\noptim.lr: 1.0\n")
    assert load_config("gpt2_124m").config.optim.lr == 1.0
    (tmp_path / "gpt2_124m.yaml").write_text("preset: gpt2_124m\n")  # beside it stands only the file itself
    with pytest.raises(InputError, match="presets in a circle"):
        load_config("gpt2_124m")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("llama3_7b", "did you mean llama3_8b or llama2_7b?"),
        ("models/lama3_8b.yaml", "did you mean llama3_8b or llama3.1_8b?"),
        ("gpt_tiny", "did you mean verify/gpt_tiny?"),
        ("recipes/llama3_8b", "did you mean llama3_8b?"),
        ("my/own.yaml", "`python -m megajax` lists all presets"),
    ],
)
def test_a_name_that_does_not_exist_is_answered_with_those_that_do(name, hint):
    with pytest.raises(InputError, match=f"configuration file {name} not found in ") as caught:
        load_config(name)
    assert str(caught.value).endswith(hint)


def test_the_list_names_every_file_once():
    presets = list_presets()
    assert {find_config(name) for name in presets} == set(CONFIGS.rglob("*.yaml"))
    assert len(presets) == len(list(CONFIGS.rglob("*.yaml")))
    assert presets["llama3_8b"] == "Llama 3 8B"
    assert presets["megatron_1t"] == "Megatron-LM's 1T"
    assert all(1 < len(title) <= 90 for title in presets.values())


def test_the_bundled_text_is_found_from_anywhere(tmp_path, monkeypatch):
    """The quickstart worked from the folder of the repository only."""
    monkeypatch.chdir(tmp_path)
    (text,) = load_config("quickstart").config.data.text
    assert find_bundled(text) == str(CONFIGS / "data/shakespeare.jsonl")
    assert find_bundled("data/shakespeare.jsonl") == "data/shakespeare.jsonl"
    assert find_bundled("configs/data/nothing.jsonl") == "configs/data/nothing.jsonl"
    (tmp_path / "configs/data").mkdir(parents=True)
    (tmp_path / "configs/data/shakespeare.jsonl").touch()
    assert find_bundled(text) == text
