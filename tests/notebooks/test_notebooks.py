"""Every notebook runs from top to bottom in a fresh kernel of this interpreter, and so do usual steps in a notebook."""

import math
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


class ThisInterpreter(AsyncKernelManager):
    """Starts kernels of the interpreter that runs the tests, whatever is registered on the machine."""

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python", language="python")


def run(notebook: nbformat.NotebookNode, directory: Path) -> list[str]:
    """Execute all cells in `directory`, on one CPU device unless they ask for more; what each code cell printed."""
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    place = {"metadata": {"path": str(directory)}}
    client = NotebookClient(notebook, kernel_manager_class=ThisInterpreter, timeout=300, resources=place)
    client.execute(env=environment)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(out.text for out in cell.outputs if out.get("name") == "stdout") for cell in code]


def images(notebook: nbformat.NotebookNode, kind: str) -> list[str]:
    """What the cells have drawn."""
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    return [out["data"][kind] for out in outputs if kind in out.get("data", {})]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_is_stored_without_outputs(path: Path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.cell_type != "code" or (cell.outputs, cell.execution_count) == ([], None)
        assert cell.metadata == {}


def test_train(tmp_path: Path):
    notebook = nbformat.read(ROOT / "notebooks/01_train.ipynb", as_version=4)
    _, origins, training, _, summary, text, sharding = run(notebook, tmp_path)
    assert "optim.lr: file quickstart.yaml" in origins
    assert "finished 60 steps" in training
    first, last = map(float, re.search(r"validation loss (\S+) -> (\S+)", summary).groups())
    assert first == pytest.approx(math.log(512), abs=0.1)
    assert last < 0.9 * first
    assert float(re.search(r"median speed (\S+) tokens", summary)[1]) > 0
    assert text.startswith("KING HENRY. ")
    assert "[40 tokens, length]" in text
    assert re.match(r"174\.6 billion parameters: \d+\.\d GiB per GPU\n", sharding)
    assert len(images(notebook, "image/png")) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_sharding_rules(tmp_path: Path):
    """Over tensor, in 2 x 4 loops: 6 gathers and 4 sums with sequence parallelism, 4 sums and no gather without."""
    notebook = nbformat.read(ROOT / "notebooks/02_sharding_rules.ipynb", as_version=4)
    _, table, shards, _, step, layers, unsplit, uncut, _, losses = run(notebook, tmp_path)
    assert re.search(r"^embed +fsdp +- +ZeRO-3", table, re.MULTILINE)
    assert re.search(r"^blocks.mlp.fc1 .*\(4, 64, 1, 256\) -> \(4, 32, 1, 128\)$", shards, re.MULTILINE)
    residual = r"tensor +f32\[2,64,64\] .* 2 x 4$"
    assert re.search(rf"^ +{6 * 2 * 4}  all-gather +{residual}", step, re.MULTILINE)
    assert re.search(rf"^ +{4 * 2 * 4}  all-reduce +{residual}", step, re.MULTILINE)
    assert re.search(r"^ +1  all-reduce +data +f32\[4,32,1,128\]", step, re.MULTILINE)
    assert [int(count) for count in re.findall(r"^ +(\d+)  all-", layers, re.MULTILINE)] == [16, 16, 32, 16]
    assert re.search(rf"^ +{4 * 2 * 4}  all-reduce +{residual}", unsplit, re.MULTILINE)
    assert "all-gather" not in unsplit
    assert re.search(r"all-gather +tensor +f32\[2,64,256\]", uncut)
    first, *others = ([float(loss) for loss in line.split()[-3:]] for line in losses.splitlines())
    assert others == [pytest.approx(first, abs=2e-6)] * 2
    assert len(images(notebook, "image/png")) == 4


def test_pipeline_schedules(tmp_path: Path):
    notebook = nbformat.read(ROOT / "notebooks/03_pipeline_schedules.ipynb", as_version=4)
    *_, ticks, _, _, memory, losses, poisoned = run(notebook, tmp_path)
    assert "stage 0  F0.0 F0.1 F0.2 F0.3 F1.0 F1.1 F1.2 F1.3 .    ." in ticks
    few, many = (float(size) for size in re.findall(r"(\S+) MiB", memory))
    assert many < 1.1 * few
    assert [float(loss) for loss in re.findall(r"loss (\S+) on 4 stages", losses)] == pytest.approx(
        [float(loss) for loss in re.findall(r"(\S+) on one device", losses)], abs=2e-6
    )
    assert "departures=()" in losses
    loss, without_poison = re.match(r"loss (\S+), without poison (\S+)\n", poisoned).groups()
    assert float(loss) == pytest.approx(float(without_poison), abs=2e-6)
    assert re.search(r"gradients without NaN: (\d+) of \1$", poisoned)
    assert len(images(notebook, "image/svg+xml")) == 4
    assert len(images(notebook, "image/png")) == 1


def test_will_it_fit(tmp_path: Path):
    """80 GB are too few with tensor parallelism alone, enough with the rest; step times are within 10 %."""
    notebook = nbformat.read(ROOT / "notebooks/04_will_it_fit.ipynb", as_version=4)
    _, models, _, memory, times, _, scaling, today, table = run(notebook, tmp_path)
    assert re.findall(r"^ *(\S+): +(\S+) billion", models, re.MULTILINE) == [
        ("22B", "22.1"), ("175B", "174.6"), ("530B", "529.6"), ("1T", "1008.0")
    ]  # fmt: skip
    held = {name: float(size) for name, size in re.findall(r"'([^']+)': '(\S+) GiB'", memory)}
    assert all((size > 79.3) == name.endswith(" alone") for name, size in held.items())
    assert len(held) == 3 * 4
    errors = [int(error) for error in re.findall(r" ([+-]\d+)%", times)]
    assert len(errors) == 2 * 4
    assert max(map(abs, errors)) < 10
    assert int(re.search(r"worst error (\d+)%", scaling)[1]) < 10
    assert re.findall(r"^(\S+) .*: fits,", today, re.MULTILINE) == ["A100-80GB", "H100", "H200", "B200", "GB200"]
    assert "fits: " in table
    assert len(images(notebook, "image/png")) == 4


CELLS = [
    """
import sys
from megajax.config import Config, InputError
from megajax.train import train
print(sys.argv[1:2])
""",
    """
def configuration(steps, **parallel):
    return Config(
        output_dir="run",
        model={"num_layers": 1, "hidden_size": 16, "num_heads": 2, "max_positions": 8},
        tokenizer={"type": "null", "vocab_size": 9},
        data={"text": ["numbers.jsonl"], "seq_length": 8, "split": "1,0,0"},
        train={"steps": steps, "global_batch_size": 2},
        parallel=parallel,
    )
print(train(configuration(2, simulate_devices=2)).step)
""",
    """
print(train(configuration(2, simulate_devices=2)).step)
print(train(configuration(4, simulate_devices=2, tensor=2)).step)
""",
    """
try:
    train(configuration(6, simulate_devices=4))
except InputError as error:
    print(error)
""",
]


def test_train_again_in_the_same_kernel(tmp_path: Path):
    """A configuration from dicts; the kernel's own arguments are not read; the mesh may change, not the devices."""
    (tmp_path / "numbers.jsonl").write_text('{"text": "1 2 3 4 5 6 7 8 0"}\n' * 8)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    arguments, first, again, refused = run(notebook, tmp_path)
    assert arguments == "['-f']\n"
    assert "mesh: data 2 (cpu)" in first
    assert first.endswith("\n2\n")
    assert "finished its 2 steps: nothing to do" in again
    assert "resumed at step 2 of 4" in again
    assert "mesh: tensor 2 (cpu)" in again
    assert again.endswith("\n4\n")
    assert refused.startswith("parallel.simulate_devices=4: JAX already runs on 2 cpu device(s) in this process")
    assert "restart the notebook kernel" in refused
