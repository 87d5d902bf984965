"""The small runs that ``tools/golden.py`` repeats in two source trees.

``python -m tools.golden_cells OUT`` carries all of them out with the ``fedstill`` that Python
imports, and writes their results to one JSON file. Only names that fedstill keeps are used: an
older tree and a newer one must both be able to run this file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
import tomllib
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

import fedstill
from tools.golden_edges import EDGES, register_edges
from tools.golden_outputs import output_cells

Config = dict[str, Any]
Fields = dict[str, Any]

ENGINES = ("serial", "pooled", "vectorised", "flower")
"""The engines, by the name that a config has for them; ``flower`` runs over a loopback grid."""

TOPOLOGIES = ("parallel", "sequential", "public_logits", "peer_to_peer")

PUBLIC = 12
"""The number of public examples where a method or a topology needs some."""

MLP: Config = {"name": "mlp", "hidden": (8,)}

MODELS: dict[str, Config] = {
    "fedetf": {"name": "etf", "of": "mlp", "arguments": {"hidden": [8]}},
    "fedalign": {"name": "resnet56"},
    "fml": {
        "name": "pair",
        "own": "mlp",
        "own_arguments": {"hidden": [6]},
        "shared": "mlp",
        "shared_arguments": {"hidden": [8]},
    },
}
"""The networks of methods that cannot use a plain one."""

NEEDS_PUBLIC = {"fedbe", "feddf", "fedgkd_vote", "qkt_light_server", "qkt_var_e"}
"""Methods that need public data on every topology."""

ASKS_PEERS = {
    "clue",
    "naive_kd",
    "pfnm",
    "qkt",
    "qkt_light",
    "qkt_light_server",
    "qkt_light_volunteer",
    "qkt_var_e",
}
"""Methods whose clients ask their peers for classes."""

FIELDS: dict[str, Config] = {
    "fedgen": {"name": "fedgen", "samples": 64},
    "naive_kd": {"name": "naive_kd", "over_teachers": "mean"},
    "qkt_light": {"name": "qkt_light", "phase1_over": "mean"},
    "qkt_light_server": {"name": "qkt_light_server", "phase1_over": "mean"},
    "qkt_light_volunteer": {"name": "qkt_light_volunteer", "phase1_over": "mean"},
    "sfedkd": {"name": "sfedkd", "tau2_scale": True},
}
"""Fields of methods whose defaults take long, or have changed since the earlier commit."""


@dataclass(frozen=True)
class Cell:
    """One run: a name, a config, its data, and the stage after which it is stopped and resumed."""

    name: str
    config: Config
    data: str = "images"
    stop_after: int = 2
    quick: bool = False


@dataclass
class StopAfter:
    """Asks a run to stop after a number of stages."""

    stages: int
    completed: int = field(default=0)

    def started(self, folder: Path, round: int) -> None:
        """Does nothing."""

    def stage(self, round: int, rounds: int, index: int, stages: int) -> None:
        """Does nothing."""

    def round(self, event: Mapping[str, Any], rounds: int) -> None:
        """Does nothing."""

    def stop(self) -> bool:
        """Return True after the last stage that may run."""
        self.completed += 1
        return self.completed == self.stages


# ---- data -------------------------------------------------------------------------------------


def images(side: int = 4, channels: int = 1) -> Any:
    """Five Gaussian classes as images."""
    draws = torch.Generator().manual_seed(0)
    pixels = channels * side * side
    centres = torch.randn(5, pixels, generator=draws)

    def split(size: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(size) % 5
        values = centres[labels] + 0.7 * torch.randn(size, pixels, generator=draws)
        shades = (128 + 45 * values).clamp(0, 255).to(torch.uint8)
        return shades.reshape(size, channels, side, side), labels

    return fedstill.from_tensors("images", split(150), split(60))


def numbers(kind: Any, shape: tuple[int, ...]) -> Any:
    """Four Gaussian classes as rows of a table or as series."""
    draws = torch.Generator().manual_seed(1)
    centres = torch.randn(4, *shape, generator=draws)

    def split(size: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(size) % 4
        return centres[labels] + 0.7 * torch.randn(size, *shape, generator=draws), labels

    return fedstill.from_tensors(kind, split(96), split(40), kind=kind)


def texts() -> Any:
    """Four classes of token ids; every class prefers seven words."""
    draws = torch.Generator().manual_seed(2)

    def split(size: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(size) % 4
        preferred = 1 + 7 * labels.unsqueeze(1) + torch.randint(7, (size, 12), generator=draws)
        others = torch.randint(1, 30, (size, 12), generator=draws)
        words = torch.where(torch.rand(size, 12, generator=draws) < 0.5, preferred, others)
        ends = torch.randint(3, 13, (size, 1), generator=draws)
        return words * (torch.arange(12) < ends), labels

    return fedstill.from_tensors("texts", split(96), split(40), vocabulary=30)


def dataset(name: str) -> Any:
    """A data set of this file by its name."""
    match name:
        case "images":
            return images()
        case "pictures":
            return images(side=8, channels=3)
        case "larger pictures":
            return images(side=12, channels=3)
        case "table":
            return numbers("table", (6,))
        case "series":
            return numbers("series", (2, 16))
        case _:
            return texts()


# ---- cells ------------------------------------------------------------------------------------


def base_config(method: str | Config) -> Config:
    """A run of three short rounds."""
    if isinstance(method, str):
        method = FIELDS.get(method, method)
    return {
        "rounds": 3,
        "seed": 7,
        "engine": "serial",
        "threads": (1, 1),
        "reuse": False,
        "measure": (),
        "model": MLP,
        "method": method,
        "partition": {"kind": "dirichlet", "alpha": 1.0, "min_size": 4},
        "topology": {"clients": 5, "sampled": 3},
        "plan": {"epochs": 1, "batch": 16, "lr": 0.05, "momentum": 0.9},
    }


def changed(config: Config, **changes: Any) -> Config:
    """A config with some of its keys replaced."""
    return {**config, **changes}


def method_names() -> list[str]:
    """The names of all methods of the package, read from its source."""
    folder = Path(str(fedstill.__file__)).parent / "methods"
    pattern = re.compile(r"""^@(?:\w+\.)?method\(\s*"(\w+)\"""", re.MULTILINE)
    sources = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))]
    return sorted({name for source in sources for name in pattern.findall(source)})


