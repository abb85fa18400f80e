"""The command line: exit codes, one line per mistake, help, and the origin of every value."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megajax.config import Config, load_config
from megajax.config.cli import entry_point, parse_command_line
from megajax.config.keys import FIELDS

ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
import sys
from megajax.config.cli import entry_point, parse_command_line

@entry_point
def main(argv):
    loaded, options = parse_command_line("python -m driver", "Try.", argv, lambda config: {})
    print("layers", loaded.config.model.num_layers)

if __name__ == "__main__":
    sys.exit(main())
"""


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@entry_point
def main(argv: list[str]) -> int | None:
    loaded, options = parse_command_line(
        "python -m driver",
        "Try.",
        argv,
        lambda config: {},
        lambda parser: parser.add_argument("--dry-run", action="store_true"),
    )
    print("layers", loaded.config.model.num_layers, "dry" if options.dry_run else "wet")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["lr=1"], "megajax: error: unknown key `lr` on the command line: did you mean `optim.lr`?\n"),
        (["nowhere.yaml"], "megajax: error: configuration file nowhere.yaml not found in "),
        (["model.num_heads=32", "model.num_kv_heads=5"], "megajax: error: model.num_heads 32 is not a multiple of "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, expected):
    done = python(DRIVER, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(expected)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--micro-batch-size", "4"], "unknown option --micro-batch-size: write train.micro_batch_size=VALUE"),
        (["--load", "/run"], "unknown option --load: write output_dir=VALUE"),
        (["--no-load-optim"], "unknown option --no-load-optim: write init_from=VALUE"),
        (["--use-distributed-optimizer"], "unknown option --use-distributed-optimizer: write parallel.zero=1"),
        (["--use-megatron-fsdp"], "unknown option --use-megatron-fsdp: write parallel.fsdp=DEVICES"),
        (
            ["--num-layers-per-virtual-pipeline-stage", "2"],
            "unknown option --num-layers-per-virtual-pipeline-stage: write parallel.chunks=LAYERS/(PIPE*N)",
        ),
        (["--tensorboard-dir", "/tb"], "unknown option --tensorboard-dir: write log.tensorboard=true"),
        (["--use-rope-scaling"], "unknown option --use-rope-scaling: write model.rope_scaling_factor=8"),
        (["--disable-bias-linear"], "unknown option --disable-bias-linear: write model.bias=false"),
        (
            ["parallel.use_distributed_optimizer=true"],
            "unknown key `parallel.use_distributed_optimizer` on the command line: did you mean `parallel.zero=1`?",
        ),
        (
            ["tokenizer.type=Llama2Tokenizer"],
            "`tokenizer.type` is Llama2Tokenizer (command line): expected sentencepiece | gpt2_bpe | huggingface | "
            "bert_wordpiece | tiktoken | null: write tokenizer.type=sentencepiece tokenizer.bos=true",
        ),
        (["--optim.lr=3"], "unknown option --optim.lr=3: write optim.lr=VALUE"),
        (["--zzz"], "unknown option --zzz: --help lists all keys"),
        (["a.yaml", "b.yaml"], "more than one configuration file (a.yaml, b.yaml)"),
        (["--dry-run=3"], "argument --dry-run: ignored explicit argument '3'"),
    ],
)
def test_usage_mistakes_are_one_line_too(capsys, words, expected):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"megajax: error: {expected}")
    assert captured.err.count("\n") == 1


def test_words_and_options_mix_in_any_order(capsys, tmp_path):
    run = tmp_path / "lr=3" / "run.yaml"  # a path may contain an equals sign
    run.parent.mkdir()
    run.write_text("model: {num_layers: 3}")
    assert main([str(run), "optim.lr=1e-4", "--dry-run", "train.steps=5"]) == 0
    assert main(["--dry-run", "model.num_layers=3"]) == 0
    assert capsys.readouterr().out == "layers 3 dry\n" * 2


