"""The catalogue of known data sets.

An entry has the source of a data set, its sizes, shape, classes and checksums, and the mean and
standard deviation that normalise it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedstill.core.files import read_toml
from fedstill.data.dataset import DEFAULT_OPTIONS, Digests, ReadingOptions, half


@dataclass(frozen=True, kw_only=True)
class KnownData:
    """A data set of the catalogue.

    Source of mean and std: the official code of FedNTD and FedSeq. Data sets that neither uses have
    0.5.
    """

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    """The shape of an example."""
    options: ReadingOptions = DEFAULT_OPTIONS
    """The default options for reading columns."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The number of examples of each split."""
    total: int | None = None
    """The number of all examples, if there is no official split."""
    digests: Mapping[str, Digests] = field(default_factory=dict)
    """The recorded checksums of each split."""
    remedy: str = ""
    """How to get the data, as the last clause of a message."""
    hub: str | None = None
    """The name on the Hugging Face hub."""
    system: str | None = None
    """The folder of IDX files in which Debian installs the data."""


def _checksums() -> dict[str, dict[str, Digests]]:
    tables = read_toml(Path(__file__).parent / "checksums.toml")
    return {
        name: {split: Digests(**digests) for split, digests in splits.items()}
        for name, splits in tables.items()
    }


CHECKSUMS = _checksums()
"""The checksums of data sets by name."""


def _from_hub(name: str, hub: str) -> str:
    return (
        f"get it with: hf download {hub} --repo-type dataset --local-dir DATA/{name}, then set "
        "FEDSTILL_DATA=DATA"
    )


def _from_zenodo(name: str) -> str:
    return (
        f"get it with: curl -L --create-dirs -o DATA/{name}/{name}.npz "
        f"https://zenodo.org/records/10519652/files/{name}.npz?download=1, then set "
        "FEDSTILL_DATA=DATA"
    )


_DIGITS = tuple("0123456789")
_CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
_FASHION_MNIST_CLASSES = (
    "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
)
_BLOODMNIST_CLASSES = (
    "basophil",
    "eosinophil",
    "erythroblast",
    "immature granulocytes(myelocytes, metamyelocytes and promyelocytes)",
    "lymphocyte",
    "monocyte",
    "neutrophil",
    "platelet",
)
_PATHMNIST_CLASSES = (
    "adipose, background, debris, lymphocytes, mucus, smooth muscle, normal colon mucosa, "
    "cancer-associated stroma, colorectal adenocarcinoma epithelium"
)
_PBC_BLOOD28_CLASSES = "basophil eosinophil erythroblast ig lymphocyte monocyte neutrophil platelet"
_HAR_CLASSES = "WALKING WALKING_UPSTAIRS WALKING_DOWNSTAIRS SITTING STANDING LAYING"
_HAM10000_CLASSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
_CIFAR100_CLASSES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
    butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch
    crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo
    keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain
    mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain
    plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
    television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""


# Data sets that a config can name.

DIGITS = KnownData(
    name="digits",
    classes=_DIGITS,
    shape=(1, 8, 8),
    mean=half(1),
    std=half(1),
    total=1797,
    digests=CHECKSUMS["digits"],
    remedy="it ships with scikit-learn",
)
MNIST = KnownData(
    name="mnist",
    classes=_DIGITS,
    shape=(1, 28, 28),
    mean=(0.1307,),
    std=(0.3081,),
    sizes={"train": 60_000, "test": 10_000},
    remedy=_from_hub("mnist", "ylecun/mnist"),
    hub="ylecun/mnist",
)
FASHION_MNIST = KnownData(
    name="fashion-mnist",
    classes=tuple(_FASHION_MNIST_CLASSES.split(", ")),
    shape=(1, 28, 28),
    mean=(0.2860,),
    std=(0.3530,),
    sizes={"train": 60_000, "test": 10_000},
    digests=CHECKSUMS["fashion-mnist"],
    remedy="get it with: apt install dataset-fashion-mnist; or "
    + _from_hub("fashion-mnist", "zalando-datasets/fashion_mnist").removeprefix("get it "),
    hub="zalando-datasets/fashion_mnist",
    system="/usr/share/datasets/fashion-mnist",
)
CIFAR10 = KnownData(
    name="cifar10",
    classes=tuple(_CIFAR10_CLASSES.split()),
    shape=(3, 32, 32),
    mean=(0.49139968, 0.48215827, 0.44653124),
    std=(0.24703233, 0.24348505, 0.26158768),
    sizes={"train": 50_000, "test": 10_000},
    digests=CHECKSUMS["cifar10"],
    remedy=_from_hub("cifar10", "uoft-cs/cifar10"),
    hub="uoft-cs/cifar10",
)
CIFAR100 = KnownData(
    name="cifar100",
    classes=tuple(_CIFAR100_CLASSES.split()),
    shape=(3, 32, 32),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    sizes={"train": 50_000, "test": 10_000},
    remedy=_from_hub("cifar100", "uoft-cs/cifar100"),
    hub="uoft-cs/cifar100",
)
CINIC10 = KnownData(
    name="cinic10",
    classes=tuple(_CIFAR10_CLASSES.split()),
    shape=(3, 32, 32),
    mean=(0.47889522, 0.47227842, 0.43047404),
    std=(0.24205776, 0.23828046, 0.25874835),
    sizes={"train": 90_000, "validation": 90_000, "test": 90_000},
    remedy=_from_hub("cinic10", "flwrlabs/cinic10"),
    hub="flwrlabs/cinic10",
)
HAM10000 = KnownData(
    name="ham10000",
    classes=_HAM10000_CLASSES,
    shape=(3, 32, 32),
    mean=half(3),
    std=half(3),
    total=10_015,
    remedy="get the images and their diagnoses from https://doi.org/10.7910/DVN/DBW86T, put each "
    "image in the folder DATA/ham10000/DIAGNOSIS (akiec, bcc, bkl, df, mel, nv or vasc), then set "
    "FEDSTILL_DATA=DATA",
)
BLOODMNIST = KnownData(
    name="bloodmnist",
    classes=_BLOODMNIST_CLASSES,
    shape=(3, 28, 28),
    mean=half(3),
    std=half(3),
    sizes={"train": 11_959, "validation": 1_712, "test": 3_421},
    remedy=_from_zenodo("bloodmnist"),
)
PATHMNIST = KnownData(
    name="pathmnist",
    classes=tuple(_PATHMNIST_CLASSES.split(", ")),
    shape=(3, 28, 28),
    mean=half(3),
    std=half(3),
    sizes={"train": 89_996, "validation": 10_004, "test": 7_180},
    remedy=_from_zenodo("pathmnist"),
)

