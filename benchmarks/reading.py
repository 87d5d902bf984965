"""Seconds and peak memory of reading files: ``python -m benchmarks.reading [--quick]``.

The benchmark writes tables, series, texts and images of three sizes to a temporary folder. fedstill
reads each of them in a process of its own, with an empty cache, and another library reads the same
file. Seconds are without imports, whose seconds and memory are printed below the table. The peak is
the largest memory of the process. The files have just been written, so they come from the system's
memory and not from the disk.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.options import option_parser
from fedstill.engines.hardware import cores
from fedstill.report import terminal

IMAGE_SIDE = 64
CLASSES = 10


# Programs that read a file. Each runs in a process of its own.


@dataclass(frozen=True)
class Program:
    """Code that reads the file ``path`` and sets ``examples``, the number of examples in it."""

    name: str
    imports: str
    read: str


FEDSTILL = Program(
    name="fedstill",
    imports=(
        "import fedstill, torch, pyarrow.csv, pyarrow.parquet, PIL.Image\n"
        "load = fedstill.load_dataset\n"
    ),
    read="data = load(path)\nexamples = len(data.train) + len(data.test)\n",
)
PANDAS_CSV = Program(
    name="pandas",
    imports="import pandas\n",
    read="examples = len(pandas.read_csv(path))\n",
)
PANDAS_PARQUET = Program(
    name="pandas",
    imports="import pandas, pyarrow.parquet\n",
    read="examples = len(pandas.read_parquet(path))\n",
)
ARROW = Program(
    name="pyarrow",
    imports="import pyarrow.parquet\n",
    read="examples = len(pyarrow.parquet.read_table(path))\n",
)
PILLOW_FILES = Program(
    name="Pillow",
    imports="import pathlib, numpy, PIL.Image\n",
    read=(
        "files = sorted(pathlib.Path(path).glob('*/*.jpg'))\n"
        "examples = len([numpy.asarray(PIL.Image.open(file)) for file in files])\n"
    ),
)
PILLOW_PARQUET = Program(
    name="pyarrow, Pillow",
    imports="import io, numpy, PIL.Image, pyarrow.parquet\n",
    read=(
        "cells = pyarrow.parquet.read_table(path)['image'].to_pylist()\n"
        "files = [io.BytesIO(cell['bytes']) for cell in cells]\n"
        "examples = len([numpy.asarray(PIL.Image.open(file)) for file in files])\n"
    ),
)

CLOCK = """
import json, resource, sys, time

def peak():
    if sys.platform == "linux":
        # getrusage counts the process that started this one, too
        return 1024 * int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

