"""Write slide files with known content for tests."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import tifffile

REAL = Path(__file__).parents[2] / "shared" / "data" / "slides"
needs_real_slides = pytest.mark.skipif(not REAL.exists(), reason=f"no real slides in {REAL}")

GLASS = (243, 242, 244)
EOSIN = (222, 150, 190)
SCN_NAMESPACE = "http://www.leica-microsystems.com/scn/2010/10/01"


def section(width_px, height_px, *, seed=0, tissue=(0.1, 0.1, 0.9, 0.9), nuclei_per_mpx=3000, colour=EOSIN):
    """Return an image of glass with a rectangle of sharp, stained tissue.

    tissue: left, top, right and bottom as fractions of the image.
    """
    rng = np.random.default_rng(seed)
    image = np.full((height_px, width_px, 3), GLASS, np.float32)
    left, right = (round(fraction * width_px) for fraction in tissue[::2])
    top, bottom = (round(fraction * height_px) for fraction in tissue[1::2])
    part = image[top:bottom, left:right]
    part[:] = colour
    count = round(nuclei_per_mpx * part.shape[0] * part.shape[1] / 1e6)
    for x, y, radius in zip(
        rng.integers(0, max(1, part.shape[1]), count),
        rng.integers(0, max(1, part.shape[0]), count),
        rng.integers(4, 9, count),
        strict=True,
    ):
        nucleus = part[max(y - radius, 0) : y + radius, max(x - radius, 0) : x + radius]
        nucleus[:] = (110, 70, 150)
    image += rng.normal(0, 2, image.shape)
    return np.clip(image, 0, 255).astype(np.uint8)


def write_slide(
    path,
    pixels,
    *,
    mpp=0.5,
    objective=None,
    downsamples=(1, 4),
    tile_px=256,
    compression="jpeg",
    level=90,
    subsampling=(1, 1),
    aperio=True,
    predictor=False,
    resolution_mpp=None,
):
    """Write a tiled pyramid: an Aperio SVS, or a plain TIFF with the scale in its resolution tag."""
    objective = round(10 / mpp) if objective is None and mpp is not None else objective
    height_px, width_px = pixels.shape[:2]
    fields = [f"AppMag = {objective}"] * (objective is not None) + [f"MPP = {mpp}"] * (mpp is not None)
    description = "|".join(
        [f"Aperio Image Library v12.0\r\n{width_px}x{height_px} (256x256) JPEG/RGB Q={level}", *fields]
    )
    resolution_mpp = mpp if resolution_mpp is None else resolution_mpp
    options = {
        "tile": (tile_px, tile_px),
        "photometric": "rgb" if pixels.ndim == 3 else "minisblack",
        "compression": compression,
        "metadata": None,
    }
    if compression == "jpeg":
        options |= {"subsampling": subsampling, "compressionargs": {"level": level}}
    if predictor:
        options["predictor"] = True
    with tifffile.TiffWriter(path) as file:
        for downsample in downsamples:
            size = (width_px // downsample, height_px // downsample)
            image = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA) if downsample > 1 else pixels
            if aperio:
                file.write(image, description=description, **options)
                continue
            scale = {}
            if resolution_mpp is not None:
                scale = {"resolution": (10_000 / resolution_mpp,) * 2, "resolutionunit": "CENTIMETER"}
            file.write(image, subfiletype=int(downsample > 1), **scale, **options)
    return path


def write_ome(path, pixels, *, mpp=0.5, downsamples=(1, 2, 4)):
    """Write an OME-TIFF with its pyramid in SubIFDs."""
    metadata = {"axes": "YXS", "PhysicalSizeX": mpp, "PhysicalSizeXUnit": "µm", "PhysicalSizeY": mpp}
    metadata |= {"PhysicalSizeYUnit": "µm"}
    options = {"tile": (128, 128), "photometric": "rgb", "compression": "zlib"}
    with tifffile.TiffWriter(path, ome=True) as file:
        file.write(pixels, subifds=len(downsamples) - 1, metadata=metadata, **options)
        for downsample in downsamples[1:]:
            size = (pixels.shape[1] // downsample, pixels.shape[0] // downsample)
            file.write(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA), subfiletype=1, **options)
    return path


def write_scn(path, areas, canvas_px, *, mpp=0.5, objective=20):
    """Write a Leica SCN: areas of tissue at (x, y) on a canvas that is transparent between them."""
    nm = round(mpp * 1000)
    pages, images = [np.full((64, 128, 3), 240, np.uint8)], []

    def format_image(name, width_px, height_px, x_px, y_px, pixels_xml, power):
        return (
            f'<image name="{name}">{pixels_xml}<view sizeX="{width_px * nm}" sizeY="{height_px * nm}" '
            f'offsetX="{x_px * nm}" offsetY="{y_px * nm}" spacingZ="0"/><device model="generated" version="1"/>'
            f"<scanSettings><objectiveSettings><objective>{power}</objective></objectiveSettings><illuminationSettings>"
            "<numericalAperture>0.4</numericalAperture><illuminationSource>brightfield</illuminationSource>"
            "</illuminationSettings></scanSettings></image>"
        )

    def format_pixels(sizes):
        entries = (f'<dimension sizeX="{w}" sizeY="{h}" r="{r}" ifd="{ifd}"/>' for r, (w, h, ifd) in enumerate(sizes))
        return f'<pixels sizeX="{sizes[0][0]}" sizeY="{sizes[0][1]}">{"".join(entries)}</pixels>'

    images.append(format_image("macro", *canvas_px, 0, 0, format_pixels([(128, 64, 0)]), 0.6))
    for number, (x_px, y_px, pixels) in enumerate(areas):
        sizes = []
        for downsample in (1, 4):
            level = cv2.resize(
                pixels, (pixels.shape[1] // downsample, pixels.shape[0] // downsample), interpolation=cv2.INTER_AREA
            )
            sizes.append((level.shape[1], level.shape[0], len(pages)))
            pages.append(level)
        xml = format_pixels(sizes)
        images.append(format_image(f"area {number}", pixels.shape[1], pixels.shape[0], x_px, y_px, xml, objective))
    description = (
        f'<?xml version="1.0"?><scn xmlns="{SCN_NAMESPACE}" uuid="urn:uuid:1"><collection name="c" uuid="urn:uuid:2" '
        f'sizeX="{canvas_px[0] * nm}" sizeY="{canvas_px[1] * nm}">{"".join(images)}</collection></scn>'
    )
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for number, page in enumerate(pages):
            file.write(
                page,
                tile=(256, 256),
                photometric="rgb",
                subsampling=(1, 1),
                compression="jpeg",
                compressionargs={"level": 95},
                description=description if number == 0 else None,
                resolution=(10_000 / mpp, 10_000 / mpp),
                resolutionunit="CENTIMETER",
                metadata=None,
            )
    return path


def damage(path, blocks):
    """Damage JPEG tiles of level 0, given by index."""
    with tifffile.TiffFile(path) as file:
        offsets = file.pages[0].dataoffsets
    data = bytearray(path.read_bytes())
    for block in blocks:
        data[offsets[block] : offsets[block] + 64] = bytes(64)
    path.write_bytes(data)
    return path


def copy_slide(source, target):
    """Copy a slide and append the name of the copy, because a cohort must not contain two copies of a file."""
    target.write_bytes(source.read_bytes() + target.name.encode())