def method_config(method: str, topology: str) -> Config:
    """A run of a method on a topology, with everything that the method needs."""
    config = base_config(method)
    config["model"] = MODELS.get(method, MLP)
    config["topology"] = {"kind": topology, "clients": 5, "sampled": 3}
    if method in NEEDS_PUBLIC or topology == "public_logits":
        config["data"] = {"public": PUBLIC}
    if topology == "peer_to_peer":
        config["rounds"] = 1
        config["topology"] = {"kind": topology, "clients": 5}
    if method in ASKS_PEERS:
        config["query"] = {"draw": "single", "fewer_than": 8}
    if method == "fedalign" and topology != "peer_to_peer":
        config["rounds"] = 2
    return config


def method_cells() -> Iterator[Cell]:
    """Every method on every topology with every engine."""
    for method in method_names():
        for topology in TOPOLOGIES:
            config = method_config(method, topology)
            stop_after = 1 if topology == "peer_to_peer" else 2
            for engine in ENGINES:
                name = f"{method}/{topology}/{engine}"
                quick = engine == "serial" and method != "fedalign"
                with_engine = changed(config, engine=engine)
                yield Cell(name, with_engine, stop_after=stop_after, quick=quick)


def on_engines(name: str, config: Config, engines: tuple[str, ...], **rest: Any) -> Iterator[Cell]:
    """A run with several engines; the first of them belongs to the quick set."""
    for engine in engines:
        quick = engine == engines[0]
        yield Cell(f"{name}/{engine}", changed(config, engine=engine), quick=quick, **rest)


def kind_cells() -> Iterator[Cell]:
    """Tables, series and texts."""
    networks: dict[str, Config] = {
        "table": MLP,
        "series": {"name": "series_cnn", "hidden": 8},
        "texts": {"name": "bag", "width": 6, "hidden": (8,)},
    }
    for data, network in networks.items():
        for method in ("fedavg", "fedntd", "sfedkd"):
            config = changed(base_config(method), model=network)
            yield from on_engines(f"kind {data} {method}", config, ENGINES, data=data)