began = time.perf_counter()
"""

STARTED = """
start_seconds = time.perf_counter() - began
start_peak = peak()
began = time.perf_counter()
"""

REPORT = """
seconds = time.perf_counter() - began
cost = {
    "examples": examples,
    "seconds": seconds,
    "peak": peak(),
    "start_seconds": start_seconds,
    "start_peak": start_peak,
}
print(json.dumps(cost))
"""


@dataclass(frozen=True)
class Cost:
    """The cost of a program: seconds to read after its imports, and the peak memory in bytes.

    start_seconds, start_peak: of the imports alone.
    """

    examples: int
    seconds: float
    peak: int
    start_seconds: float
    start_peak: int


def median_cost(program: Program, path: Path, times: int) -> Cost:
    """The cost of reading in the process with the median time, among so many processes."""
    costs = sorted((cost(program, path) for _ in range(times)), key=lambda cost: cost.seconds)
    return costs[len(costs) // 2]


def cost(program: Program, path: Path) -> Cost:
    """The cost of reading in a new process with an empty cache.

    Raises CalledProcessError if the process fails.
    """
    code = f"path = {str(path)!r}\n{CLOCK}{program.imports}{STARTED}{program.read}{REPORT}"
    with tempfile.TemporaryDirectory() as cache:
        process = subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "FEDSTILL_CACHE": cache},
        )
    return Cost(**json.loads(process.stdout.splitlines()[-1]))


# Files.


def labels(count: int) -> np.ndarray[Any, Any]:
    """Class ids; all classes have the same number."""
    return np.arange(count) % CLASSES


def table(count: int) -> pd.DataFrame:
    """Twelve columns of integers, six of decimal numbers, and a label."""
    draw = np.random.default_rng(0)
    columns: dict[str, Any] = {}
    for index in range(12):
        columns[f"count{index}"] = draw.integers(0, 100, count)
    for index in range(6):
        columns[f"measured{index}"] = draw.normal(120, 15, count).round(1)
    columns["label"] = labels(count)
    return pd.DataFrame(columns)


def write_csv(path: Path, count: int) -> None:
    """A table as CSV."""
    table(count).to_csv(path, index=False)


def write_parquet(path: Path, count: int) -> None:
    """A table as parquet."""
    table(count).to_parquet(path, index=False)


def write_series(path: Path, count: int) -> None:
    """Series of 3 channels and 128 steps, as lists of lists."""
    draw = np.random.default_rng(0)
    values = pa.array(draw.normal(size=count * 3 * 128).astype("float32"))
    channel_offsets = np.arange(0, 3 * 128 * count + 1, 128, dtype="int32")
    channels = pa.ListArray.from_arrays(channel_offsets, values)
    series_offsets = np.arange(0, 3 * count + 1, 3, dtype="int32")
    series = pa.ListArray.from_arrays(series_offsets, channels)
    pq.write_table(pa.table({"signal": series, "label": labels(count)}), path)


def write_texts(path: Path, count: int) -> None:
    """Texts of 20 to 60 words out of 20,000, as parquet."""
    draw = np.random.default_rng(0)
    words = np.array([f"word{number}" for number in range(20_000)])
    lengths = draw.integers(20, 60, count)
    texts = [" ".join(words[draw.integers(0, len(words), length)]) for length in lengths]
    pq.write_table(pa.table({"text": texts, "label": labels(count)}), path)


def jpegs(folder: Path, count: int) -> list[Path]:
    """JPEG files of smooth colours, in folders by class."""
    draw = np.random.default_rng(0)
    paths = []
    for number in range(count):
        class_folder = folder / f"class{number % CLASSES}"
        class_folder.mkdir(parents=True, exist_ok=True)
        path = class_folder / f"{number:06}.jpg"
        small = Image.fromarray(draw.integers(0, 255, (8, 8, 3), dtype="uint8"))
        small.resize((IMAGE_SIDE, IMAGE_SIDE)).save(path)
        paths.append(path)
    return paths


def write_image_folder(path: Path, count: int) -> None:
    """Images as JPEG files."""
    jpegs(path, count)


def write_image_parquet(path: Path, count: int) -> None:
    """The same JPEG files in a column of parquet."""
    with tempfile.TemporaryDirectory() as folder:
        files = jpegs(Path(folder), count)
        cells = [{"bytes": file.read_bytes(), "path": file.name} for file in files]
    pq.write_table(pa.table({"image": cells, "label": labels(count)}), path)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Files of one kind.

    file: the name of the file. write: writes a file with so many examples. sizes: the numbers of
    examples, in ascending order. yardstick: the program that reads the same file.
    """

    name: str
    group: str
    file: str
    write: Callable[[Path, int], None]
    sizes: tuple[int, ...]
    yardstick: Program


TABLE_SIZES = (10_000, 100_000, 1_000_000)
IMAGE_SIZES = (200, 2_000, 20_000)

SERIES_SIZES = (1_000, 10_000, 100_000)
TEXT_SIZES = (2_000, 20_000, 200_000)

CASES = (
    Case(
        name="table, parquet",
        group="tables",
        file="rows.parquet",
        write=write_parquet,
        sizes=TABLE_SIZES,
        yardstick=PANDAS_PARQUET,
    ),
    Case(
        name="table, CSV",
        group="tables",
        file="rows.csv",
        write=write_csv,
        sizes=TABLE_SIZES,
        yardstick=PANDAS_CSV,
    ),
    Case(
        name="series of 3 × 128",
        group="series",
        file="waves.parquet",
        write=write_series,
        sizes=SERIES_SIZES,
        yardstick=ARROW,
    ),
    Case(
        name="texts",
        group="texts",
        file="news.parquet",
        write=write_texts,
        sizes=TEXT_SIZES,
        yardstick=PANDAS_PARQUET,
    ),
    Case(
        name="JPEGs in folders",
        group="images",
        file="photos",
        write=write_image_folder,
        sizes=IMAGE_SIZES,
        yardstick=PILLOW_FILES,
    ),
    Case(
        name="JPEGs in parquet",
        group="images",
        file="photos.parquet",
        write=write_image_parquet,
        sizes=IMAGE_SIZES,
        yardstick=PILLOW_PARQUET,
    ),
)


