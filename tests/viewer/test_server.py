"""What is asked and what is answered."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from predicted_slides import predicted_slide
from slide_files import damage, needs_real_slides, section, write_scn, write_slide
from viewed_slides import SIDE, keys_of, predict, served, two_predictions

from tapfm.slides.opening import open_slide

GOOD_JPEG = 12  # mean difference of pixels that stay after encoding; shifted pixels of sharp nuclei differ by far more


def picture_of(answer):
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "image/jpeg"
    return np.asarray(Image.open(io.BytesIO(answer.content)).convert("RGB"))


def difference(one, other):
    assert one.shape == other.shape
    return np.abs(one.astype(int) - other.astype(int)).mean()


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    return two_predictions(tmp_path_factory.mktemp("viewed"))


@pytest.fixture(scope="module")
def client(predicted):
    with served(predicted) as client:
        yield client


def test_the_list_says_what_was_predicted_and_no_path(client, predicted):
    answer = client.get("/api/collection")
    told = answer.json()
    assert told["targets"] == ["FGFR3"]
    first = told["slides"][0]
    assert (first["slide_id"], first["patient_id"], first["has_file"], first["tiles"]) == ("case-1", "P17", True, 117)
    assert first["targets"]["FGFR3"] | {"logit": 0} == {
        "logit": 0,
        "probability": 0.25,
        "threshold": 0.5,
        "call": 1,
        "label": 1,
        "constant": -0.5,
    }
    assert len(told["palettes"]["diverging"]) == 256
    details = client.get(f"/api/slides/{first['key']}").text
    assert str(predicted.parent) not in answer.text + details


def test_a_slide_says_its_size_scale_and_layers(client):
    told = client.get(f"/api/slides/{keys_of(client)['case-1']}").json()
    assert (told["width_px0"], told["height_px0"], told["mpp"]) == (1300, 900, 0.5)
    assert told["bounds"] == {"x_px0": 0, "y_px0": 0, "width_px0": 1300, "height_px0": 900}
    assert (told["last_level"], told["picture_px"], told["side_px0"]) == (2, 512, SIDE)
    assert [layer["column"] for layer in told["layers"]] == ["contribution.FGFR3", "weight", "attention"]
    assert told["notes"] == []


@pytest.mark.parametrize("place", [(0, 0), (1, 0), (2, 1), (0, 1)])
def test_the_deepest_pictures_are_the_slide_s_own_pixels(client, predicted, place):
    column, row = place
    got = picture_of(client.get(f"/api/slides/{keys_of(client)['case-1']}/pictures/2/{column}_{row}.jpeg"))
    slide = open_slide(predicted.parent / "slides" / "case-1.svs")
    width, height = min(512, 1300 - 512 * column), min(512, 900 - 512 * row)
    expected = slide.read_level(0, 512 * column, 512 * row, width, height)
    assert difference(got, expected) < GOOD_JPEG
    assert difference(got[:, 3:], expected[:, :-3]) > 2 * difference(got, expected)


def test_coarser_pictures_are_the_same_place_shrunk(client, predicted):
    key = keys_of(client)["case-1"]
    whole = open_slide(predicted.parent / "slides" / "case-1.svs").read_level(0, 0, 0, 1300, 900)
    for level, shrink in ((1, 2), (0, 4)):
        got = picture_of(client.get(f"/api/slides/{key}/pictures/{level}/0_0.jpeg"))
        part = whole[: got.shape[0] * shrink, : got.shape[1] * shrink]
        size = (got.shape[1], got.shape[0])
        expected = np.asarray(Image.fromarray(part).resize(size, Image.Resampling.BOX))
        assert difference(got, expected) < GOOD_JPEG
    assert picture_of(client.get(f"/api/slides/{key}/pictures/1/1_0.jpeg")).shape == (450, 138, 3)


def test_of_a_padded_slide_only_its_bounds_are_shown(tmp_path):
    area = section(700, 600, seed=3)
    path = write_scn(tmp_path / "padded.scn", [(512, 256, area)], (2048, 1536))
    predict(tmp_path / "predicted", path, "padded")
    with served(tmp_path / "predicted") as client:
        key = keys_of(client)["padded"]
        told = client.get(f"/api/slides/{key}").json()
        assert told["bounds"] == {"x_px0": 512, "y_px0": 256, "width_px0": 700, "height_px0": 600}
        corner = picture_of(client.get(f"/api/slides/{key}/pictures/{told['last_level']}/0_0.jpeg"))
        assert difference(corner, area[:512, :512]) < GOOD_JPEG
        edge = picture_of(client.get(f"/api/slides/{key}/pictures/{told['last_level']}/1_1.jpeg"))
        assert difference(edge, area[512:, 512:]) < GOOD_JPEG
        # the second tile of the second row: its position counts from the corner of the slide, padding included
        tile = picture_of(client.get(f"/api/slides/{key}/tiles/8.jpeg"))
        assert difference(tile, area[SIDE : 2 * SIDE, SIDE : 2 * SIDE]) < GOOD_JPEG


def test_a_tile_comes_at_the_slide_s_own_resolution(client, predicted):
    got = picture_of(client.get(f"/api/slides/{keys_of(client)['case-2']}/tiles/16.jpeg"))  # 13 in a row
    slide = open_slide(predicted.parent / "slides" / "case-2.svs")
    assert difference(got, slide.read_level(0, 3 * SIDE, SIDE, SIDE, SIDE)) < GOOD_JPEG


def test_the_thumbnail_shows_the_slide(client):
    assert picture_of(client.get(f"/api/slides/{keys_of(client)['case-2']}/thumbnail.jpeg")).shape == (177, 256, 3)


def test_numbers_of_tiles_are_all_there(client):
    answer = client.get(f"/api/slides/{keys_of(client)['case-2']}/numbers")
    length = int.from_bytes(answer.content[:4], "little")
    header = json.loads(answer.content[4 : 4 + length])
    assert header["count"] == 117
    assert len(answer.content) == -(-(4 + length) // 4) * 4 + 117 * 4 * len(header["columns"])


def test_a_slide_without_prediction_is_shown_without_a_map(tmp_path):
    path = write_slide(tmp_path / "plain.tif", section(600, 400), mpp=None, aperio=False)
    with served(path) as client:
        key = keys_of(client)["plain"]
        told = client.get(f"/api/slides/{key}").json()
        assert told["layers"] == []
        assert told["mpp"] is None
        assert "microns per pixel" in told["notes"][0]
        assert client.get(f"/api/slides/{key}/numbers").status_code == 404
        assert client.get(f"/api/slides/{key}/tiles/0.jpeg").status_code == 404
        assert picture_of(client.get(f"/api/slides/{key}/pictures/1/1_0.jpeg")).shape == (400, 88, 3)


def test_without_its_file_a_slide_still_has_its_numbers(tmp_path):
    predicted = two_predictions(tmp_path)
    (tmp_path / "slides" / "case-1.svs").unlink()
    with served(predicted) as client:
        key = keys_of(client)["case-1"]
        told = client.get(f"/api/slides/{key}").json()
        assert not told["has_file"]
        assert told["width_px0"] == 1300
        assert len(told["layers"]) == 3
        assert "not where it was" in told["notes"][0]
        assert client.get(f"/api/slides/{key}/numbers").status_code == 200
        for what in ("pictures/0/0_0.jpeg", "tiles/0.jpeg", "thumbnail.jpeg"):
            assert client.get(f"/api/slides/{key}/{what}").status_code == 404


def test_another_file_of_that_name_gets_no_map(tmp_path):
    predicted = two_predictions(tmp_path)
    write_slide(tmp_path / "slides" / "case-1.svs", section(800, 900))
    with served(predicted) as client:
        key = keys_of(client)["case-1"]
        told = client.get(f"/api/slides/{key}").json()
        assert told["layers"] == []
        assert "another size" in told["notes"][0]
        assert client.get(f"/api/slides/{key}/tiles/0.jpeg").status_code == 404


def test_a_broken_slide_costs_only_itself_and_names_no_path(tmp_path, caplog):
    (tmp_path / "broken.svs").write_bytes(b"nothing")
    write_slide(tmp_path / "whole.svs", section(300, 300))
    with served(tmp_path) as client:
        keys = keys_of(client)
        for what in ("", "/thumbnail.jpeg", "/pictures/0/0_0.jpeg"):
            answer = client.get(f"/api/slides/{keys['broken']}{what}")
            assert answer.status_code == 422
            assert "damaged" in answer.json()["error"]
            assert str(tmp_path) not in answer.text
        assert client.get(f"/api/slides/{keys['whole']}/thumbnail.jpeg").status_code == 200
    assert "broken.svs" in caplog.text


def test_blocks_that_cannot_be_decoded_are_left_as_background(tmp_path):
    path = damage(write_slide(tmp_path / "scratched.svs", section(2048, 2048), downsamples=(1,)), [9])
    with served(path) as client:
        answer = client.get(f"/api/slides/{keys_of(client)['scratched']}/pictures/0/0_0.jpeg")
        assert picture_of(answer).shape == (512, 512, 3)


def test_browsers_keep_what_belongs_to_a_key(client):
    key = keys_of(client)["case-1"]
    for what in ("pictures/2/0_0.jpeg", "tiles/3.jpeg", "thumbnail.jpeg", "numbers"):
        first = client.get(f"/api/slides/{key}/{what}")
        assert "immutable" in first.headers["cache-control"]
        assert first.headers["cache-control"].startswith("private")
        again = client.get(f"/api/slides/{key}/{what}", headers={"If-None-Match": f'"other", {first.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
    tags = {
        client.get(f"/api/slides/{key}/pictures/2/{place}.jpeg").headers["etag"]
        for key in keys_of(client).values()
        for place in ("0_0", "1_0", "0_1")
    }
    assert len(tags) == 6


def test_the_page_is_asked_for_again_and_answered_briefly(client):
    page = client.get("/")
    assert page.headers["cache-control"] == "private, no-cache"
    assert client.get("/", headers={"If-None-Match": page.headers["etag"]}).status_code == 304


@pytest.mark.parametrize(
    "path",
    [
        "/api/slides/absent",
        "/api/slides/absent/thumbnail.jpeg",
        "/api/slides/{key}/pictures/3/0_0.jpeg",
        "/api/slides/{key}/pictures/2/3_0.jpeg",
        "/api/slides/{key}/pictures/2/-1_0.jpeg",
        "/api/slides/{key}/tiles/117.jpeg",
        "/api/slides/{key}/tiles/-1.jpeg",
        "/api/slides/{key}/label.jpeg",
        "/api/slides/{key}/macro.jpeg",
        "/assets/absent.js",
        "/docs",
        "/openapi.json",
    ],
)
def test_what_is_not_there_is_told_as_json(client, path):
    answer = client.get(path.format(key=keys_of(client)["case-1"]))
    assert answer.status_code == 404
    assert set(answer.json()) == {"error"}


def test_numbers_that_are_none_are_refused_without_a_traceback(client):
    answer = client.get(f"/api/slides/{keys_of(client)['case-1']}/pictures/two/0_0.jpeg")
    assert answer.status_code == 404
    assert set(answer.json()) == {"error"}


def test_a_mistake_of_ours_is_told_without_details(predicted, monkeypatch):
    with served(predicted) as client:
        key = keys_of(client)["case-1"]
        monkeypatch.setattr("tapfm.viewer.server._line_of", lambda _: {}[str(predicted)])
        answer = client.get(f"/api/slides/{key}")
        assert answer.status_code == 500
        assert answer.json() == {"error": "Something went wrong: see the terminal."}
        assert answer.headers["x-content-type-options"] == "nosniff"


# --- nothing but the slides


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../server.py",
        "/assets/..%2fserver.py",
        "/assets/%2e%2e/server.py",
        "/assets/%2e%2e%2f%2e%2e%2fpyproject.toml",
        "/assets/..%5cserver.py",
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
    answer = client.get(path.format(key=keys_of(client)["case-1"], file=file), follow_redirects=False)
    assert answer.status_code == 404
    assert set(answer.json()) == {"error"}


def test_links_lead_to_no_other_file(tmp_path):
    (tmp_path / "slides").mkdir()
    secret = tmp_path / "secret.txt"
    secret.write_text("name and date of birth")
    (tmp_path / "slides" / "secret.svs").symlink_to(secret)
    (tmp_path / "slides" / "secret.txt").symlink_to(secret)
    write_slide(tmp_path / "slides" / "whole.svs", section(300, 300))
    with served(tmp_path / "slides") as client:
        keys = keys_of(client)
        assert set(keys) == {"secret", "whole"}  # what is no slide by its name is not in the list
        for what in ("", "/thumbnail.jpeg", "/pictures/0/0_0.jpeg", "/numbers", "/tiles/0.jpeg"):
            answer = client.get(f"/api/slides/{keys['secret']}{what}")
            assert answer.status_code in (404, 422)
            assert "birth" not in answer.text


def test_a_prediction_that_names_another_file_shows_none_of_it(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("name and date of birth")
    (tmp_path / "prediction.json").write_text("{}")
    predicted_slide(secret).write(tmp_path / "per-slide" / "case-17")
    with served(tmp_path) as client:
        answer = client.get(f"/api/slides/{keys_of(client)['case-17']}")
        assert answer.status_code == 422
        assert "birth" not in answer.text


@needs_real_slides
def test_no_label_or_macro_image_of_a_real_slide_is_served(monkeypatch):
    import openslide
    from slide_files import REAL

    def refuse(_):
        raise AssertionError("an associated image was asked for")

    monkeypatch.setattr(openslide.OpenSlide, "associated_images", property(refuse))
    for name in ("CMU-1-Small-Region.svs", "CMU-1-Small-Region-DICOM"):
        with served(REAL / name) as client:
            (key,) = keys_of(client).values()
            told = client.get(f"/api/slides/{key}").json()
            assert (told["width_px0"], told["height_px0"]) == (2220, 2967)
            for what in ("thumbnail.jpeg", f"pictures/{told['last_level']}/4_5.jpeg", "pictures/0/0_0.jpeg"):
                assert client.get(f"/api/slides/{key}/{what}").status_code == 200
