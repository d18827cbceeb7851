"""tapfm-pocket: small, loaded like every other encoder, and better than colour statistics on synthetic tiles."""

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
from tapfm.encoders.catalog import find_encoder_card
from tapfm.encoders.weights import load_encoder
from tapfm.errors import WeightsDigestError, WeightsNotFoundError
from tapfm.synthetic.cohort_plan import CohortSpec, plan_cohort
from tapfm.synthetic.slide_rendering import render_slide
from tapfm.workflows.doctor import _cached_weights_findings as cached_weights_findings

CARD = find_encoder_card("tapfm-pocket")


@pytest.fixture(scope="module")
def pocket():
    return load_encoder("tapfm-pocket").encoder.eval()


def test_size_and_operations_match_the_card(pocket):
    assert sum(p.numel() for p in pocket.parameters()) == CARD.parameters <= 5_000_000
    assert (CARD.package_folder / CARD.file).stat().st_size <= 10_000_000
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        build_vit(CARD)(torch.zeros(1, 3, 224, 224))
    assert counter.get_total_flops() <= 0.5e9
    assert counter.get_total_flops() / 1e9 == pytest.approx(CARD.gflops, abs=0.05)
    assert CARD.prefix_tokens == 5  # CLS and registers


def test_packaged_file_has_published_digest_and_model_card():
    provenance = load_encoder("tapfm-pocket").provenance
    assert provenance.published is True
    text = (CARD.package_folder / "README.md").read_text()
    for word in ("DINOv2", "not for", "tools/pretrain_pocket.py", "AUC"):
        assert word in text


def test_command_line_loads_it_offline(tmp_path):
    result = tapfm("encoders", "tapfm-pocket", "--check", "--json", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "the published file" in json.loads(result.stdout)["SHA-256"]
    assert "packaged with tapfm" in tapfm("encoders", "tapfm-pocket").stdout


def test_damaged_file_is_an_error_that_says_what_to_do(tmp_path):
    content = (CARD.package_folder / CARD.file).read_bytes()
    (tmp_path / CARD.file).write_bytes(content[:-2] + b"xx")
    with pytest.raises(WeightsDigestError, match="pip install --force-reinstall"):
        load_encoder("tapfm-pocket", weights=tmp_path)


def test_missing_file_is_an_error_that_says_what_to_do(monkeypatch, tmp_path):
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


def test_raw_attention_differs_between_tiles(pocket):
    black, white = (torch.full((1, 3, 224, 224), value, dtype=torch.uint8) for value in (0, 255))
    noise = torch.randint(0, 256, (1, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        encoded = pocket(torch.cat([black, white, noise]))
    assert encoded.r_K.std() / encoded.r_K.mean() > 1e-3


def read_nest_tiles(planned):
    """Return the tiles of a slide that contain nests, and whether each has the signal."""
    rendered = render_slide(planned)
    truth = rendered.truth
    positions, side = truth.default_tile_grid()
    nests = truth.coverage(truth.epithelium, positions, side)
    positions = positions[nests > 0.3]
    signal = truth.signal_coverage("FGFR3", positions, side)
    tiles = [cv2.resize(rendered.scan.pixels[y : y + side, x : x + side], (224, 224)) for x, y in positions]
    unambiguous = (signal == 0) | (signal > 0.2)
    return np.array(tiles)[unambiguous], (signal > 0.2)[unambiguous]


def compute_probe_auc(features, truth, slides):
    """Return the tile AUC of a ridge regression that is fitted to two thirds of the slides, on the others."""
    training = slides % 3 != 0
    mean, std = features[training].mean(0), features[training].std(0) + 1e-6
    x = (features - mean) / std
    target = np.where(truth[training], 1 / truth[training].mean(), -1 / (1 - truth[training].mean()))
    inverse = np.linalg.inv(x[training].T @ x[training] + 0.3 * training.sum() * np.eye(x.shape[1]))
    scores, positive = x[~training] @ (inverse @ x[training].T @ target), truth[~training]
    return float((scores[positive][:, None] > scores[~positive][None]).mean())


def test_linear_probe_is_better_than_on_colour_statistics(pocket):
    spec = CohortSpec(slides=24, external=0, tiles=24, difficulty="easy", prevalence={"FGFR3": 0.5}, seed=7)
    planned = [each for each in plan_cohort(spec) if each.scanner.objective == 20]
    parts = [read_nest_tiles(each) for each in planned]
    tiles, truth = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    slides = np.repeat(np.arange(len(parts)), [len(part[0]) for part in parts])
    with torch.no_grad():
        features = pocket(torch.from_numpy(tiles).permute(0, 3, 1, 2)).z_KD.numpy()
    flat = tiles.reshape(len(tiles), -1, 3).astype(np.float32)
    colour = np.concatenate([flat.mean(1), flat.std(1), *np.percentile(flat, [10, 50, 90], axis=1)], axis=1)
    pocket_auc, colour_auc = compute_probe_auc(features, truth, slides), compute_probe_auc(colour, truth, slides)
    assert pocket_auc > 0.8
    assert pocket_auc > colour_auc + 0.05
