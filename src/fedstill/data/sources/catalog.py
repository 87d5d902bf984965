"""What is known of each data set by name: where it comes from, its sizes, shape, classes and
checksums, and what normalises it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedstill.data.form import FOUND, Form

# SHA-256 of the pixels and labels of data whose real files have been read; ``verify.sums`` has the
# layout.


Sums = Mapping[str, tuple[str, str]]

DIGITS_SUMS: Sums = {
    "train": (
        "83f21b74e3764178cf6cb1539223bf93f384cfd591f0ed7304e42e667e207caa",
        "a2471153d71f70a0ded1b54f33855569525eeff4057e6714acd641041905f0a1",
    ),
    "test": (
        "2f5eb12f1dfec8a2337c6effb5e27dbb6ed8b62a806850d96fc89030d272c03a",
        "85127d38d0fb39a6cdcd246d297cf22e48756f9d1d97699a4a18662f3154f0e9",
    ),
}
FASHION_MNIST_SUMS: Sums = {
    "train": (
        "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
    ),
    "test": (
        "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
    ),
}
CIFAR10_SUMS: Sums = {
    "train": (
        "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
    ),
    "test": (
        "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    ),
}
CIFAR100_SMALL_SUMS: Sums = {
    "train": (
        "ea0d100474c168847741ac4d26be866277baa86cee1b948ed4bf533bdbbbdd06",
        "b15efd10c703c6611b6328c80b33af902215397b1c12579574c9b1fb6034450c",
    ),
    "test": (
        "8517019eb06f832ffd49b041e97e46c61799aaa708d04ae38eaae8e823480f37",
        "b924316dc34695e2719483247c1f41641ca7c17de860d53db7943a21ffd46d13",
    ),
}
PBC_BLOOD28_SUMS: Sums = {
    "train": (
        "d8150db67897aba9647d2657e3f858311a6451e2220d626419d78617a1b7e65f",
        "e724cd2e07b7411ded7983e91264fe9d1d9a44400650d2d3c8aadf4bacbbd731",
    ),
    "validation": (
        "94c4b420097509abbde1ea15b4bdfdd6415c88da9a7b83a5776b02cfa19bc1c6",
        "4f072934f67b45939b8ace8474974e4e34b5f62103e801149a4461fd973a80a0",
    ),
    "test": (
        "b7805f59ee1da77280c825715f5fd6944f42acc29e003fbb596cc2e6b6680e2f",
        "fd676cae9f63dd66bc1a681fd7e851fd620e1fdc9594afb9d1ba6f204a6ddec9",
    ),
}
HAM10000_28_SUMS: Sums = {
    "train": (
        "f5f3f5e1415c2b1a96b14f6ecef3d0d2144ffca56d3e84cf2197b6f20e7a66be",
        "5e82f21133b2877d6c819231c0467fe73117ab7270e31850b39fcc3e6c291dd3",
    ),
    "validation": (
        "9f67db4847f2be44c17710ec9526c62fd254a74a6239c42c1ac7b43829e55286",
        "20a2af64d9afdcc40962d6ac1d8e5a2d6f63a83890e127fedfb7557969b574aa",
    ),
    "test": (
        "98f8fc4075ed1e1c8ab0469e9754f0d5ea3e800553fc2bd74ac7e574cae728b3",
        "3f5311d2a9f20b24349bf17b72343044f0dd3ca20b4a3bb3703aaf0a76997695",
    ),
}
HEART_DISEASE_SUMS: Sums = {
    "train": (
        "031d0abb40b4705b5857cdb1db08dc411f7c427f6af5d2039dbe731202f14b00",
        "ed2430e1da6c44d2cae950675421b74684af37517f75961a0aadbd4c97e64ec9",
    ),
    "test": (
        "a7a7f4965f893e3f1ca1948b65cc014609d4f94d4d52ea2937b4e9353aa63d6d",
        "2607d8240f7646714446b36efd526c906d3d4018aed476070762ec84a8709abf",
    ),
}
HAR_SUMS: Sums = {
    "train": (
        "99f24f39defbcf0199809755bcfba3e6c5bdd563d341994afb1d9b977247d92e",
        "222085d9d70948d9e252eb43a101307273edc61588c822a004cdcea259285ac9",
    ),
    "test": (
        "e1e40051f11cdb959cfebbe0128a99b3a1d1f954a2372c2a554630bde762f3c6",
        "c6c5639491f71f640401d34ac4a15a109a8023b085f463afef7f2e9f6cefe907",
    ),
}
HAR_SIGNALS_SUMS: Sums = {
    "train": (
        "d42ab7bf0d839036959e6b0946a2a0d001ae8dff6777025a14973b42f7f485fe",
        "222085d9d70948d9e252eb43a101307273edc61588c822a004cdcea259285ac9",
    ),
    "test": (
        "0552ed1ec17817aab492c3d1c27479ebe80f50f0f5a15c7ad783dc7b7cac02eb",
        "c6c5639491f71f640401d34ac4a15a109a8023b085f463afef7f2e9f6cefe907",
    ),
}
AG_NEWS_SMALL_SUMS: Sums = {
    "train": (
        "d3a294a66c9af2a7f6251cc6156b6836b4dcd5b5d6a00188f4800a4ec06a471f",
        "f9fe45159cf7f3032f61e763df74941ced4e2865192d44c165d369bb2595823d",
    ),
    "test": (
        "16d5936369df6cbb75ec4900edb98701dc25e9d031a5a819f56bdd89f31f83ae",
        "0bba04fee5f9b7f715071c5da83d4c7f943ed89332cb3ce3911172adf9000c67",
    ),
}


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
    sums=DIGITS_SUMS,
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
    sums=FASHION_MNIST_SUMS,
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
    sums=CIFAR10_SUMS,
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
        sums=CIFAR100_SMALL_SUMS,
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
        sums=PBC_BLOOD28_SUMS,
    ),
    "ham10000_28": Known(
        "ham10000_28",
        _LESIONS,
        (3, 28, 28),
        "",
        HALF * 3,
        HALF * 3,
        sizes={"train": 7_023, "validation": 1_012, "test": 1_980},
        sums=HAM10000_28_SUMS,
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
        sums=HEART_DISEASE_SUMS,
    ),
    "har": Known(
        "har",
        _ACTIVITIES,
        (561,),
        "",
        (),
        (),
        form=Form("vector", input="features"),
        sums=HAR_SUMS,
    ),
    "har_signals": Known(
        "har_signals",
        _ACTIVITIES,
        (9, 128),
        "",
        (),
        (),
        form=Form("series", input="signals"),
        sums=HAR_SIGNALS_SUMS,
    ),
    "ag_news-small": Known(
        "ag_news-small",
        ("World", "Sports", "Business", "Sci/Tech"),
        (64,),
        "",
        (),
        (),
        form=Form("text", input="text"),
        sums=AG_NEWS_SMALL_SUMS,
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
