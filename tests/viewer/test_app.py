"""Responses of the viewer's web application."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from predicted_slides import predicted_slide
from slide_files import damage, needs_real_slides, section, write_scn, write_slide
from viewer_fixtures import SIDE, slide_keys, viewer_client, write_predicted_slide, write_two_predictions

from tapfm.slides.opening import open_slide

MAX_JPEG_DIFFERENCE = 12  # mean difference of pixels due to encoding; shifted images of sharp nuclei differ by far more


def decode_jpeg(response):
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "image/jpeg"
    return np.asarray(Image.open(io.BytesIO(response.content)).convert("RGB"))


def difference(first, second):
    assert first.shape == second.shape
    return np.abs(first.astype(int) - second.astype(int)).mean()


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    return write_two_predictions(tmp_path_factory.mktemp("viewer"))


@pytest.fixture(scope="module")
def client(predicted):
    with viewer_client(predicted) as client:
        yield client


def test_the_collection_contains_predictions_but_no_paths(client, predicted):
    response = client.get("/api/collection")
    data = response.json()
    assert data["targets"] == ["FGFR3"]
    first = data["slides"][0]
    assert (first["slide_id"], first["patient_id"], first["has_file"], first["tiles"]) == ("case-1", "P17", True, 117)
    assert first["targets"]["FGFR3"] | {"logit": 0} == {
        "logit": 0,
        "probability": 0.25,
        "threshold": 0.5,
        "call": 1,
        "label": 1,
        "constant": -0.5,
        "call_name": "positive",
        "label_name": "positive",
    }
    assert len(data["palettes"]["diverging"]) == 256
    details = client.get(f"/api/slides/{first['key']}").text
    assert str(predicted.parent) not in response.text + details


def test_a_slide_has_size_scale_and_layers(client):
    data = client.get(f"/api/slides/{slide_keys(client)['case-1']}").json()
    assert (data["width_px0"], data["height_px0"], data["mpp"]) == (1300, 900, 0.5)
    assert data["bounds"] == {"x_px0": 0, "y_px0": 0, "width_px0": 1300, "height_px0": 900}
    assert (data["last_level"], data["image_px"], data["side_px0"]) == (2, 512, SIDE)
    assert [layer["column"] for layer in data["layers"]] == ["contribution.FGFR3", "weight", "attention"]
    assert data["notes"] == []


def test_a_prediction_from_few_tiles_has_a_warning(tmp_path):
    path = write_slide(tmp_path / "slide.svs", section(450, 350), aperio=False, downsamples=(1,))
    write_predicted_slide(tmp_path / "predicted", path, "few")
    with viewer_client(tmp_path / "predicted") as client:
        (slide,) = client.get("/api/collection").json()["slides"]
        assert (slide["tiles"], slide["warning"]) == (12, "only 12 tiles")


@pytest.mark.parametrize("index", [(0, 0), (1, 0), (2, 1), (0, 1)])
def test_images_of_the_last_level_have_the_pixels_of_the_slide(client, predicted, index):
    column, row = index
    image = decode_jpeg(client.get(f"/api/slides/{slide_keys(client)['case-1']}/images/2/{column}_{row}.jpeg"))
    slide = open_slide(predicted.parent / "slides" / "case-1.svs")
    width, height = min(512, 1300 - 512 * column), min(512, 900 - 512 * row)
    expected = slide.read_level(0, 512 * column, 512 * row, width, height)
    assert difference(image, expected) < MAX_JPEG_DIFFERENCE
    assert difference(image[:, 3:], expected[:, :-3]) > 2 * difference(image, expected)


def test_images_of_lower_levels_are_downsampled(client, predicted):
    key = slide_keys(client)["case-1"]
    whole = open_slide(predicted.parent / "slides" / "case-1.svs").read_level(0, 0, 0, 1300, 900)
    for level, downsample in ((1, 2), (0, 4)):
        image = decode_jpeg(client.get(f"/api/slides/{key}/images/{level}/0_0.jpeg"))
        part = whole[: image.shape[0] * downsample, : image.shape[1] * downsample]
        size = (image.shape[1], image.shape[0])
        expected = np.asarray(Image.fromarray(part).resize(size, Image.Resampling.BOX))
        assert difference(image, expected) < MAX_JPEG_DIFFERENCE
    assert decode_jpeg(client.get(f"/api/slides/{key}/images/1/1_0.jpeg")).shape == (450, 138, 3)


def test_only_the_bounds_of_a_padded_slide_are_shown(tmp_path):
    area = section(700, 600, seed=3)
    path = write_scn(tmp_path / "padded.scn", [(512, 256, area)], (2048, 1536))
    write_predicted_slide(tmp_path / "predicted", path, "padded")
    with viewer_client(tmp_path / "predicted") as client:
        key = slide_keys(client)["padded"]
        data = client.get(f"/api/slides/{key}").json()
        assert data["bounds"] == {"x_px0": 512, "y_px0": 256, "width_px0": 700, "height_px0": 600}
        corner = decode_jpeg(client.get(f"/api/slides/{key}/images/{data['last_level']}/0_0.jpeg"))
        assert difference(corner, area[:512, :512]) < MAX_JPEG_DIFFERENCE
        edge = decode_jpeg(client.get(f"/api/slides/{key}/images/{data['last_level']}/1_1.jpeg"))
        assert difference(edge, area[512:, 512:]) < MAX_JPEG_DIFFERENCE
        # second tile of the second row; tile positions are relative to the corner of the slide, including the padding
        tile = decode_jpeg(client.get(f"/api/slides/{key}/tiles/8.jpeg"))
        assert difference(tile, area[SIDE : 2 * SIDE, SIDE : 2 * SIDE]) < MAX_JPEG_DIFFERENCE


def test_a_tile_has_full_resolution(client, predicted):
    image = decode_jpeg(client.get(f"/api/slides/{slide_keys(client)['case-2']}/tiles/16.jpeg"))  # 13 tiles per row
    slide = open_slide(predicted.parent / "slides" / "case-2.svs")
    assert difference(image, slide.read_level(0, 3 * SIDE, SIDE, SIDE, SIDE)) < MAX_JPEG_DIFFERENCE


def test_the_thumbnail_has_the_aspect_ratio_of_the_slide(client):
    assert decode_jpeg(client.get(f"/api/slides/{slide_keys(client)['case-2']}/thumbnail.jpeg")).shape == (177, 256, 3)


def test_tile_values_contain_every_tile(client):
    response = client.get(f"/api/slides/{slide_keys(client)['case-2']}/tile-values")
    length = int.from_bytes(response.content[:4], "little")
    header = json.loads(response.content[4 : 4 + length])
    assert header["count"] == 117
    assert len(response.content) == -(-(4 + length) // 4) * 4 + 117 * 4 * len(header["columns"])


def test_a_slide_without_prediction_has_no_layers(tmp_path):
    path = write_slide(tmp_path / "plain.tif", section(600, 400), mpp=None, aperio=False)
    with viewer_client(path) as client:
        key = slide_keys(client)["plain"]
        data = client.get(f"/api/slides/{key}").json()
        assert data["layers"] == []
        assert data["mpp"] is None
        assert "microns per pixel" in data["notes"][0]
        assert client.get(f"/api/slides/{key}/tile-values").status_code == 404
        assert client.get(f"/api/slides/{key}/tiles/0.jpeg").status_code == 404
        assert decode_jpeg(client.get(f"/api/slides/{key}/images/1/1_0.jpeg")).shape == (400, 88, 3)


def test_a_slide_whose_file_is_missing_still_has_tile_values(tmp_path):
    predicted = write_two_predictions(tmp_path)
    (tmp_path / "slides" / "case-1.svs").unlink()
    with viewer_client(predicted) as client:
        key = slide_keys(client)["case-1"]
        data = client.get(f"/api/slides/{key}").json()
        assert not data["has_file"]
        assert data["width_px0"] == 1300
        assert len(data["layers"]) == 3
        assert "--slides" in data["notes"][0]
        assert client.get(f"/api/slides/{key}/tile-values").status_code == 200
        for item in ("images/0/0_0.jpeg", "tiles/0.jpeg", "thumbnail.jpeg"):
            assert client.get(f"/api/slides/{key}/{item}").status_code == 404


def test_a_different_file_of_the_same_name_has_no_layers(tmp_path):
    predicted = write_two_predictions(tmp_path)
    write_slide(tmp_path / "slides" / "case-1.svs", section(800, 900))
    with viewer_client(predicted) as client:
        key = slide_keys(client)["case-1"]
        data = client.get(f"/api/slides/{key}").json()
        assert data["layers"] == []
        assert "different size" in data["notes"][0]
        assert client.get(f"/api/slides/{key}/tiles/0.jpeg").status_code == 404


def test_a_damaged_slide_is_reported_without_its_path(tmp_path, caplog):
    (tmp_path / "broken.svs").write_bytes(b"not a slide")
    write_slide(tmp_path / "intact.svs", section(300, 300))
    with viewer_client(tmp_path) as client:
        keys = slide_keys(client)
        for item in ("", "/thumbnail.jpeg", "/images/0/0_0.jpeg"):
            response = client.get(f"/api/slides/{keys['broken']}{item}")
            assert response.status_code == 422
            assert "damaged" in response.json()["error"]
            assert str(tmp_path) not in response.text
        assert client.get(f"/api/slides/{keys['intact']}/thumbnail.jpeg").status_code == 200
    assert "broken.svs" in caplog.text


def test_blocks_that_cannot_be_decoded_have_the_background_colour(tmp_path):
    path = damage(write_slide(tmp_path / "scratched.svs", section(2048, 2048), downsamples=(1,)), [9])
    with viewer_client(path) as client:
        response = client.get(f"/api/slides/{slide_keys(client)['scratched']}/images/0/0_0.jpeg")
        assert decode_jpeg(response).shape == (512, 512, 3)


def test_browsers_may_cache_the_data_of_a_key(client):
    key = slide_keys(client)["case-1"]
    for item in ("images/2/0_0.jpeg", "tiles/3.jpeg", "thumbnail.jpeg", "tile-values"):
        first = client.get(f"/api/slides/{key}/{item}")
        assert "immutable" in first.headers["cache-control"]
        assert first.headers["cache-control"].startswith("private")
        again = client.get(f"/api/slides/{key}/{item}", headers={"If-None-Match": f'"other", {first.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
    etags = {
        client.get(f"/api/slides/{key}/images/2/{index}.jpeg").headers["etag"]
        for key in slide_keys(client).values()
        for index in ("0_0", "1_0", "0_1")
    }
    assert len(etags) == 6


def test_the_page_is_revalidated_by_its_etag(client):
    index = client.get("/")
    assert index.headers["cache-control"] == "private, no-cache"
    assert client.get("/", headers={"If-None-Match": index.headers["etag"]}).status_code == 304


@pytest.mark.parametrize(
    "path",
    [
        "/api/slides/absent",
        "/api/slides/absent/thumbnail.jpeg",
        "/api/slides/{key}/images/3/0_0.jpeg",
        "/api/slides/{key}/images/2/3_0.jpeg",
        "/api/slides/{key}/images/2/-1_0.jpeg",
        "/api/slides/{key}/tiles/117.jpeg",
        "/api/slides/{key}/tiles/-1.jpeg",
        "/api/slides/{key}/label.jpeg",
        "/api/slides/{key}/macro.jpeg",
        "/assets/absent.js",
        "/docs",
        "/openapi.json",
    ],
)
def test_unknown_addresses_return_404_as_json(client, path):
    response = client.get(path.format(key=slide_keys(client)["case-1"]))
    assert response.status_code == 404
    assert set(response.json()) == {"error"}


def test_a_level_that_is_not_a_number_returns_404_as_json(client):
    response = client.get(f"/api/slides/{slide_keys(client)['case-1']}/images/two/0_0.jpeg")
    assert response.status_code == 404
    assert set(response.json()) == {"error"}


def test_an_internal_error_is_reported_without_details(predicted, monkeypatch):
    with viewer_client(predicted) as client:
        key = slide_keys(client)["case-1"]
        monkeypatch.setattr("tapfm.viewer.app._slide_summary", lambda _: {}[str(predicted)])
        response = client.get(f"/api/slides/{key}")
        assert response.status_code == 500
        assert set(response.json()) == {"error"}
        assert str(predicted) not in response.text
        assert response.headers["x-content-type-options"] == "nosniff"


# --- no other files


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../app.py",
        "/assets/..%2fapp.py",
        "/assets/%2e%2e/app.py",
        "/assets/%2e%2e%2f%2e%2e%2fpyproject.toml",
        "/assets/..%5capp.py",
        "/assets//etc/passwd",
        "/assets/%2fetc%2fpasswd",
        "/../../../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/etc/passwd",
        "//etc/passwd",
        "/api/slides/../../etc/passwd",
        "/api/slides/..%2f..%2fetc%2fpasswd",
        "/api/slides/%2fetc%2fpasswd",
        "/api/slides/{file}",
        "/api/slides/{file}/thumbnail.jpeg",
        "/api/slides/case-1",
        "/api/slides/case-1/thumbnail.jpeg",
        "/predicted/prediction.json",
        "/prediction.json",
        "/per-slide/case-1/slide.json",
        "/api/slides/{key}/../../../prediction.json",
        "/api/slides/{key}/tiles/..%2fslide.json",
        "/api/slides/{key}/slide.json",
        "/api/slides/{key}/tiles.parquet",
        "/slides/case-1.svs",
        "/static/index.html",
    ],
)
def test_no_other_file_is_served(client, predicted, path):
    file = str(predicted.parent / "slides" / "case-1.svs").replace("/", "%2f")
    response = client.get(path.format(key=slide_keys(client)["case-1"], file=file), follow_redirects=False)
    assert response.status_code == 404
    assert set(response.json()) == {"error"}


def test_symbolic_links_do_not_expose_other_files(tmp_path):
    (tmp_path / "slides").mkdir()
    secret = tmp_path / "secret.txt"
    secret.write_text("name and date of birth")
    (tmp_path / "slides" / "secret.svs").symlink_to(secret)
    (tmp_path / "slides" / "secret.txt").symlink_to(secret)
    write_slide(tmp_path / "slides" / "intact.svs", section(300, 300))
    with viewer_client(tmp_path / "slides") as client:
        keys = slide_keys(client)
        assert set(keys) == {"secret", "intact"}  # files without a slide suffix are not listed
        for item in ("", "/thumbnail.jpeg", "/images/0/0_0.jpeg", "/tile-values", "/tiles/0.jpeg"):
            response = client.get(f"/api/slides/{keys['secret']}{item}")
            assert response.status_code in (404, 422)
            assert "birth" not in response.text


def test_a_prediction_whose_path_is_not_a_slide_does_not_expose_the_file(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("name and date of birth")
    (tmp_path / "prediction.json").write_text("{}")
    predicted_slide(secret).write(tmp_path / "per-slide" / "case-17")
    with viewer_client(tmp_path) as client:
        response = client.get(f"/api/slides/{slide_keys(client)['case-17']}")
        assert response.status_code == 422
        assert "birth" not in response.text


@needs_real_slides
def test_label_and_macro_images_are_never_read(monkeypatch):
    import openslide
    from slide_files import REAL

    def fail(_):
        raise AssertionError("an associated image was read")

    monkeypatch.setattr(openslide.OpenSlide, "associated_images", property(fail))
    for name in ("CMU-1-Small-Region.svs", "CMU-1-Small-Region-DICOM"):
        with viewer_client(REAL / name) as client:
            (key,) = slide_keys(client).values()
            data = client.get(f"/api/slides/{key}").json()
            assert (data["width_px0"], data["height_px0"]) == (2220, 2967)
            for item in ("thumbnail.jpeg", f"images/{data['last_level']}/4_5.jpeg", "images/0/0_0.jpeg"):
                assert client.get(f"/api/slides/{key}/{item}").status_code == 200
