"""Write DICOM slides with pydicom for tests."""

import cv2
import imagecodecs
import numpy as np
import pydicom
from pydicom.encaps import encapsulate, encapsulate_extended
from pydicom.valuerep import format_number_as_ds


def write_dicom(
    folder,
    pixels,
    *,
    mpp=0.5,
    downsamples=(1, 4),
    tile_px=128,
    photometric="YBR_FULL",
    compression="jpeg",
    subsampling="444",
    offset_table="basic",
):
    """Write a DICOM slide to a folder: one file per level, and a green label that is larger than the slide.

    compression: jpeg or None. offset_table: where the offsets of JPEG frames are listed: basic, extended or None.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes = [(pixels.shape[1] // downsample, pixels.shape[0] // downsample) for downsample in downsamples]
    images = [cv2.resize(pixels, size, interpolation=cv2.INTER_AREA) for size in sizes]
    label = np.full((pixels.shape[0] + 500, pixels.shape[1] + 500, 3), (0, 200, 0), np.uint8)
    for number, image in enumerate([*images, label]):
        image_type = "LABEL" if image is label else "VOLUME"
        header = _make_header(f"{folder}", number, image, tile_px, image_type)
        header.PhotometricInterpretation = photometric
        if mpp is not None:
            spacing_mm = mpp * pixels.shape[1] / image.shape[1] / 1000
            header.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence = [pydicom.Dataset()]
            header.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].PixelSpacing = [
                format_number_as_ds(spacing_mm)
            ] * 2
            header.OpticalPathSequence[0].ObjectiveLensPower = format_number_as_ds(10 / mpp)
        frames = _cut_frames(image, tile_px)
        header.NumberOfFrames = len(frames)
        ycbcr = photometric != "RGB"
        if compression == "jpeg":
            header.file_meta.TransferSyntaxUID = pydicom.uid.JPEGBaseline8Bit
            colour_spaces = {"colorspace": "RGB", "outcolorspace": "YCBCR" if ycbcr else "RGB"}
            encoded = [
                imagecodecs.jpeg8_encode(frame, level=95, subsampling=subsampling, **colour_spaces) for frame in frames
            ]
            if offset_table == "extended":
                header.PixelData, header.ExtendedOffsetTable, header.ExtendedOffsetTableLengths = encapsulate_extended(
                    encoded
                )
            else:
                header.PixelData = encapsulate(encoded, has_bot=offset_table == "basic")
        else:
            header.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
            header.PixelData = b"".join((rgb_to_ycbcr(frame) if ycbcr else frame).tobytes() for frame in frames)
        header.save_as(folder / f"{number}.dcm", enforce_file_format=True)
    return folder


def _make_header(name, number, image, tile_px, image_type):
    """Return the header of one image of a slide, without its frames and its scale."""
    header = pydicom.Dataset()
    header.SOPClassUID = pydicom.uid.VLWholeSlideMicroscopyImageStorage
    header.SOPInstanceUID = pydicom.uid.generate_uid(entropy_srcs=[name, str(number)])
    header.SeriesInstanceUID = pydicom.uid.generate_uid(entropy_srcs=[name])
    header.file_meta = pydicom.dataset.FileMetaDataset()
    header.file_meta.MediaStorageSOPClassUID = header.SOPClassUID
    header.file_meta.MediaStorageSOPInstanceUID = header.SOPInstanceUID
    header.ImageType = ["ORIGINAL" if number == 0 else "DERIVED", "PRIMARY", image_type, "NONE"]
    if image_type == "VOLUME" and number > 0:
        header.ImageType[3] = "RESAMPLED"
    header.DimensionOrganizationType = "TILED_FULL"
    header.TotalPixelMatrixRows, header.TotalPixelMatrixColumns = image.shape[:2]
    header.Rows = header.Columns = tile_px
    header.SamplesPerPixel, header.PlanarConfiguration, header.PixelRepresentation = 3, 0, 0
    header.BitsAllocated, header.BitsStored, header.HighBit = 8, 8, 7
    header.SharedFunctionalGroupsSequence, header.OpticalPathSequence = [pydicom.Dataset()], [pydicom.Dataset()]
    return header


def _cut_frames(image, tile_px):
    """Return the tiles of an image row by row, padded with white."""
    height_px, width_px = (-(-side_px // tile_px) * tile_px for side_px in image.shape[:2])
    padded = np.full((height_px, width_px, 3), 255, np.uint8)
    padded[: image.shape[0], : image.shape[1]] = image
    corners = [(x, y) for y in range(0, height_px, tile_px) for x in range(0, width_px, tile_px)]
    return [np.ascontiguousarray(padded[y : y + tile_px, x : x + tile_px]) for x, y in corners]


def rgb_to_ycbcr(pixels):
    """Convert RGB to YCbCr of full range."""
    red, green, blue = (pixels[..., i].astype(np.float64) for i in range(3))
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    chroma_blue, chroma_red = 128 + (blue - luma) / 1.772, 128 + (red - luma) / 1.402
    return np.clip(np.rint(np.stack([luma, chroma_blue, chroma_red], axis=-1)), 0, 255).astype(np.uint8)


def edit_dicom(path, **changes):
    """Replace attributes of a DICOM file; `transfer_syntax` replaces its transfer syntax, without encoding it again."""
    header = pydicom.dcmread(path)
    if (syntax := changes.pop("transfer_syntax", None)) is not None:
        header.file_meta.TransferSyntaxUID = syntax
    for name, value in changes.items():
        setattr(header, name, value)
    header.save_as(path)