# Measuring and printing.


@dataclass(frozen=True)
class Row:
    """The cost of reading the files of a case, with fedstill and with the yardstick."""

    case: str
    file_bytes: int
    fedstill: Cost
    yardstick: str
    yardstick_cost: Cost


def file_bytes(path: Path) -> int:
    """The size of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def measure(case: Case, count: int, times: int = 1) -> Row:
    """Write the files of a case, and read them with fedstill and with its yardstick.

    Raises RuntimeError if a program reads another number of examples.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / case.file
        case.write(path, count)
        row = Row(
            case=case.name,
            file_bytes=file_bytes(path),
            fedstill=median_cost(FEDSTILL, path, times),
            yardstick=case.yardstick.name,
            yardstick_cost=median_cost(case.yardstick, path, times),
        )
    costs = {FEDSTILL.name: row.fedstill, row.yardstick: row.yardstick_cost}
    for name, program_cost in costs.items():
        if program_cost.examples != count:
            raise RuntimeError(f"{name} read {program_cost.examples} of {count} examples")
    return row


HEAD = [
    "",
    "examples",
    "file, MB",
    "fedstill, s",
    "peak, MB",
    "compared with",
    "seconds",
    "peak, MB",
    "times as long",
]


def cells(row: Row) -> list[str]:
    """A row of the printed table."""
    return [
        row.case,
        f"{row.fedstill.examples:,}",
        f"{row.file_bytes / 1e6:.1f}",
        f"{row.fedstill.seconds:.2f}",
        f"{row.fedstill.peak / 1e6:,.0f}",
        row.yardstick,
        f"{row.yardstick_cost.seconds:.2f}",
        f"{row.yardstick_cost.peak / 1e6:,.0f}",
        f"{row.fedstill.seconds / row.yardstick_cost.seconds:.1f}",
    ]


def show(rows: Sequence[Row]) -> None:
    """Print the table, and the median start-up of each program."""
    screen = terminal.console()
    # A file should get complete lines.
    screen.width = max(screen.width, 120)
    screen.print(terminal.PlainTable(HEAD, [cells(row) for row in rows]))
    costs: dict[str, list[Cost]] = {"fedstill": [row.fedstill for row in rows]}
    for row in rows:
        costs.setdefault(row.yardstick, []).append(row.yardstick_cost)
    for name, starts in costs.items():
        seconds = statistics.median(start.start_seconds for start in starts)
        peak = statistics.median(start.start_peak for start in starts)
        screen.print(f"start-up of {name} (imports): {seconds:.2f} s, {peak / 1e6:,.0f} MB")


def recorded(rows: Sequence[Row]) -> Mapping[str, Any]:
    """The contents of the JSON file."""
    return {
        "cores": cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "rows": [asdict(row) for row in rows],
    }


def main() -> None:
    """Measure the cases, and print and write their costs."""
    groups = list(dict.fromkeys(case.group for case in CASES))
    parser = option_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="only the smallest size of each case")
    parser.add_argument("--largest", action="store_true", help="only the largest size")
    parser.add_argument("--only", nargs="+", choices=groups, default=groups, metavar="GROUP")
    parser.add_argument(
        "--times", type=int, default=3, help="processes of each, whose median is printed"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything here")
    options = parser.parse_args()

    sizes = slice(None)
    if options.quick:
        sizes = slice(1)
    elif options.largest:
        sizes = slice(-1, None)
    rows = []
    for case in CASES:
        if case.group not in options.only:
            continue
        for count in case.sizes[sizes]:
            rows.append(measure(case, count, options.times))
            print(" ".join(cells(rows[-1])), file=sys.stderr, flush=True)
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(recorded(rows), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
