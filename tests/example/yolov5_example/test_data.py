"""Pictures and boxes: what is read, counted, refused; and that boxes stay with their pixels."""

import shutil
import sys
import zipfile

import numpy as np
import pytest
import torch
import yaml
from PIL import Image


@pytest.fixture
def dataset(example):
    return sys.modules["dataset"]


@pytest.fixture
def user_error(example):
    return sys.modules["errors"].UserError


def described(tree, **changes):
    content = yaml.safe_load((tree / "data.yaml").read_text()) | changes
    (tree / "data.yaml").write_text(yaml.safe_dump(content))
    return sys.modules["dataset"].read_description(tree)


def test_folders_and_zips_hold_the_same(dataset, tree):
    with zipfile.ZipFile(tree / "train.zip", "w") as archive:
        for file in sorted(tree.rglob("train/*")):
            archive.write(file, str(file.relative_to(tree)).replace("/train/", "/"))
    folder = described(tree).pictures("train")
    packed = described(tree, train="train.zip").pictures("train")
    assert len(folder) == len(packed) == 8
    for a, b in zip(folder, packed, strict=True):
        assert a.size == b.size
        assert np.array_equal(a.labels, b.labels)
        assert np.array_equal(np.asarray(a.load()), np.asarray(b.load()))


def test_what_is_wrong_with_some_pictures_is_counted(dataset, tree, capsys):
    labels = tree / "labels" / "train"
    (labels / "0.txt").unlink()
    (labels / "1.txt").write_text("")
    (labels / "2.txt").write_text(2 * (labels / "2.txt").read_text())
    (tree / "images" / "train" / "3.png").write_bytes(b"no image")
    sys.modules["logs"].set_up_logging(1, first=True)
    pictures = described(tree).pictures("train")
    printed = capsys.readouterr().out
    assert "(6 found, 1 missing, 1 empty, 1 duplicate, 1 corrupt, for 7 images)" in printed
    assert "3.png is not an image: skipped" in printed
    assert [len(picture.labels) for picture in pictures] == [0, 0, 1, 1, 1, 1, 1]


def test_lists_of_pictures_hold_the_same_as_their_folder(dataset, user_error, tree, tmp_path, monkeypatch):
    folder = described(tree).pictures("train")
    names = [f"./images/train/{i}.png" for i in range(8)]
    (tree / "train.txt").write_text("\n".join([*names[:4], "", *(str(tree / name) for name in names[4:])]))
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "coco.yaml"
    file.write_text("path: tree\ntrain: train.txt\nval: images/val\nnames: [dark, bright]\nnc: 2\n")
    with pytest.raises(user_error, match="no such folder, zip or list"):
        dataset.read_description(file).pictures("train")
    monkeypatch.chdir(tmp_path)  # as upstream: its paths are relative to the working directory
    listed = dataset.read_description(file).pictures("train")
    assert len(listed) == len(folder) == 8
    for a, b in zip(listed, folder, strict=True):
        assert np.array_equal(a.labels, b.labels)
        assert np.array_equal(np.asarray(a.load()), np.asarray(b.load()))
    for line in ("images/train/9.png", "labels/train/0.txt"):
        (tree / "train.txt").write_text(f"{names[0]}\n{line}\n")
        with pytest.raises(user_error, match=f"train.txt, line 2: expected a picture .*{line}"):
            dataset.read_description(file).pictures("train")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2 .5 .5 .1 .1", "0.txt, line 1: class 2, but the data.yaml names 2 classes"),
        ("0 .5 .5 .1 .1\n0 .5 .5 .1", "0.txt, line 2: expected `class x y width height`"),
        ("0 50 50 10 10", "the last four 0 to 1; got '0 50 50 10 10'"),
        ("cat .5 .5 .1 .1", "got 'cat .5 .5 .1 .1'"),
    ],
)
def test_wrong_labels_are_an_error_with_their_place(dataset, user_error, tree, text, message):
    (tree / "labels" / "train" / "0.txt").write_text(text)
    with pytest.raises(user_error, match=message.replace("(", r"\(")):
        described(tree).pictures("train")


def test_wrong_descriptions(dataset, user_error, tree):
    with pytest.raises(user_error, match="nc is 3, but there are 2 names"):
        described(tree, nc=3)
    for names in ("dark", {1: "dark", 2: "bright"}):
        with pytest.raises(user_error, match="names must be a list, or have the keys 0, 1, 2"):
            described(tree, nc=2, names=names)
    assert described(tree, names={1: "bright", 0: "dark"}).names == ("dark", "bright")
    with pytest.raises(user_error, match="elsewhere: the data.yaml names it, but there is no such folder"):
        described(tree, nc=2, train="elsewhere").pictures("train")
    with pytest.raises(user_error, match="has no pictures"):
        described(tree, train="labels/train").pictures("train")
    (tree / "data.yaml").write_text("names: [a]")
    with pytest.raises(user_error, match="missing: train, val"):
        dataset.read_description(tree)
    shutil.rmtree(tree)
    with pytest.raises(user_error, match="cannot be read"):
        dataset.read_description(tree / "data.yaml")


def test_a_picture_that_ends_early_is_an_error_with_its_name(dataset, user_error, tree):
    path = tree / "images" / "train" / "0.png"
    path.write_bytes(path.read_bytes()[:2000])
    picture = described(tree).pictures("train")[0]
    with pytest.raises(user_error, match="0.png cannot be read as an image"):
        picture.load()


