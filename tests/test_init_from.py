"""Training that starts from the weights of another run, or of a Hugging Face model."""

from __future__ import annotations

from pathlib import Path

import pytest

from megajax.config import ConfigError, load_config
from megajax.convert import main as convert
from megajax.train import main, train
from tests.runs import ALL_DEVICES, WORDS, arrays, records

SHORT = ["train.steps=2", "optim.warmup_steps=0", "checkpoint.every=2", "evaluation.every=2", "model.hidden_dropout=0"]


@pytest.fixture(scope="module")
def base(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 steps."""
    output = tmp_path_factory.mktemp("runs") / "base"
    assert main([*WORDS, *ALL_DEVICES, *SHORT, f"data.text={corpus}", f"output_dir={output}"]) == 0
    return output


def words(base: Path, corpus: Path, output: Path) -> list[str]:
    """What the next run says: nothing of the architecture, another layout."""
    said = [word for word in [*WORDS, *ALL_DEVICES, *SHORT] if not word.startswith(("model.", "tokenizer."))]
    layout = ["parallel.data=2", "parallel.fsdp=1", "parallel.tensor=2", "parallel.pipe=2", "train.micro_batch_size=2"]
    return [*said, *layout, f"init_from={base}", f"data.text={corpus}", f"output_dir={output}"]


def losses(output: Path) -> list[float]:
    """Validation losses."""
    return [float(str(line["lm loss validation"])) for line in records(output) if "lm loss validation" in line]


def test_begins_where_the_other_ended_with_a_fresh_optimizer(base: Path, corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "next"
    result = train(load_config(None, words(base, corpus, output)).config)

    before, after = losses(base), losses(output)
    assert after[0] == pytest.approx(before[-1], rel=1e-6)
    assert after[-1] < after[0]
    assert (result.step, int(arrays(output, 2)["step"])) == (2, 2)
    config = load_config(output / "config.yaml").config
    assert (config.model.hidden_size, config.tokenizer.vocab_size) == (32, 50)


def test_a_hugging_face_model_is_imported_on_the_way(base: Path, corpus: Path, tmp_path: Path) -> None:
    """The export of the run gives the same start as the run, and starting again goes on."""
    model, output = tmp_path / "model", tmp_path / "next"
    assert convert(["export", str(base), "--out", str(model)]) == 0
    said = [*words(model, corpus, output), "tokenizer.type=null", "tokenizer.vocab_size=50", "data.split=90,10,0"]

    assert main([*said, "train.steps=1"]) == 0
    assert losses(output)[0] == pytest.approx(losses(base)[-1], rel=1e-6)
    assert main(said) == 0
    assert len(losses(output)) >= 3


def test_what_is_neither_is_refused(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, corpus, tmp_path / "next")) == 2
    assert "neither a run (config.yaml) nor a Hugging Face model (config.json)" in capsys.readouterr().err


def test_an_architecture_of_its_own_is_refused(base: Path, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"blocks\.mlp\.fc1"):
        train(load_config(None, [*words(base, corpus, tmp_path / "next"), "model.ffn_hidden_size=64"]).config)
