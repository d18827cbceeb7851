"""tapfm-pocket: small enough for a laptop, loaded as every other encoder, and better than colour at what is planted."""

import json

import cv2
import numpy as np
import pytest
import torch
from command_line import tapfm
from support import cls_attention, take_step
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tapfm.encoders.build import build_vit
from tapfm.encoders.catalog import encoder_card
from tapfm.encoders.weights import load_encoder
from tapfm.errors import WeightsDigestError, WeightsNotFoundError
from tapfm.synthetic.cohort import CohortSpec, plan_cohort
from tapfm.synthetic.slides import render_slide
from tapfm.workflows.doctor import _cached_weights_findings as cached_weights_findings

CARD = encoder_card("tapfm-pocket")


@pytest.fixture(scope="module")
def pocket():
    return load_encoder("tapfm-pocket").encoder.eval()


def test_it_is_as_small_as_promised(pocket):
    assert sum(p.numel() for p in pocket.parameters()) == CARD.parameters <= 5_000_000
    assert (CARD.package_folder / CARD.file).stat().st_size <= 10_000_000
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        build_vit(CARD)(torch.zeros(1, 3, 224, 224))
    assert counter.get_total_flops() <= 0.5e9
    assert counter.get_total_flops() / 1e9 == pytest.approx(CARD.gflops, abs=0.05)
    assert CARD.prefix_tokens == 5  # CLS and registers


def test_it_is_the_published_file_and_has_a_model_card():
    provenance = load_encoder("tapfm-pocket").provenance
    assert provenance.published is True
    text = (CARD.package_folder / "README.md").read_text()
    for word in ("DINOv2", "not for", "tools/pretrain_pocket.py", "AUC"):
        assert word in text


def test_the_command_line_loads_it_without_a_hub(tmp_path):
    result = tapfm("encoders", "tapfm-pocket", "--check", "--json", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "the published file" in json.loads(result.stdout)["SHA-256"]
    assert "comes with tapfm" in tapfm("encoders", "tapfm-pocket").stdout


def test_a_damaged_file_is_refused_with_what_to_do(tmp_path):
    whole = (CARD.package_folder / CARD.file).read_bytes()
    (tmp_path / CARD.file).write_bytes(whole[:-2] + b"xx")
    with pytest.raises(WeightsDigestError, match="pip install --force-reinstall"):
        load_encoder("tapfm-pocket", weights=tmp_path)


def test_a_file_that_is_gone_is_told_with_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(type(CARD), "package_folder", property(lambda _: tmp_path))
    with pytest.raises(WeightsNotFoundError, match="pip install --force-reinstall"):
        load_encoder("tapfm-pocket")
    (finding,) = [each for each in cached_weights_findings([CARD]) if each.status == "broken"]
    assert "pip install --force-reinstall" in finding.advice


def test_it_can_be_adapted():
    encoder = load_encoder("tapfm-pocket").encoder
    tiles = torch.randint(0, 256, (4, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    report = take_step(encoder, cls_attention(encoder), tiles)
    assert torch.isfinite(report.loss_agg)
    assert all(torch.isfinite(p.grad).all() for p in encoder.parameters() if p.grad is not None)
    assert sum(float(p.grad.abs().sum()) for p in encoder.parameters() if p.grad is not None) > 0


def test_its_attention_differs_between_tiles(pocket):
    black, white = (torch.full((1, 3, 224, 224), value, dtype=torch.uint8) for value in (0, 255))
    noise = torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        encoded = pocket(torch.cat([black, white, noise]))
    assert encoded.r_K.std() / encoded.r_K.mean() > 1e-3


def nest_tiles(planned):
    """Tiles with nests of one slide, as (tile, does it carry the signal)."""
    painted = render_slide(planned)
    truth = painted.truth
    positions, side = truth.default_grid()
    nests = truth.coverage(truth.epithelium, positions, side)
    positions = positions[nests > 0.3]
    carries = truth.signal("FGFR3", positions, side)
    tiles = [cv2.resize(painted.scan.pixels[y : y + side, x : x + side], (224, 224)) for x, y in positions]
    clear = (carries == 0) | (carries > 0.2)
    return np.array(tiles)[clear], (carries > 0.2)[clear]


def probe(features, truth, slides):
    """Area under the curve of a ridge regression on two thirds of the slides, over the tiles of the others."""
    known = slides % 3 != 0
    mean, std = features[known].mean(0), features[known].std(0) + 1e-6
    x = (features - mean) / std
    target = np.where(truth[known], 1 / truth[known].mean(), -1 / (1 - truth[known].mean()))
    inverse = np.linalg.inv(x[known].T @ x[known] + 0.3 * known.sum() * np.eye(x.shape[1]))
    scores, right = x[~known] @ (inverse @ x[known].T @ target), truth[~known]
    return float((scores[right][:, None] > scores[~right][None]).mean())


def test_a_linear_probe_on_it_beats_one_on_colour(pocket):
    spec = CohortSpec(slides=24, external=0, tiles=24, difficulty="easy", prevalence={"FGFR3": 0.5}, seed=7)
    planned = [each for each in plan_cohort(spec) if each.scanner.objective == 20]
    parts = [nest_tiles(each) for each in planned]
    tiles, truth = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    slides = np.repeat(np.arange(len(parts)), [len(part[0]) for part in parts])
    with torch.no_grad():
        features = pocket(torch.from_numpy(tiles).permute(0, 3, 1, 2)).z_KD.numpy()
    flat = tiles.reshape(len(tiles), -1, 3).astype(np.float32)
    colour = np.concatenate([flat.mean(1), flat.std(1), *np.percentile(flat, [10, 50, 90], axis=1)], axis=1)
    with_pocket, with_colour = probe(features, truth, slides), probe(colour, truth, slides)
    assert with_pocket > 0.8
    assert with_pocket > with_colour + 0.05