def squares_in_their_boxes(sample):
    """Each box holds a dark or a bright square, as its class says; gives how many were wide enough to look into."""
    seen = 0
    for kind, *sides in sample.boxes.tolist():
        left, top, right, bottom = (round(side) for side in sides)
        inside = sample.image[:, top + 2 : bottom - 2, left + 2 : right - 2].float()
        if inside.numel():  # else an edge cut the square
            assert abs(inside.mean() - 255 * kind) < 12, (kind, sides)
            seen += 1
    return seen


def test_boxes_stay_with_their_pixels(dataset, tree):
    pictures = sys.modules["pictures"]
    found = described(tree).pictures("train")
    for i, picture in enumerate(found):
        sample = pictures.letterbox(picture, i, 96, (96, 128))
        assert sample.image.shape == (3, 96, 128)
        assert squares_in_their_boxes(sample) == squares_in_their_boxes(pictures.flip(sample)) == 1
        there = torch.tensor([[*sample.boxes[0, 1:].tolist(), 1.0, 0.0]])
        back = sys.modules["detection"].to_picture(there, sample, picture)
        expected = pictures.corners(picture.labels, *picture.size)[0, 1:]
        assert np.allclose(back[0, :4], expected, atol=0.51)  # the side is rounded to px
    augmented = pictures.Augmented(found, 96, (0, 0), mosaics=1.0, flips=0.5, rescale=0.3)
    samples = [augmented[i] for i in range(8)]
    assert sum(squares_in_their_boxes(sample) for sample in samples) > 8
    again = augmented[3]
    assert torch.equal(again.image, samples[3].image)
    assert not torch.equal(pictures.Augmented(found, 96, (0, 1), 1.0, 0.5, 0.3)[3].image, samples[3].image)


def test_rectangular_batches_are_as_low_as_they_can_be(dataset, tree):
    pictures = sys.modules["pictures"]
    found = described(tree).pictures("train")
    letterboxed = pictures.Letterboxed(found, 64, 4, rectangular=True)
    assert [letterboxed.shapes[i] for i in letterboxed.order] == 4 * [(64, 64)] + 4 * [(64, 64)]
    wide = [picture for picture in found if picture.size == (64, 48)]
    flat = [sys.modules["dataset"].Picture(p.file, (64, 30), p.labels) for p in wide]
    assert set(pictures.Letterboxed(flat, 64, 4, rectangular=True).shapes.values()) == {(32, 64)}
    assert set(pictures.Letterboxed(flat, 64, 4, rectangular=False).shapes.values()) == {(64, 64)}


def test_perfect_detections_have_a_perfect_score(dataset, tree):
    detection, pictures = sys.modules["detection"], described(tree).pictures("val")
    corners = [sys.modules["pictures"].corners(picture.labels, *picture.size) for picture in pictures]
    found = {i: torch.tensor([[*box[1:], 0.9, box[0]] for box in boxes]) for i, boxes in enumerate(corners)}
    assert detection.score(found, pictures, 2)[2:] == pytest.approx((1, 1, 1, 1))
    wrong = {i: torch.cat((rows[:, :5], 1 - rows[:, 5:]), 1) for i, rows in found.items()}
    assert detection.score(wrong, pictures, 2)[2:] == pytest.approx((0, 0, 0, 0), abs=0.02)
    shifted = {i: rows + torch.tensor([4.0, 0, 4.0, 0, 0, 0]) for i, rows in found.items()}  # IoU 16/24: 4 of 10
    scores = detection.score(shifted, pictures, 2)
    assert (scores.map50, scores.map) == pytest.approx((1.0, 0.4))
    assert detection.score({}, pictures, 2) == (4, 4, 0.0, 0.0, 0.0, 0.0)


def test_suppression_keeps_the_best_of_each_class(example):
    boxes = torch.tensor(
        [
            [50, 50, 20, 20, 0.9, 0.9, 0.1],
            [52, 50, 20, 20, 0.9, 0.8, 0.7],
            [90, 50, 20, 20, 0.9, 0.5, 0.0],
            [10, 10, 5, 5, 0.1, 1.0, 1.0],
        ]
    )
    found = sys.modules["detection"].suppress(boxes, 0.2, 0.5)
    assert found[:, 5].tolist() == [0, 1, 0]
    torch.testing.assert_close(found[:, 4], torch.tensor([0.81, 0.63, 0.45]))
    torch.testing.assert_close(found[1, :4], torch.tensor([42.0, 40.0, 62.0, 60.0]))


def test_the_embedded_set_is_made_once_and_fits_its_labels(dataset, tmp_path):
    embedded = sys.modules["embedded"]
    description = dataset.read_description(embedded.embedded_description(tmp_path / "set"))
    assert description.names == tuple("0123456789")
    assert embedded.embedded_description(tmp_path / "set").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    pictures = description.pictures("val")
    assert len(pictures) == embedded.VAL
    assert {int(kind) for picture in pictures for kind in picture.labels[:, 0]} == set(range(10))
    first = Image.open(description.parts["val"] / "0.png")
    assert first.size == (embedded.SIDE, embedded.SIDE)
