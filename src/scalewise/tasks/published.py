"""The published data sets: their files, by size and SHA-256, and their official addresses. Imports no torch."""

from __future__ import annotations

from scalewise.tasks.sources import DataFile, Labels, Source

_TEN = Labels(offset=8, stride=1, classes=10)
MNIST_PARTS = {"train": 60_000, "t10k": 10_000}


def _mnist_files(*sha256: str) -> tuple[DataFile, ...]:
    """The four files of a data set in MNIST's layout, from the hashes of their contents."""
    hashes = iter(sha256)
    files: list[DataFile] = []
    for part, samples in MNIST_PARTS.items():
        files.append(DataFile(f"{part}-images-idx3-ubyte", 16 + samples * 784, next(hashes)))
        files.append(DataFile(f"{part}-labels-idx1-ubyte", 8 + samples, next(hashes), _TEN))
    return tuple(files)


FASHION_MNIST = Source(
    name="fashion-mnist",
    files=_mnist_files(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    folders=("fashion-mnist", "FashionMNIST/raw"),
    address="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
)
MNIST = Source(
    name="mnist",
    files=_mnist_files(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    folders=("mnist", "MNIST/raw"),
    address="https://ossci-datasets.s3.amazonaws.com/mnist",
    arrays=(
        "mnist.npz",
        {
            "x_train": "train-images-idx3-ubyte",
            "y_train": "train-labels-idx1-ubyte",
            "x_test": "t10k-images-idx3-ubyte",
            "y_test": "t10k-labels-idx1-ubyte",
        },
    ),
)

CIFAR_RECORD = 1 + 3 * 32 * 32  # a label and the red, green and blue planes
_CIFAR_HASHES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
CIFAR10 = Source(
    name="cifar10",
    files=tuple(
        DataFile(name, 10_000 * CIFAR_RECORD, sha, Labels(0, CIFAR_RECORD, 10)) for name, sha in _CIFAR_HASHES.items()
    ),
    folders=("cifar-10-batches-bin",),
    address="https://www.cs.toronto.edu/~kriz",
    archive="cifar-10-binary.tar.gz",
)
