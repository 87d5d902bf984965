"""No file that fedstill reads can run code: none is a pickle, by the source and by watching a run made and resumed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "fedstill"
FORBIDDEN = re.compile(
    r"\b(pickle|cPickle|dill|cloudpickle|joblib|marshal|shelve)\b"
    r"|(?<!safetensors\.)torch\.(load|save)\(|yaml\.load\(|(?<![\w.])(eval|exec)\(|allow_pickle=True"
)

WATCHED = """
import sys
import fedstill
from fedstill.experiment.running.runner import resume
from fedstill.report.page import write_page
from pathlib import Path

met = []
sys.addaudithook(lambda event, args: met.append(args) if event == "pickle.find_class" else None)
out = Path(sys.argv[1])
fedstill.run(fedstill.Experiment(method="moon", rounds=1, topology={"clients": 4, "sampled": 2}), out=out)
(out / "summary.json").unlink()
resume(out)
write_page([out], out / "report.html")
print("pickles met:", met)
"""


def test_the_source_names_no_pickle() -> None:
    met = {
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if FORBIDDEN.search(line.partition("#")[0]) and "never a pickle" not in line
    }
    assert not met


def test_no_pickle_is_read_while_a_run_is_made_resumed_and_shown(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WATCHED, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("pickles met: []")
