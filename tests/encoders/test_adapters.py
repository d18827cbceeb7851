"""Adaptation scopes: trainable parameters, frozen parameters, and merging of LoRA adapters."""

import subprocess
import sys

import pytest
import timm
import torch
from support import (
    FAMILIES,
    cls_attention,
    end_to_end_gradient,
    get_gradient,
    random_tiles,
    randomise,
    relative_difference,
    small_encoder,
    step_gradient,
    take_step,
)
from torch import nn

from tapfm.adaptation.chunked import Chunking
from tapfm.encoders.adapters import Scope, apply_scope, find_lora_layers, merge_adapters, trainable_parameters
from tapfm.encoders.vit import VitEncoder
from tapfm.errors import InputError, SettingError

FULL, LORA = Scope("full"), Scope("lora", 4)


def build_adapted_encoder(family="registers", *, trained=True, **settings):
    """Return an encoder with LoRA adapters; `trained` gives them random values, so that they change the output."""
    encoder = small_encoder(family, **settings).eval()
    apply_scope(encoder, LORA)
    for number, layer in enumerate(find_lora_layers(encoder).values() if trained else ()):
        randomise(layer.lora_B, seed=number)
    return encoder


def build_encoder_with_separate_bias():
    """Return a ViT whose qkv biases are separate parameters; timm then does not call the qkv layer itself."""
    size = {"depth": 3, "embed_dim": 64, "num_heads": 2, "img_size": 48}
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_dinov3_qkvb", num_classes=0, global_pool="token", **size)
    randomise(vit)
    return VitEncoder(vit, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)).double().eval()


@pytest.mark.parametrize(("text", "scope"), [("full", FULL), ("last:4", Scope("last", 4)), ("lora:4", LORA)])
def test_scope_is_parsed_and_formatted(text, scope):
    assert Scope.parse(text) == scope
    assert str(scope) == text


@pytest.mark.parametrize(
    "text", ["", "Full", "full:2", "last", "lora", "last:0", "lora:-1", "lora:1.5", "last: 2", "lora:16 ", "head:2"]
)
def test_invalid_scope_is_an_error_that_lists_valid_scopes(text):
    with pytest.raises(SettingError) as raised:
        Scope.parse(text)
    assert f"'{text}'" in raised.value.message
    assert all(valid in raised.value.hint for valid in ('"full"', '"last:N"', '"lora:R"'))


@pytest.mark.parametrize("parts", [("full", 1), ("last", None), ("lora", 0), ("last", -1), ("head", None)])
def test_scope_with_invalid_fields_is_an_error(parts):
    with pytest.raises(SettingError, match="Valid"):
        Scope(*parts)


def test_parsing_a_scope_does_not_import_torch():
    program = (
        "import sys; from tapfm.encoders.adapters import Scope; Scope.parse('lora:8'); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize("family", FAMILIES)
def test_new_adapters_do_not_change_the_output(family):
    encoder = small_encoder(family).eval()
    tiles = random_tiles(encoder)
    before = encoder(tiles)
    apply_scope(encoder, LORA)
    after = encoder(tiles)
    assert torch.equal(after.z_KD, before.z_KD)
    assert torch.equal(after.r_K, before.r_K)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_merged_adapters_give_the_same_features_and_attention(family, dtype, tolerance):
    encoder = build_adapted_encoder(family, dtype=dtype)
    plain = small_encoder(family, dtype=dtype)
    tiles = random_tiles(encoder)
    with torch.no_grad():
        without, adapted = plain.eval()(tiles), encoder(tiles)
        merge_adapters(encoder)
        merged = encoder(tiles)
    assert relative_difference(without.z_KD, adapted.z_KD) > 0.01, "the adapters did nothing"
    assert relative_difference(without.r_K, adapted.r_K) > 1e-4, "the adapters did nothing to the last projection"
    assert relative_difference(merged.z_KD, adapted.z_KD) < tolerance
    assert relative_difference(merged.r_K, adapted.r_K) < tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_merging_restores_modules_and_names_of_timm(family):
    plain, encoder = small_encoder(family), build_adapted_encoder(family)
    merge_adapters(encoder)
    assert [(n, type(m)) for n, m in encoder.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]
    assert encoder.state_dict().keys() == plain.state_dict().keys()
    merged = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    merge_adapters(encoder)
    assert all(torch.equal(tensor, merged[name]) for name, tensor in encoder.state_dict().items()), (
        "a second merge must not change anything"
    )
    apply_scope(encoder, LORA)  # it can be adapted again


def test_every_linear_layer_of_attention_and_mlp_has_an_adapter():
    encoder = build_adapted_encoder(depth=6)  # with more than 20 layers, peft abbreviates the list of names
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert list(find_lora_layers(encoder)) == [f"blocks.{block}.{layer}" for block in range(6) for layer in layers]
    assert not any(
        isinstance(module, nn.Dropout) for layer in find_lora_layers(encoder).values() for module in layer.modules()
    )
    for layer in find_lora_layers(encoder).values():
        assert layer.scaling == {"default": 2.0}
        assert {len(p) for p in layer.lora_A.parameters()} == {4}


@pytest.mark.parametrize("chunking", [Chunking(), Chunking(2, keep_graphs=0)], ids=["one pass", "chunked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_of_adapters_equals_end_to_end_backpropagation(family, chunking):
    encoder = build_adapted_encoder(family)
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder)
    expected = end_to_end_gradient(encoder, aggregator, tiles)
    assert relative_difference(step_gradient(encoder, aggregator, tiles, chunking=chunking), expected) < 1e-9
    with_gradient = {name for name, parameter in encoder.named_parameters() if parameter.grad is not None}
    assert with_gradient == set(trainable_parameters(encoder))
    assert all(".lora_A." in name or ".lora_B." in name for name in with_gradient)
    assert all(parameter.grad.abs().sum() > 0 for parameter in trainable_parameters(encoder).values())


def test_adapters_have_the_same_gradient_with_checkpointed_blocks():
    encoder = build_adapted_encoder(depth=3)
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder)
    expected = step_gradient(encoder, aggregator, tiles)
    encoder.recompute = ("block",) * len(encoder.vit.blocks)
    assert relative_difference(step_gradient(encoder, aggregator, tiles), expected) < 1e-9


def test_adapter_works_on_a_qkv_layer_with_separate_bias():
    encoder = build_encoder_with_separate_bias()
    tiles = random_tiles(encoder)
    before = encoder(tiles)
    apply_scope(encoder, LORA)
    torch.testing.assert_close(encoder(tiles), before)
    for number, layer in enumerate(find_lora_layers(encoder).values()):
        randomise(layer.lora_B, seed=number)
    step_gradient(encoder, cls_attention(encoder), tiles)
    assert all(parameter.grad.abs().sum() > 0 for parameter in trainable_parameters(encoder).values())
    adapted = encoder(tiles)
    merge_adapters(encoder)
    torch.testing.assert_close(encoder(tiles), adapted)


def test_training_adapters_does_not_change_base_weights():
    encoder = build_adapted_encoder(dtype=torch.float32, trained=False).train()
    plain = small_encoder(dtype=torch.float32).state_dict()
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder)
    optimiser = torch.optim.AdamW(trainable_parameters(encoder).values(), lr=1e-2, weight_decay=0.1)
    losses = []
    for _ in range(5):
        optimiser.zero_grad()
        losses.append(float(take_step(encoder, aggregator, tiles, update_encoder=optimiser.step).loss_agg))
    assert losses[-1] < losses[0]
    after = {name.replace(".base_layer.", "."): tensor for name, tensor in encoder.state_dict().items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in plain.items())
    assert all(p.abs().sum() > 0 for name, p in trainable_parameters(encoder).items() if ".lora_B." in name)