def stream_cells() -> Iterator[Cell]:
    """Tasks over time."""
    streams: dict[str, Config] = {
        "classes": {"kind": "classes", "tasks": 2, "head": "seen"},
        "classes late": {"kind": "classes", "tasks": 2, "lag": 1, "stay": 0.3, "join": 0.6},
        "clients first": {"kind": "classes", "tasks": 2, "compose": "clients_first"},
        "kept": {"kind": "classes", "tasks": 2, "past": "kept"},
        "domains": {"kind": "domains", "tasks": 2, "transform": "rotate90"},
        "drift": {"kind": "drift", "tasks": 2},
    }
    for name, stream in streams.items():
        for method in ("fedavg", "fedntd", "replay", "fedgen", "sfedkd"):
            config = changed(base_config(method), rounds=4, stream=stream)
            engines = ("serial", "flower") if method in ("fedavg", "replay") else ("serial",)
            yield from on_engines(f"stream {name} {method}", config, engines)
    for method in ("fedewc", "fot", "glfc_local", "analytic", "afl"):
        config = changed(base_config(method), rounds=4, stream=streams["classes"])
        yield from on_engines(f"stream classes {method}", config, ("serial", "pooled"))


def privacy_cells() -> Iterator[Cell]:
    """Secure sums, private training, and noise on logits."""
    everybody = {"clients": 5}
    secure = {"secure_sum": True}
    for method in ("fedavg", "fedntd"):
        config = changed(base_config(method), privacy=secure, topology=everybody)
        yield from on_engines(f"secure sums {method}", config, ENGINES)
    private = {"gradient_clip": 1.0, "gradient_noise": 0.8}
    for method in ("fedavg", "fedntd", "fedseq"):
        config = changed(base_config(method), privacy=private)
        yield from on_engines(f"private training {method}", config, ("serial", "pooled", "flower"))
    both = changed(base_config("fedavg"), privacy={**private, **secure}, topology=everybody)
    yield from on_engines("private training in secure sums", both, ("serial",))
    budget = changed(base_config("fedavg"), privacy={**private, "epsilon": 4.0}, rounds=6)
    yield from on_engines("private training with a budget", budget, ("serial", "flower"))
    noise = {"noise": 0.5, "clip": 5.0}
    for method in ("dsfl", "hiper_fedkd"):
        config = changed(method_config(method, "public_logits"), privacy=noise)
        yield from on_engines(f"noise on logits {method}", config, ("serial", "pooled", "flower"))


def query_cells() -> Iterator[Cell]:
    """Clients that query their peers: several classes, several reasons, and repeated queries."""
    several = {"draw": "multi", "fewer_than": 12, "least": 1}
    again: Config = {
        "draw": "all",
        "by": ["lack", "accuracy"],
        "fewer_than": 3,
        "accuracy_under": 0.9,
        "again": "mixed",
        "data_at_first": 0.5,
    }
    held_out = {"epochs": 1, "batch": 16, "lr": 0.05, "validation": 0.2}
    for method in ("qkt", "qkt_light", "naive_kd", "local_only", "ensemble"):
        config = changed(method_config(method, "peer_to_peer"), query=several)
        yield from on_engines(f"query several {method}", config, ("serial", "flower"), stop_after=1)
    for method in ("qkt", "naive_kd"):
        config = changed(
            method_config(method, "peer_to_peer"), query=again, rounds=2, plan=held_out
        )
        yield from on_engines(f"query again {method}", config, ("serial", "flower"))
    written = {"classes": {"1": [0], "3": [2, 4]}}
    config = changed(method_config("qkt", "peer_to_peer"), query=written)
    yield from on_engines("query written qkt", config, ("serial",), stop_after=1)


def plan_cells() -> Iterator[Cell]:
    """Optimisers, schedules, early stopping, precision, augmentation and normalisation."""
    plans: dict[str, Config] = {
        "adam": {"epochs": 2, "batch": 16, "lr": 0.01, "optimiser": "adam", "clip_norm": 1.0},
        "cosine": {"steps": 3, "batch": 8, "lr": 0.1, "lr_schedule": "cosine", "lr_warmup": 1},
        "best": {"epochs": 3, "batch": 16, "validation": 0.3, "keep": "best", "patience": 1},
    }
    for name, plan in plans.items():
        for method in ("fedavg", "fedntd"):
            config = changed(base_config(method), plan=plan)
            yield from on_engines(f"plan {name} {method}", config, ENGINES)
    augmented = {"augment": ["crop", "flip", "cutout", "rotation"]}
    for method in ("fedavg", "fedntd", "moon"):
        config = changed(base_config(method), model={"name": "tiny_cnn"}, data=augmented)
        yield from on_engines(f"augmented {method}", config, ENGINES, data="pictures")
    bf16 = changed(base_config("fedntd"), precision="bf16", model={"name": "tiny_cnn"})
    yield from on_engines("bf16 fedntd", bf16, ("serial", "pooled"), data="pictures")
    batch_norm = changed(
        base_config("fedavg"), model={"name": "resnet10", "norm": "batch"}, rounds=2
    )
    yield from on_engines("batch norm", batch_norm, ("serial", "pooled"), data="larger pictures")


