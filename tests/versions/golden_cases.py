"""The contents of the golden files: outputs of tapfm for fixed inputs that use most of the code of a version number.

tools/write_golden.py writes the files, and the tests in this folder compare with them. Positions, counts and texts must
be equal. Images are reduced to the mean and standard deviation of blocks, because decoders and processors may round
pixels differently.
"""

import contextlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
import torch
from command_line import tapfm
from predicted_slides import predicted_file, tile_positions, write_prediction
from slide_files import EOSIN, GLASS, damage, section, write_ome, write_scn, write_slide
from version_items import Item, Items, Tolerance, Verdict, compare_items, read_golden
from version_outputs import collect_items
from version_scenario import SMALL, run_scenario

from tapfm.encoders import features
from tapfm.encoders.inference import prepare_encoder
from tapfm.encoders.weights import load_encoder
from tapfm.prediction import layers
from tapfm.prediction.slide_outputs import write_slide_outputs
from tapfm.prediction.tile_table import TileTable
from tapfm.synthetic import cohort_plan
from tapfm.tiles import colour_statistics, tiling
from tapfm.tiles.store import TileSet, write_tiles

FOLDER = Path(__file__).parent / "golden"
WRITE_COMMAND = "python tools/write_golden.py"
# Other processors add numbers in a different order, which changes a feature by about 1e-6, and trained weights by a few
# 1e-5. The value of a block is the mean of hundreds of pixels, a few of which may round to the next level.
GOLDEN = Tolerance(float32=1e-4, statistic=1e-4, pixels=0.5)
BLOCKS = 12  # rows and columns of blocks in an image


def reduce_to_blocks(pixels):
    """Return the mean and the standard deviation of each of 12 x 12 blocks of an image."""
    planes = pixels.reshape(*pixels.shape[:2], -1).astype(np.float64)
    rows, columns = (np.linspace(0, length, BLOCKS + 1).astype(int) for length in planes.shape[:2])

    def mean(values):
        summed = np.add.reduceat(np.add.reduceat(values, rows[:-1], axis=0), columns[:-1], axis=1)
        return summed / (np.diff(rows)[:, None, None] * np.diff(columns)[None, :, None])

    means = mean(planes)
    deviations = np.sqrt(np.maximum(mean(planes**2) - means**2, 0))
    return np.stack([means, deviations]).astype(np.float16)


def run(*arguments):
    result = tapfm(*arguments)
    assert result.returncode == 0, result.output
    return result.stdout


@contextlib.contextmanager
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- tiling


