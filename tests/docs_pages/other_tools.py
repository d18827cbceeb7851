"""Output folders of TRIDENT, CLAM, STAMP and Patho-Bench for ten small slides."""

import h5py
import numpy as np
import torch
from slide_files import section, write_slide

SLIDES = [f"case-{number:02}" for number in range(10)]
SPLITS = ["train"] * 4 + ["val"] * 2 + ["test"] * 4
POSITIONS = np.array([[0, 0], [224, 0], [0, 224], [224, 224]])
FEATURE_SIZE = 128  # of tapfm-pocket


def write_h5(path, datasets, attributes=None, file_attributes=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file.attrs.update(file_attributes or {})
        for name, data in datasets.items():
            file.create_dataset(name, data=data).attrs.update((attributes or {}).get(name, {}))


def write_trident(folder, name, features):
    attributes = {
        "patch_size": 224,
        "patch_size_level0": 224,
        "level0_magnification": 20,
        "target_magnification": 20,
        "overlap": 0,
        "name": name,
        "savetodir": "trident",
        "level0_width": 448,
        "level0_height": 448,
    }
    job = folder / "20x_224px_0px_overlap"
    write_h5(job / "patches" / f"{name}_patches.h5", {"coords": POSITIONS.astype(np.int64)}, {"coords": attributes})
    both = {"features": {"name": name, "savetodir": "trident", "encoder": "uni_v1"}, "coords": attributes}
    write_h5(job / "features_uni_v1" / f"{name}.h5", {"features": features, "coords": POSITIONS}, both)


def write_clam(folder, name, features):
    attributes = {
        "patch_size": 224,
        "patch_level": 0,
        "downsample": np.array([1.0, 1.0]),
        "downsampled_level_dim": np.array([448, 448]),
        "level_dim": np.array([448, 448]),
        "name": name,
        "save_path": "patches",
    }
    write_h5(folder / "patches" / f"{name}.h5", {"coords": POSITIONS.astype(np.int32)}, {"coords": attributes})
    datasets = {"features": features, "coords": POSITIONS.astype(np.int32)}
    write_h5(folder / "features" / "h5_files" / f"{name}.h5", datasets)
    (folder / "features" / "pt_files").mkdir(exist_ok=True)
    torch.save(torch.from_numpy(features), folder / "features" / "pt_files" / f"{name}.pt")


def write_stamp(folder, name, features):
    attributes = {
        "stamp_version": "2.3.0",
        "extractor": "uni",
        "unit": "um",
        "tile_size_um": 112.0,
        "tile_size_px": 224,
        "code_hash": "abcdef12",
        "feat_type": "tile",
    }
    datasets = {"feats": features.astype(np.float16), "coords": POSITIONS * 0.5}
    write_h5(folder / "uni-abcdef12" / f"{name}.h5", datasets, file_attributes=attributes)


def write_table(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def write_tables(folder):
    patients = [f"P{min(number, 8)}" for number in range(len(SLIDES))]  # the last two slides have the same patient
    rows = list(zip(SLIDES, patients, SPLITS, [number % 2 for number in range(len(SLIDES))], strict=True))
    write_table(folder / "trident" / "list.csv", ["wsi,mpp", *(f"{name}.svs,0.5" for name in SLIDES)])
    write_table(
        folder / "clam" / "dataset.csv",
        ["case_id,slide_id,label", *(f"{patient},{name},{label}" for name, patient, _, label in rows)],
    )
    columns = [
        [name for name, split in zip(SLIDES, SPLITS, strict=True) if split == each] for each in ("train", "val", "test")
    ]
    longest = max(map(len, columns))
    ragged = [[column[i] if i < len(column) else "" for column in columns] for i in range(longest)]
    write_table(
        folder / "clam" / "splits" / "splits_0.csv",
        [",train,val,test", *(f"{i},{','.join(line)}" for i, line in enumerate(ragged))],
    )
    unique_patients = dict.fromkeys(patients)
    labels = {patient: label for _, patient, _, label in rows}
    labels["P8"] = 0
    write_table(
        folder / "stamp" / "clini.csv", ["PATIENT,FGFR3", *(f"{each},{labels[each]}" for each in unique_patients)]
    )
    write_table(
        folder / "stamp" / "slide.csv", ["PATIENT,FILENAME", *(f"{patient},{name}.h5" for name, patient, *_ in rows)]
    )
    write_table(
        folder / "patho-bench" / "k=all.tsv",
        ["case_id\tslide_id\tFGFR3\tfold_0", *("\t".join(map(str, (p, n, y, s))) for n, p, s, y in rows)],
    )


def write_other_tools_files(folder):
    rng = np.random.default_rng(0)
    for number, name in enumerate(SLIDES):
        (folder / "slides").mkdir(parents=True, exist_ok=True)
        pixels = section(448, 448, seed=number, tissue=(0, 0, 1, 1))
        write_slide(folder / "slides" / f"{name}.svs", pixels, tile_px=224, downsamples=(1,))
        features = rng.normal(size=(len(POSITIONS), FEATURE_SIZE)).astype(np.float32)
        write_trident(folder / "trident", name, features)
        write_clam(folder / "clam", name, features)
        write_stamp(folder / "stamp", name, features)
    write_tables(folder)
    return folder