def client_cells() -> Iterator[Cell]:
    """Hostile clients, robust means, and networks that differ."""
    robust: Config = {"name": "fedavg", "aggregation": "median"}
    for attack in ("sign_flip", "scaled", "label_flip"):
        clients = {"attack": attack, "attackers": 0.3}
        config = changed(base_config(robust), clients=clients, topology={"clients": 5})
        yield from on_engines(f"hostile {attack}", config, ("serial", "flower"))
    differing = {"models": ("mlp", "logistic")}
    for method in ("hiper_fedkd", "fedmd", "dsfl"):
        config = changed(method_config(method, "public_logits"), clients=differing)
        yield from on_engines(f"networks differ {method}", config, ("serial", "pooled", "flower"))
    for method in ("qkt", "local_only"):
        config = changed(method_config(method, "peer_to_peer"), clients=differing)
        yield from on_engines(f"networks differ {method}", config, ("serial",), stop_after=1)


def measure_cells() -> Iterator[Cell]:
    """Measures, in a round of each topology."""
    common = ("local", "epochs", "personal", "leakage")
    with_models = (*common, "alignment", "divergence", "diversity", "contributions", "units")
    for method, measures in {
        "fedavg": (*with_models, "tsne", "landscape"),
        "fedntd": with_models,
        "sfedkd": (*common, "chain", "contributions"),
    }.items():
        config = changed(base_config(method), measure=measures, measure_every=2)
        yield from on_engines(f"measures {method}", config, ("serial", "pooled", "flower"))
    public = changed(
        method_config("hiper_fedkd", "public_logits"), measure=("local", "private_public")
    )
    yield from on_engines("measures hiper_fedkd", public, ("serial", "flower"))
    asking = changed(
        method_config("qkt", "peer_to_peer"), measure=("local", "boundaries", "contributions")
    )
    yield from on_engines("measures qkt", asking, ("serial",), stop_after=1)


def partition_cells() -> Iterator[Cell]:
    """Every way to split the data that needs no further column."""
    partitions: dict[str, Config] = {
        "extended_dirichlet": {"classes_per_client": 2, "alpha": 0.5, "min_size": 2},
        "hiper": {"alpha": 1.0},
        "hybrid": {"iid_share": 0.4, "alpha": 0.5},
        "iid": {},
        "pathological": {"classes_per_client": 2},
        "sharding": {"shards": 2},
        "flower_datasets": {},
    }
    for kind, fields in partitions.items():
        config = changed(base_config("fedavg"), partition={"kind": kind, **fields})
        yield from on_engines(f"partition {kind}", config, ("serial",))


def edge_cells() -> Iterator[Cell]:
    """Methods at the edges of the interface (``tools/golden_edges.py``)."""
    for name, topology in EDGES.items():
        config = changed(base_config(name), topology={"kind": topology, "clients": 5})
        tolerant = changed(config, clients={"failures": "tolerate", "quorum": 0.2})
        yield from on_engines(f"edge {name}", tolerant, ENGINES)
        if name == "golden_failing":
            yield Cell(f"edge {name} stops/serial", config, quick=True)


def cache_cells() -> Iterator[Cell]:
    """Runs that take the models of earlier runs from the cache, in this order."""
    for method in ("local_only", "ensemble", "naive_kd", "qkt"):
        for engine in ("serial", "pooled"):
            config = changed(method_config(method, "peer_to_peer"), engine=engine, reuse=True)
            yield Cell(f"cache {method}/{engine}", config, stop_after=1, quick=True)


def all_cells() -> list[Cell]:
    """All runs, in their order."""
    families = (
        edge_cells,
        cache_cells,
        kind_cells,
        stream_cells,
        privacy_cells,
        query_cells,
        plan_cells,
        client_cells,
        measure_cells,
        partition_cells,
        method_cells,
    )
    return [cell for family in families for cell in family()]


# ---- results ----------------------------------------------------------------------------------


