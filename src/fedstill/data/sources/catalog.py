"""What is known of each data set by name: where it comes from, its sizes, shape, classes, and what
normalises it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedstill.data.form import FOUND, Form
from fedstill.data.sources import checksums
from fedstill.data.sources.checksums import Sums

# The names of CIFAR-100's classes, in label order.


_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
    camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
    dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
    leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
    otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
    road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
    sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
"""  # noqa: E501
CIFAR100_NAMES = tuple(_NAMES.split())


HALF = (0.5,)


@dataclass(frozen=True)
class Known:
    """A data set of the catalogue.

    sizes: examples a split; total: examples of all splits, where there is no official split; shape:
    of an example;
    form: what examples are made of, if they are no images, unless a config says otherwise;
    remedy: how to get it, in words that follow "it is not here"; hub: its name on the Hugging Face
    hub;
    system: the folder of IDX files in which Debian installs it.
    Source of mean and std: FedNTD's and FedSeq's codes; 0.5 where they have none.
    """

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    remedy: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    total: int | None = None
    hub: str | None = None
    system: str | None = None
    sums: Sums = field(default_factory=dict)
    form: Form = FOUND


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


_TEN = tuple("0123456789")
_THINGS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_ACTIVITIES = ("WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING")
_LESIONS = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")

DIGITS = Known(
    "digits",
    _TEN,
    (1, 8, 8),
    "it ships with scikit-learn",
    HALF,
    HALF,
    total=1797,
    sums=checksums.DIGITS,
)
MNIST = Known(
    "mnist",
    _TEN,
    (1, 28, 28),
    _from_hub("mnist", "ylecun/mnist"),
    (0.1307,),
    (0.3081,),
    sizes={"train": 60_000, "test": 10_000},
    hub="ylecun/mnist",
)
FASHION_MNIST = Known(
    "fashion-mnist",
    (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    (1, 28, 28),
    "get it with: apt install dataset-fashion-mnist; or "
    + _from_hub("fashion-mnist", "zalando-datasets/fashion_mnist").removeprefix("get it "),
    (0.2860,),
    (0.3530,),
    sizes={"train": 60_000, "test": 10_000},
    hub="zalando-datasets/fashion_mnist",
    system="/usr/share/datasets/fashion-mnist",
    sums=checksums.FASHION_MNIST,
)
CIFAR10 = Known(
    "cifar10",
    _THINGS,
    (3, 32, 32),
    _from_hub("cifar10", "uoft-cs/cifar10"),
    (0.49139968, 0.48215827, 0.44653124),
    (0.24703233, 0.24348505, 0.26158768),
    sizes={"train": 50_000, "test": 10_000},
    hub="uoft-cs/cifar10",
    sums=checksums.CIFAR10,
)
CIFAR100 = Known(
    "cifar100",
    CIFAR100_NAMES,
    (3, 32, 32),
    _from_hub("cifar100", "uoft-cs/cifar100"),
    (0.5071, 0.4865, 0.4409),
    (0.2673, 0.2564, 0.2762),
    sizes={"train": 50_000, "test": 10_000},
    hub="uoft-cs/cifar100",
)
CINIC10 = Known(
    "cinic10",
    _THINGS,
    (3, 32, 32),
    _from_hub("cinic10", "flwrlabs/cinic10"),
    (0.47889522, 0.47227842, 0.43047404),
    (0.24205776, 0.23828046, 0.25874835),
    sizes={"train": 90_000, "validation": 90_000, "test": 90_000},
    hub="flwrlabs/cinic10",
)
HAM10000 = Known(
    "ham10000",
    _LESIONS,
    (3, 32, 32),
    "get the images and their diagnoses from https://doi.org/10.7910/DVN/DBW86T, put each image in "
    "the folder "
    "DATA/ham10000/DIAGNOSIS (akiec, bcc, bkl, df, mel, nv or vasc), then set FEDSTILL_DATA=DATA",
    HALF * 3,
    HALF * 3,
    total=10_015,
)
BLOODMNIST = Known(
    "bloodmnist",
    (
        "basophil",
        "eosinophil",
        "erythroblast",
        "immature granulocytes(myelocytes, metamyelocytes and promyelocytes)",
        "lymphocyte",
        "monocyte",
        "neutrophil",
        "platelet",
    ),
    (3, 28, 28),
    _from_zenodo("bloodmnist"),
    HALF * 3,
    HALF * 3,
    sizes={"train": 11_959, "validation": 1_712, "test": 3_421},
)
PATHMNIST = Known(
    "pathmnist",
    (
        "adipose",
        "background",
        "debris",
        "lymphocytes",
        "mucus",
        "smooth muscle",
        "normal colon mucosa",
        "cancer-associated stroma",
        "colorectal adenocarcinoma epithelium",
    ),
    (3, 28, 28),
    _from_zenodo("pathmnist"),
    HALF * 3,
    HALF * 3,
    sizes={"train": 89_996, "validation": 10_004, "test": 7_180},
)

FOLDERS = {
    "cifar100-small": Known(
        "cifar100-small",
        CIFAR100_NAMES,
        (3, 32, 32),
        "",
        CIFAR100.mean,
        CIFAR100.std,
        sizes={"train": 10_000, "test": 2_000},
        sums=checksums.CIFAR100_SMALL,
    ),
    "pbc_blood28": Known(
        "pbc_blood28",
        (
            "basophil",
            "eosinophil",
            "erythroblast",
            "ig",
            "lymphocyte",
            "monocyte",
            "neutrophil",
            "platelet",
        ),
        (3, 28, 28),
        "",
        HALF * 3,
        HALF * 3,
        sizes={"train": 11_965, "validation": 1_710, "test": 3_417},
        sums=checksums.PBC_BLOOD28,
    ),
    "ham10000_28": Known(
        "ham10000_28",
        _LESIONS,
        (3, 28, 28),
        "",
        HALF * 3,
        HALF * 3,
        sizes={"train": 7_023, "validation": 1_012, "test": 1_980},
        sums=checksums.HAM10000_28,
    ),
    "heart_disease": Known(
        "heart_disease",
        ("healthy", "disease"),
        (15,),
        "",
        (),
        (),
        form=Form(
            "table",
            (
                "age",
                "sex",
                "cp",
                "trestbps",
                "chol",
                "fbs",
                "restecg",
                "thalach",
                "exang",
                "oldpeak",
            ),
            (("cp", (1, 2, 3, 4)), ("restecg", (0, 1, 2))),
            missing="drop",
        ),
        sums=checksums.HEART_DISEASE,
    ),
    "har": Known(
        "har",
        _ACTIVITIES,
        (561,),
        "",
        (),
        (),
        form=Form("vector", input="features"),
        sums=checksums.HAR,
    ),
    "har_signals": Known(
        "har_signals",
        _ACTIVITIES,
        (9, 128),
        "",
        (),
        (),
        form=Form("series", input="signals"),
        sums=checksums.HAR_SIGNALS,
    ),
    "ag_news-small": Known(
        "ag_news-small",
        ("World", "Sports", "Business", "Sci/Tech"),
        (64,),
        "",
        (),
        (),
        form=Form("text", input="text"),
        sums=checksums.AG_NEWS_SMALL,
    ),
}
"""Folders that are no published data set but have been read: they are verified where their name is
found.
"""

KNOWN = {
    known.name: known
    for known in [*list(globals().values()), *FOLDERS.values()]
    if isinstance(known, Known)
}
"""Every data set of the catalogue by its name."""