def test_print_config_says_where_every_value_comes_from(capsys, tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text("preset: models/gpt2_124m.yaml\noptim: {min_lr: 1.0e-5}")
    with pytest.raises(SystemExit) as stopped:
        main([str(run), "train.steps=7", "--print-config"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    lines = {key: line.split("  # ") for line in printed.splitlines() for key in [line.partition(": ")[0]]}
    rows = {key: (text.strip().partition(": ")[2], origin) for key, (text, origin) in lines.items()}
    assert set(rows) == {*FIELDS, "# model.padded_vocab_size"}
    assert rows["train.steps"] == ("7", "command line")
    assert rows["optim.min_lr"] == ("1.0e-05", f"file {run}")
    assert rows["model.vocab_size"] == ("50257", "preset models/gpt2_124m.yaml")
    assert rows["optim.lr"] == ("0.0003", "default")
    assert rows["model.head_dim"] == ("64", "derived")
    assert rows["model.ffn_hidden_size"] == ("3072", "derived")
    assert rows["model.num_kv_heads"] == ("12", "derived")
    assert rows["optim.decay_steps"] == ("7", "derived")
    assert rows["# model.padded_vocab_size"] == ("50304", "derived")

    run.write_text(printed)
    again = load_config(run).config
    assert again.model.head_dim == 64
    assert again.train == load_config("models/gpt2_124m.yaml", ["train.steps=7"]).config.train


def test_help_lists_every_key_with_type_default_and_meaning(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: python -m driver ")
    assert "  optim.lr (float) = 0.0003\n      Peak learning rate.\n" in shown
    assert "  model.num_kv_heads (int) = unset\n" in shown
    assert "  optim.decay_style (constant | linear | cosine | inverse_sqrt | wsd) = linear\n" in shown
    assert all(f"  {key} (" in shown for key in FIELDS)
    assert all(field.description for field in FIELDS.values())


def test_exit_codes_pass_through(capsys):
    @entry_point
    def interrupted(argv: list[str]) -> None:
        raise KeyboardInterrupt

    assert interrupted([]) == 130
    assert capsys.readouterr().err == "megajax: interrupted\n"
    assert entry_point(len)(["a", "b", "c"]) == 3
    assert entry_point(lambda argv: None)([]) == 0


def test_errors_of_the_system_say_how_to_mend_them(tmp_path: Path, capsys):
    def fails(error: OSError) -> str:
        @entry_point
        def main(argv: list[str]) -> None:
            raise error

        assert main([]) == 2
        return capsys.readouterr().err

    many = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/corpus.bin")
    assert fails(many) == "megajax: error: /corpus.bin: Too many open files: raise the limit (ulimit -n)\n"
    for wrong, remedy in ((tmp_path, "name a file"), (Path(__file__) / "x", "check the path")):
        with pytest.raises(OSError) as caught:
            wrong.read_text()
        assert fails(caught.value).endswith(f": {remedy}\n")


SPEAKS = """
import sys
from megajax.config.cli import entry_point

@entry_point
def main(argv):
    for number in range(100_000):
        print("\u2192", number)

@entry_point
def rich_main(argv):
    from rich.console import Console
    for number in range(10_000):
        Console().print("\u2192", number)

sys.exit({"print": main, "rich": rich_main}[sys.argv[1]]())
"""


@pytest.mark.parametrize("how", ["print", "rich"])
def test_a_reader_that_has_enough_ends_a_command_without_a_word(how: str):
    """`show ... | head` ended with code 1, like `cat` it ends with that of SIGPIPE."""
    command = [sys.executable, "-c", SPEAKS, how]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "\u2192 0\n".encode()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_terminal_of_ascii_stops_nothing():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    command = [sys.executable, "-c", SPEAKS, "print"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"\\u2192 0\n")


def test_arguments_are_read_only_by_a_called_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kernel", "-f", "k.json"])
    assert Config(train={"steps": 2}).train.steps == 2
    assert entry_point(len)() == 2


def test_importing_the_configuration_reads_no_arguments_and_needs_no_jax():
    code = "import sys, megajax.config.cli as c; c.Loaded; print('jax' in sys.modules)"
    done = python(code, "-f", "k.json")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