def carried_out(cell: Cell, data: Any, folder: Path) -> Fields:
    """Run a cell, stop it, resume it, and return everything that must not change."""
    run_folder = folder / "run"
    outcome = "finished"
    try:
        run_and_resume(cell, data, run_folder)
    except fedstill.FedstillError as error:
        outcome = type(error).__name__
    except Exception as error:  # a crash is a result, too: the other tree must crash alike
        traceback.print_exc()
        outcome = f"crash: {type(error).__name__}"
    return {"outcome": outcome, **run_fields(run_folder)}


def run_and_resume(cell: Cell, data: Any, folder: Path) -> None:
    """Start a run, stop it after one of its stages, and resume it."""
    experiment = fedstill.Experiment(**cell.config)
    try:
        fedstill.run(experiment, folder, data=data, watch=StopAfter(cell.stop_after))
    except Exception as error:
        if type(error).__name__ != "Interrupted":
            raise
        fedstill.resume(folder, data=data)


def run_fields(folder: Path) -> Fields:
    """The final model, the config, the journal without times, and the number of cache hits."""
    fields: Fields = {}
    model = folder / "model.safetensors"
    if model.is_file():
        fields["model"] = model_digest(model)
    config = folder / "config.toml"
    if config.is_file():
        tables = tomllib.loads(config.read_text(encoding="utf-8"))
        fields["config"] = flat(tables)
    journal = folder / "journal.jsonl"
    if journal.is_file():
        lines = journal.read_text(encoding="utf-8").splitlines()
        events = [json.loads(line) for line in lines]
        hits = [e for e in events if e["event"] == "client" and e.get("seconds_reused")]
        fields["cache_hits"] = len(hits)
        fields["journal"] = [plain_event(event, folder) for event in events]
    return fields


def model_digest(path: Path) -> str:
    """The SHA-256 of a model's tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name, value in sorted(safetensors.torch.load(path.read_bytes()).items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def flat(tables: Mapping[str, Any], prefix: str = "") -> Fields:
    """Nested tables as one, with dotted keys."""
    values: Fields = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            values.update(flat(value, f"{prefix}{key}."))
        else:
            values[prefix + key] = value
    return values


def plain_event(event: Mapping[str, Any], folder: Path) -> Fields:
    """A journal's event without times, without the SHA-256 of its config, and without paths."""
    text = json.dumps(without_times(event)).replace(str(folder), "RUN")
    fields: Fields = json.loads(text)
    fields.pop("config_sha256", None)
    return fields


def without_times(value: Any) -> Any:
    """A JSON value without the fields whose names begin with ``seconds``."""
    if isinstance(value, Mapping):
        kept = {k: v for k, v in value.items() if not str(k).startswith("seconds")}
        return {k: without_times(v) for k, v in kept.items()}
    if isinstance(value, list):
        return [without_times(item) for item in value]
    return value


def results(cells: list[Cell], outputs: bool) -> Fields:
    """The results of all cells by name, each with the seconds that it took."""
    register_edges()
    datasets = {name: dataset(name) for name in sorted({cell.data for cell in cells})}
    table: Fields = {}
    refused: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
        root = Path(temporary)
        os.environ["FEDSTILL_CACHE"] = str(root / "cache")
        for number, cell in enumerate(cells):
            pair = cell.name.rpartition("/")[0]
            if pair in refused:
                continue
            began = time.perf_counter()
            folder = root / str(number)
            fields = carried_out(cell, datasets[cell.data], folder)
            shutil.rmtree(folder, ignore_errors=True)
            never_started = fields["outcome"] != "finished" and "journal" not in fields
            if never_started and cell.name.endswith("/serial"):
                refused.add(pair)  # the other engines would be refused alike
            fields["seconds"] = time.perf_counter() - began
            table[cell.name] = fields
            if (number + 1) % 100 == 0:
                print(f"{number + 1} of {len(cells)} cells", flush=True)
        if outputs:
            table.update(output_cells(root / "outputs"))
    return table


def main() -> None:
    """Write the results of all cells, or of the quick ones, to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true", help="a subset that takes a minute")
    parser.add_argument("--only", default="", help="cells whose name contains this text")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    cells = [c for c in all_cells() if arguments.only in c.name]
    if arguments.quick:
        cells = [c for c in cells if c.quick]
    table = results(cells, outputs=not arguments.only)
    arguments.out.write_text(json.dumps(table), encoding="utf-8")


if __name__ == "__main__":
    main()