def test_initial_adapters_depend_only_on_the_seed():
    def initial_values(seed, global_seed):
        encoder = small_encoder()
        torch.manual_seed(global_seed)
        state = torch.get_rng_state()
        apply_scope(encoder, LORA, seed=seed)
        assert torch.equal(torch.get_rng_state(), state), "the global generator must not be used"
        return torch.cat([p.flatten() for p in trainable_parameters(encoder).values()])

    assert torch.equal(initial_values(1, 0), initial_values(1, 9))
    assert not torch.equal(initial_values(1, 0), initial_values(2, 0))
    assert len(initial_values(1, 0).unique()) > 1000, "every layer has different initial values"


def test_adapters_of_a_half_precision_encoder_are_float32():
    encoder = build_adapted_encoder(dtype=torch.bfloat16)
    assert {p.dtype for p in trainable_parameters(encoder).values()} == {torch.float32}
    tiles = random_tiles(encoder)
    with torch.no_grad():
        adapted = encoder(tiles).z_KD
        merge_adapters(encoder)
        assert {p.dtype for p in encoder.vit.parameters()} == {torch.bfloat16}
        assert relative_difference(encoder(tiles).z_KD, adapted) < 0.03


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_last_blocks_get_the_same_gradient_as_in_full_training(family, checkpointed):
    encoder = small_encoder(family, depth=3)
    aggregator, tiles = cls_attention(encoder), random_tiles(encoder)
    apply_scope(encoder, FULL)
    assert len(trainable_parameters(encoder)) == len(list(encoder.parameters()))
    take_step(encoder, aggregator, tiles)
    full = {name: p.grad for name, p in encoder.named_parameters()}
    encoder.zero_grad()
    apply_scope(encoder, Scope("last", 2))
    encoder.recompute = ("block" if checkpointed else "nothing",) * len(encoder.vit.blocks)
    take_step(encoder, aggregator, tiles)
    trained = {name for name in full if name.startswith(("vit.blocks.1.", "vit.blocks.2.", "vit.norm."))}
    assert set(trainable_parameters(encoder)) == trained
    for name, parameter in encoder.named_parameters():
        if name in trained:
            torch.testing.assert_close(parameter.grad, full[name])
        else:
            assert parameter.grad is None, name
    assert get_gradient(encoder.vit.blocks[1]).norm() > 0


def test_scope_with_too_many_blocks_is_an_error():
    encoder = small_encoder(depth=3)
    apply_scope(encoder, Scope("last", 3))
    with pytest.raises(SettingError, match=r'this encoder has 3.*\n.*"last:1" to "last:3"'):
        apply_scope(encoder, Scope("last", 4))


def test_full_scope_unfreezes_everything():
    encoder = small_encoder()
    apply_scope(encoder, Scope("last", 1))
    apply_scope(encoder, FULL)
    assert all(parameter.requires_grad for parameter in encoder.parameters())


@pytest.mark.parametrize("scope", [FULL, Scope("last", 1), LORA], ids=str)
def test_scope_of_encoder_with_adapters_is_an_error(scope):
    with pytest.raises(SettingError, match="merge_adapters"):
        apply_scope(build_adapted_encoder(), scope)


def test_error_without_peft_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    encoder = small_encoder()
    with pytest.raises(InputError, match="pip install peft"):
        apply_scope(encoder, LORA)
    assert all(parameter.requires_grad for parameter in encoder.parameters()), "nothing may change before the error"
