"""SHA-256 of the pixels and labels of data whose real files have been read; see ``verify.sums`` for
the layout.
"""

from __future__ import annotations

from collections.abc import Mapping

Sums = Mapping[str, tuple[str, str]]

DIGITS: Sums = {
    "train": (
        "83f21b74e3764178cf6cb1539223bf93f384cfd591f0ed7304e42e667e207caa",
        "a2471153d71f70a0ded1b54f33855569525eeff4057e6714acd641041905f0a1",
    ),
    "test": (
        "2f5eb12f1dfec8a2337c6effb5e27dbb6ed8b62a806850d96fc89030d272c03a",
        "85127d38d0fb39a6cdcd246d297cf22e48756f9d1d97699a4a18662f3154f0e9",
    ),
}
FASHION_MNIST: Sums = {
    "train": (
        "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
    ),
    "test": (
        "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
    ),
}
CIFAR10: Sums = {
    "train": (
        "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
    ),
    "test": (
        "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    ),
}
CIFAR100_SMALL: Sums = {
    "train": (
        "ea0d100474c168847741ac4d26be866277baa86cee1b948ed4bf533bdbbbdd06",
        "b15efd10c703c6611b6328c80b33af902215397b1c12579574c9b1fb6034450c",
    ),
    "test": (
        "8517019eb06f832ffd49b041e97e46c61799aaa708d04ae38eaae8e823480f37",
        "b924316dc34695e2719483247c1f41641ca7c17de860d53db7943a21ffd46d13",
    ),
}
PBC_BLOOD28: Sums = {
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
HAM10000_28: Sums = {
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
HEART_DISEASE: Sums = {
    "train": (
        "031d0abb40b4705b5857cdb1db08dc411f7c427f6af5d2039dbe731202f14b00",
        "ed2430e1da6c44d2cae950675421b74684af37517f75961a0aadbd4c97e64ec9",
    ),
    "test": (
        "a7a7f4965f893e3f1ca1948b65cc014609d4f94d4d52ea2937b4e9353aa63d6d",
        "2607d8240f7646714446b36efd526c906d3d4018aed476070762ec84a8709abf",
    ),
}
HAR: Sums = {
    "train": (
        "99f24f39defbcf0199809755bcfba3e6c5bdd563d341994afb1d9b977247d92e",
        "222085d9d70948d9e252eb43a101307273edc61588c822a004cdcea259285ac9",
    ),
    "test": (
        "e1e40051f11cdb959cfebbe0128a99b3a1d1f954a2372c2a554630bde762f3c6",
        "c6c5639491f71f640401d34ac4a15a109a8023b085f463afef7f2e9f6cefe907",
    ),
}
HAR_SIGNALS: Sums = {
    "train": (
        "d42ab7bf0d839036959e6b0946a2a0d001ae8dff6777025a14973b42f7f485fe",
        "222085d9d70948d9e252eb43a101307273edc61588c822a004cdcea259285ac9",
    ),
    "test": (
        "0552ed1ec17817aab492c3d1c27479ebe80f50f0f5a15c7ad783dc7b7cac02eb",
        "c6c5639491f71f640401d34ac4a15a109a8023b085f463afef7f2e9f6cefe907",
    ),
}
AG_NEWS_SMALL: Sums = {
    "train": (
        "d3a294a66c9af2a7f6251cc6156b6836b4dcd5b5d6a00188f4800a4ec06a471f",
        "f9fe45159cf7f3032f61e763df74941ced4e2865192d44c165d369bb2595823d",
    ),
    "test": (
        "16d5936369df6cbb75ec4900edb98701dc25e9d031a5a819f56bdd89f31f83ae",
        "0bba04fee5f9b7f715071c5da83d4c7f943ed89332cb3ce3911172adf9000c67",
    ),
}