def uneven_tissue(width_px, height_px, seed, colour=EOSIN):
    """Return an image of tissue whose stain fades into glass, with nuclei. Small changes of a threshold show in it."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height_px // 150 + 2, width_px // 150 + 2)).astype(np.float32)
    depth = cv2.resize(coarse, (width_px, height_px), interpolation=cv2.INTER_CUBIC)[..., None]
    fraction = np.clip((depth - 60) / 120, 0, 1)
    image = fraction * np.array(colour, np.float32) + (1 - fraction) * np.array(GLASS, np.float32)
    count = width_px * height_px // 600
    for x, y, radius in zip(
        rng.integers(0, width_px, count), rng.integers(0, height_px, count), rng.integers(3, 8, count), strict=True
    ):
        if fraction[y, x] > 0.3:
            cv2.circle(image, (int(x), int(y)), int(radius), (110, 70, 150), -1)
    image += rng.integers(-3, 4, image.shape)
    return np.clip(image, 0, 255).astype(np.uint8)


def write_tiling_slides(folder):
    """Write slides with several formats, scales and defects, and their cohort table."""
    lossless = {"compression": "zlib"}
    plain = {"compression": "zlib", "aperio": False}
    write_slide(folder / "aperio.svs", uneven_tissue(1400, 1000, 1))  # JPEG
    write_slide(folder / "aperio-40x.svs", uneven_tissue(1900, 1500, 2), mpp=0.2527, **lossless)
    write_slide(folder / "plain.tif", uneven_tissue(1300, 1000, 3), **plain)
    write_slide(folder / "strips.tif", uneven_tissue(1200, 900, 4), mpp=0.46, downsamples=(1, 2, 8), **plain)
    write_ome(folder / "ome.ome.tif", uneven_tissue(1200, 1100, 5))
    areas = [(512, 256, uneven_tissue(768, 768, 6)), (1536, 512, section(512, 512, seed=6))]
    write_scn(folder / "leica.scn", areas, (2300, 1400))
    cv2.imwrite(str(folder / "picture.png"), uneven_tissue(1000, 800, 7)[..., ::-1])
    marked = uneven_tissue(1400, 1100, 8)
    cv2.line(marked, (100, 900), (900, 100), (30, 60, 170), 90)
    cv2.line(marked, (900, 1000), (1300, 500), (20, 130, 70), 60)
    write_slide(folder / "pen.svs", marked, **lossless)
    unsharp = section(1400, 1100, seed=9, tissue=(0, 0, 1, 1))
    for left, radius_px in ((350, 4), (700, 6), (1050, 9)):
        unsharp[:, left:] = cv2.GaussianBlur(unsharp[:, left:], (0, 0), radius_px / 2)
    write_slide(folder / "blurred.svs", unsharp, **lossless)
    padded = uneven_tissue(1400, 1000, 10)
    padded[:, 1000:] = 8
    write_slide(folder / "padded.svs", padded, **lossless)
    write_slide(folder / "faint.svs", uneven_tissue(1200, 1000, 11, colour=(236, 224, 232)), **lossless)
    write_slide(folder / "grey.svs", uneven_tissue(1200, 1000, 12, colour=(170, 170, 172)), **lossless)
    broken = section(1792, 1792, seed=13, tissue=(0, 0, 1, 1))
    damage(write_slide(folder / "broken.svs", broken, tile_px=256), [24])
    lines = ["slide_id,path,mpp"]
    for path in sorted(folder.iterdir()):
        lines.append(f"{path.name.split('.')[0]},{path.name},{0.5 if path.suffix == '.png' else ''}")
    (folder / "cohort.csv").write_text("\n".join(lines) + "\n")


def tiling_items(folder):
    """Tile slides of all formats with several settings."""
    slides, table = folder / "slides", folder / "slides" / "cohort.csv"
    slides.mkdir()
    write_tiling_slides(slides)
    masks = folder / "masks"
    masks.mkdir()
    mask = np.zeros((250, 350), np.uint8)
    cv2.circle(mask, (120, 130), 90, 255, -1)
    cv2.imwrite(str(masks / "aperio.png"), mask)
    ring = [[100, 80], [900, 120], [700, 760], [300, 600], [100, 80]]
    outline = {"type": "Feature", "properties": {}, "geometry": {"type": "Polygon", "coordinates": [ring]}}
    (masks / "leica.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": [outline]}))
    both = ("--only", "aperio", "--only", "leica")
    settings = {
        "default": (),
        "overlap": ("--size", 64, "--overlap", 16, "--min-tissue", 0.5),
        "darkness": ("--size", 96, "--mpp", 1.0, "--tissue", "darkness", "--keep-pen", "--keep-blur"),
        "texture": ("--size", 112, "--mpp", 0.4, "--tissue", "texture", "--layout", "clam"),
        "mask": ("--size", 128, "--tissue-mask", masks, *both),
        "padded": ("--size", 192, "--edge-tiles", "pad"),
    }
    items = {}
    for name, arguments in settings.items():
        out = folder / "tiles" / name
        run("tile", table, "--out", out, *arguments, "--workers", 1, "--allow-failures", 1)
        found = collect_items(out)
        coords = {part: item for part, item in found.items() if part.endswith(" coords")}
        assert coords
        items[f"{name} positions"] = Item("exact", {Path(part).stem: item.parts[""] for part, item in coords.items()})
        items |= {f"{name} {part}": item for part, item in found.items() if part.startswith("summary.csv")}
    return items


# --- features


def feature_items(folder):
    """Embed tiles of several scales with the command, and fixed pixels with the encoder."""
    lines, tiles = ["slide_id,path,mpp"], folder / "tiles"
    scales = {"whole": 0.5, "half": 0.25, "quarter": 0.125, "from a level": 0.25, "uneven": 0.33, "enlarged": 0.6}
    for number, (name, mpp) in enumerate(scales.items()):
        side_px0 = round(112 / mpp)
        pixels = uneven_tissue(2 * side_px0 + 40, side_px0 + 40, 20 + number)
        downsamples = (1, 2) if name == "from a level" else (1,)
        options = {"compression": "zlib", "aperio": False, "downsamples": downsamples}
        write_slide(folder / f"{name}.tif", pixels, mpp=mpp, **options)
        positions = np.array([[0, 0], [side_px0, 0], [17, 23]])
        size_px0 = (pixels.shape[1], pixels.shape[0])
        metadata = {"overlap_px": 0, "size_px0": size_px0, "fingerprint": "tiles", "summary": {}}
        write_tiles(tiles, TileSet(name, positions, side_px0, 224, 0.5, mpp, **metadata), "trident")
        lines.append(f"{name},{name}.tif,{mpp}")
    (folder / "cohort.csv").write_text("\n".join(lines) + "\n")
    arguments = ("--encoder", "tapfm-pocket", "--device", "cpu", "--workers", 0, "--tiles", tiles)
    run("embed", folder / "cohort.csv", *arguments, "--out", folder / "features", "--batch", 2)
    found = collect_items(folder / "features")
    items = {
        name: Item(kind, {Path(item).stem: each.parts[""] for item, each in found.items() if item.endswith(f" {name}")})
        for name, kind in (("features", "float32"), ("attention", "float32"), ("coords", "exact"))
    }
    rng = np.random.default_rng(5)
    for feature, tile_px in (("cls", 224), ("cls+mean", 224), ("cls+mean", 160)):
        smooth = np.stack([uneven_tissue(tile_px, tile_px, seed) for seed in (31, 32)])
        noise = rng.integers(0, 256, (1, tile_px, tile_px, 3), np.uint8)
        pixels = torch.from_numpy(np.concatenate([smooth, noise]).transpose(0, 3, 1, 2).copy())
        encoder = load_encoder("tapfm-pocket", feature=feature, tile_px=tile_px).encoder
        encoded = prepare_encoder(encoder).encode(pixels, 2)
        parts = {part: values.numpy() for part, values in zip(("features", "attention"), encoded, strict=True)}
        items[f"{feature}, tiles of {tile_px} px"] = Item("float32", parts)
    return items


# --- synthetic slides


def synthetic_items(folder):
    """Generate slides of both tasks with their ground truth: 20x and 40x, folds, pen marks, out-of-focus regions."""
    items = {}
    for task, seed in (("fgfr3", 22), ("luad4", 0)):
        out = folder / task
        size = ("--slides", 3, "--external", 1, "--tiles-per-slide", 10)
        settings = ("--seed", seed, "--prevalence", 0.5, "--workers", 1)
        run("synth", out, "--task", task, *size, *settings, "--difficulty", "medium" if task == "fgfr3" else "hard")
        found = collect_items(out, reduce_to_blocks, exclude=("truth/*.png", "truth/*.geojson", "README.md"))
        items |= {f"{task} {name}": item for name, item in found.items()}
        fractions = {}
        for path in sorted((out / "truth").glob("*.png")):
            truth = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
            fractions[path.stem] = np.bincount(truth.reshape(-1), minlength=32) / truth.size
        items[f"{task} compartments and foci"] = Item("float32", fractions)
        classes = {}
        for path in sorted((out / "truth").glob("*.geojson")):
            outlines = json.loads(path.read_text())["features"]
            classes[path.stem] = np.array([each["properties"]["classification"]["name"] for each in outlines], np.str_)
        items[f"{task} outlines"] = Item("exact", classes)
    return items


# --- colours


def colour_items(_):
    """Compute colour statistics of tiles of tissue, of noise, and of a single colour."""
    rng = np.random.default_rng(6)
    images = {
        "tissue": uneven_tissue(448, 224, 41).reshape(224, 2, 224, 3).transpose(1, 3, 0, 2),
        "noise": rng.integers(0, 256, (3, 3, 64, 64), np.uint8),
        "one colour": np.broadcast_to(np.array([200, 30, 90], np.uint8)[None, :, None, None], (2, 3, 8, 8)),
    }
    histograms = {name: colour_statistics.colour_histograms(pixels) for name, pixels in images.items()}
    histograms["all"] = sum(histograms.values())
    statistics = {name: np.array(colour_statistics.colour_statistics(each)) for name, each in histograms.items()}
    names = np.array(colour_statistics.COLOUR_STATISTICS, np.str_)
    return {
        "histograms": Item("exact", histograms),
        "statistics": Item("statistic", statistics),
        "names": Item("exact", {"names": names}),
    }


# --- drawing


def invented_values(columns, count):
    """Return different values for each column of a tile table, with ties."""
    indices = np.arange(count)
    values = {}
    for number, column in enumerate(columns):
        waves = np.round(np.sin(indices * (0.7 + 0.31 * number)) + 0.3 * np.cos(indices * 2.1), 2)
        if column == "weight":
            waves = np.abs(waves) / np.abs(waves).sum()
        values[column] = waves * (0.02 if column == "attention" else 1.0)
    return values


def drawing_items(folder):
    """Draw heatmaps, galleries and GeoJSON of a 20x slide with weights, and of a 40x slide with bounds and scores."""
    options = {"compression": "zlib", "aperio": False}
    plain = write_slide(folder / "plain.tif", uneven_tissue(1500, 1100, 51), **options)
    areas = [(771, 333, uneven_tissue(1792, 1536, 52))]
    bounded = write_scn(folder / "bounded.scn", areas, (2900, 2100), mpp=0.25, objective=40)
    items = {}
    columns = {
        plain: ("attention", "weight", "contribution.EGFR", "contribution.KRAS"),
        bounded: ("attention", "score.EGFR"),
    }
    for path, names in columns.items():
        mpp, targets = (0.5, ("EGFR", "KRAS")) if path is plain else (0.25, ("EGFR",))
        predicted = replace(predicted_file(path, mpp=mpp, targets=targets), columns=names)
        positions = tile_positions(predicted)
        table = TileTable(positions, invented_values(names, len(positions)))
        out = folder / path.stem
        out.mkdir()
        write_slide_outputs(write_prediction(out, predicted, table), out, heatmaps=True, geojson=True)
        found = collect_items(out, reduce_to_blocks, exclude=("slide.json", "*.parquet"))
        items |= {f"{path.stem} {name}": item for name, item in found.items()}
    return items


# --- commands


def write_slides():
    """Write slides in place of those of `tapfm synth`, which depend on the rounding of the processor."""
    Path("synthetic").mkdir()
    lines = ["slide_id,path,patient_id,EGFR,KRAS,scanner"]
    for number in range(SMALL.slides):
        mpp = 0.25 if number % 5 == 2 else 0.5
        size_px = [round(each / mpp) for each in (440, 360)]
        colour = np.array(EOSIN) - (number * 7 % 30, number * 11 % 25, number * 5 % 40)
        options = {"compression": "zlib", "aperio": number % 2 == 0}
        name = f"S{number + 1:03}.{'svs' if options['aperio'] else 'tif'}"
        write_slide(Path("synthetic") / name, uneven_tissue(*size_px, 60 + number, colour), mpp=mpp, **options)
        labels = f"{number % 2},{number // 3 % 2}"
        lines.append(f"S{number + 1:03},{name},P{min(number, 12) + 1:03},{labels},{'alpha' if number % 3 else 'bravo'}")
    Path("synthetic/cohort.csv").write_text("\n".join(lines) + "\n")


def command_items(folder):
    """Run the commands of a small study from slides to predictions, like tools/compare_versions.py."""

    def command(arguments):
        result = tapfm(*arguments)
        if result.returncode:
            print(result.output)
        return result.returncode, result.stdout

    run_scenario(folder / "scenario", command, SMALL, create_slides=write_slides)
    # weights, inputs, outlines, and images that contain text, which are in the golden file `drawing`
    exclude = ("*.safetensors", "synthetic/*", "*/tissue/*", "sampled_tiles.json", "*/overlays/*")
    items = collect_items(folder / "scenario", reduce_to_blocks, (*exclude, "*/heatmap-*.png", "*/gallery-*.png"))
    # a value between two colours may have either of them, depending on the processor
    items = {name: item for name, item in items.items() if item.kind != "pixels"}
    # three numbers per slide and setting instead of all positions
    sampled = json.loads((folder / "scenario" / "sampled_tiles.json").read_text())
    checks = {name: np.array([len(tiles), sum(tiles), tiles[-1]]) for name, tiles in sampled.items()}
    return items | {"sampled tiles: count, sum, last": Item("exact", checks)}


@dataclass(frozen=True)
class GoldenCase:
    """A golden file: the function that creates its items, and the version number of the code behind them."""

    create: Callable[[Path], Items]
    module: ModuleType | None = None
    constant: str = ""

    @property
    def version(self):
        return None if self.module is None else getattr(self.module, self.constant)

    @property
    def place(self):
        """Path of the module with the version number, relative to src/tapfm."""
        return Path(self.module.__file__).relative_to(Path(self.module.__file__).parents[1]).as_posix()


CASES = {
    "tiling": GoldenCase(tiling_items, tiling, "TILING_VERSION"),
    "features": GoldenCase(feature_items, features, "FEATURES_VERSION"),
    "synthetic": GoldenCase(synthetic_items, cohort_plan, "SYNTHETIC_VERSION"),
    "colours": GoldenCase(colour_items, colour_statistics, "COLOURS_VERSION"),
    "drawing": GoldenCase(drawing_items, layers, "DRAWING_VERSION"),
    "commands": GoldenCase(command_items),
}


def create_items(name: str) -> Items:
    """Create the items of a golden file with the current code."""
    with tempfile.TemporaryDirectory(prefix=f"tapfm-golden-{name}-") as folder, one_thread():
        items = CASES[name].create(Path(folder))
    return {item: each for item, each in items.items() if not item.endswith(" messages")}  # wording may change


def find_differences(name: str, items: Items) -> list[Verdict]:
    """Compare items with a golden file."""
    golden, _ = read_golden(FOLDER / name)
    return [verdict for verdict in compare_items(golden, items, GOLDEN) if verdict.problem]


def describe_differences(name: str, items: Items) -> str:
    """Return how items differ from a golden file and what to do about it, or an empty string if they do not differ."""
    case, found = CASES[name], find_differences(name, items)
    _, golden_version = read_golden(FOLDER / name)
    if golden_version != case.version:
        return (
            f"{case.constant} is {case.version}, and the golden file was written by version {golden_version}. "
            f"Write it again: {WRITE_COMMAND} {name}"
        )
    if not found:
        return ""
    listed = "\n".join(f"  {each.name}: {each.problem}" for each in found)
    if case.module is None:
        return (
            f"The results of the commands differ from the golden file:\n{listed}\nIf this is intended, add it to the "
            f"changelog, then write the golden file again: {WRITE_COMMAND} {name}"
        )
    return (
        f"The output of {name} changed, and {case.constant} is still {case.version}:\n{listed}\nIf this is intended, "
        f"increase {case.constant} in {case.place}, then write the golden files again: {WRITE_COMMAND}"
    )
