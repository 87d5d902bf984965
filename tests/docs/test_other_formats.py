"""The readers of the page on other formats, on small files of these formats."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import h5py
import nibabel
import numpy as np
import pydicom
import pytest
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

import fedstill
from docs.test_documents import BLOCK, ROOT
from fedstill.cli import call
from fedstill.data.dataset import Dataset
from fedstill.running.journal import read_journal

COUNT = 45
LABELS = np.arange(COUNT) % 3
SITES = ["bern", "chur", "genf"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the page shows."""
    page = (ROOT / "docs" / "read_other_formats.md").read_text(encoding="utf-8")
    for _, title, text in BLOCK.findall(page):
        if title:
            (tmp_path / title).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_and_run(folder: Path, name: str, out: str) -> tuple[Dataset, dict[str, Any]]:
    """The data set of a reader, and the first event of the run that the page shows."""
    page = (ROOT / "docs" / "read_other_formats.md").read_text(encoding="utf-8")
    command = f"fedstill run {name}.toml --out {out} --quiet"
    assert f"$ {command}\n" in page
    assert call(command.split()[1:]) == 0
    data = fedstill.load_dataset(f"{name}.py:data", base=folder)
    return data, read_journal(folder / out / "journal.jsonl")[0]


def test_hdf5(folder: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (COUNT, 16, 12, 3)).astype("uint8")
    with h5py.File(folder / "cells.h5", "w") as file:
        file["images"] = images
        file["labels"] = LABELS.astype("uint8")
        file["site"] = [SITES[i // 15] for i in range(COUNT)]
        file.attrs["classes"] = ["lymph", "mono", "neutro"]
    data, start = read_and_run(folder, "cells", "cells")
    assert data.input_shape == (3, 16, 12)
    assert data.classes == ("lymph", "mono", "neutro")
    assert start["client_names"] == SITES
    kept = np.sort(np.concatenate([data.train.values, data.test.values]).reshape(COUNT, -1), axis=0)
    assert (kept == np.sort(images.transpose(0, 3, 1, 2).reshape(COUNT, -1), axis=0)).all()


def test_nifti(folder: Path) -> None:
    (folder / "scans").mkdir()
    draw = np.random.default_rng(0)
    rows = []
    for number in range(24):
        name = f"patient-{number:02}"
        volume = draw.normal(100 * (number % 2), 10, (14, 18, 9)).astype("float32")
        volume[3, 5, 4] = 5000  # one bright voxel, to find it again
        affine = np.diag([-1.0, 1, 1, 1])  # the first axis points left
        nibabel.save(nibabel.Nifti1Image(volume, affine), folder / "scans" / f"{name}.nii.gz")
        hospital = ["north", "south"][number // 12]
        rows.append({"patient": name, "hospital": hospital, "diagnosis": "ab"[number % 2]})
    with (folder / "scans" / "patients.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["patient", "hospital", "diagnosis"])
        writer.writeheader()
        writer.writerows(rows[::-1])
    data, start = read_and_run(folder, "scans", "scans-run")
    assert data.input_shape == (5, 18, 14)
    assert start["client_names"] == ["north", "south"]
    assert (float(data.train.values.min()), float(data.train.values.max())) == (0, 1)
    # Slices 2 to 6 are read; the left of the volume is turned to the right.
    assert (data.train.values[:, 2, 5, 14 - 1 - 3] == 1).all()


def dicom(path: Path, number: int, kind: int) -> None:
    """A CT slice whose numbers are stored as Hounsfield units + 1024."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = CTImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    file.SOPClassUID = CTImageStorage
    file.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    file.PatientID = f"P{number // 3:03}"
    file.Rows = 16
    file.Columns = 20
    file.SamplesPerPixel = 1
    file.PhotometricInterpretation = "MONOCHROME1" if number % 2 else "MONOCHROME2"
    file.BitsAllocated = 16
    file.BitsStored = 16
    file.HighBit = 15
    file.PixelRepresentation = 0
    file.RescaleSlope = 1
    file.RescaleIntercept = -1024
    pixels = np.full((16, 20), 24 + 1400 * kind, dtype="uint16")
    file.PixelData = pixels.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    pydicom.dcmwrite(path, file)


def test_dicom(folder: Path) -> None:
    for number in range(COUNT):
        kind = number // 3 % 2
        dicom(folder / "ct" / ("clear", "effusion")[kind] / f"{number:04}.dcm", number, kind)
    data, _ = read_and_run(folder, "ct", "ct-run")
    assert data.input_shape == (1, 16, 20)
    assert data.classes == ("clear", "effusion")
    assert (len(data.train), len(data.test)) == (36, 9)
    # -1000 HU is black, and 400 HU white, unless low numbers are white.
    assert set(data.train.values.unique().tolist()) == {0.0, 1.0}
    tested = [number for number in range(COUNT) if number // 3 % 5 == 0]
    by_class = sorted(tested, key=lambda number: (number // 3 % 2, number))
    want = [(number // 3 % 2) ^ (number % 2) for number in by_class]
    assert data.test.values.mean((1, 2, 3)).tolist() == want