# Smaller copies of published data sets. A folder with one of these names is verified.

CIFAR100_SMALL = KnownData(
    name="cifar100-small",
    classes=tuple(_CIFAR100_CLASSES.split()),
    shape=(3, 32, 32),
    mean=CIFAR100.mean,
    std=CIFAR100.std,
    sizes={"train": 10_000, "test": 2_000},
    digests=CHECKSUMS["cifar100-small"],
)
PBC_BLOOD28 = KnownData(
    name="pbc_blood28",
    classes=tuple(_PBC_BLOOD28_CLASSES.split()),
    shape=(3, 28, 28),
    mean=half(3),
    std=half(3),
    sizes={"train": 11_965, "validation": 1_710, "test": 3_417},
    digests=CHECKSUMS["pbc_blood28"],
)
HAM10000_28 = KnownData(
    name="ham10000_28",
    classes=_HAM10000_CLASSES,
    shape=(3, 28, 28),
    mean=half(3),
    std=half(3),
    sizes={"train": 7_023, "validation": 1_012, "test": 1_980},
    digests=CHECKSUMS["ham10000_28"],
)
_HEART_DISEASE_COLUMNS = "age sex cp trestbps chol fbs restecg thalach exang oldpeak"
HEART_DISEASE = KnownData(
    name="heart_disease",
    classes=("healthy", "disease"),
    shape=(15,),
    options=ReadingOptions(
        kind="table",
        columns=tuple(_HEART_DISEASE_COLUMNS.split()),
        categorical=(("cp", (1, 2, 3, 4)), ("restecg", (0, 1, 2))),
        missing="drop",
    ),
    digests=CHECKSUMS["heart_disease"],
)
HAR = KnownData(
    name="har",
    classes=tuple(_HAR_CLASSES.split()),
    shape=(561,),
    options=ReadingOptions(kind="vector", input="features"),
    digests=CHECKSUMS["har"],
)
HAR_SIGNALS = KnownData(
    name="har_signals",
    classes=tuple(_HAR_CLASSES.split()),
    shape=(9, 128),
    options=ReadingOptions(kind="series", input="signals"),
    digests=CHECKSUMS["har_signals"],
)
AG_NEWS_SMALL = KnownData(
    name="ag_news-small",
    classes=("World", "Sports", "Business", "Sci/Tech"),
    shape=(64,),
    options=ReadingOptions(kind="text", input="text"),
    digests=CHECKSUMS["ag_news-small"],
)

REGISTERED = (
    DIGITS,
    MNIST,
    FASHION_MNIST,
    CIFAR10,
    CIFAR100,
    CINIC10,
    HAM10000,
    BLOODMNIST,
    PATHMNIST,
)

_FOLDERS = (
    CIFAR100_SMALL,
    PBC_BLOOD28,
    HAM10000_28,
    HEART_DISEASE,
    HAR,
    HAR_SIGNALS,
    AG_NEWS_SMALL,
)

KNOWN_FOLDERS = {entry.name: entry for entry in _FOLDERS}
"""The data sets of verified folders, by name."""

KNOWN = {entry.name: entry for entry in REGISTERED} | KNOWN_FOLDERS
"""All data sets of the catalogue by name."""
