"""Gradients: against finite differences, against the parallel scheme, with and without checkpointing, through peft."""

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from hf_ext.model_patches.turboconn import JacobiGapCallback, TurboConnConfig, parameter_groups, patch
from hf_ext.model_patches.turboconn.links import LinksInto, TurboLinks, normalise, shift

ROUNDING = 2e-6


def gradients(model, **inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients in training mode."""
    model.train()
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of two gradients, over the largest entry of the second."""
    assert a.keys() == b.keys()
    return max(((a[name] - b[name]).abs().max() / b[name].abs().max().clamp(min=1e-12)).item() for name in b)


# --- the link alone ------------------------------------------------------------------------------------------------


def reference(link: LinksInto, states: np.ndarray, eps: float) -> np.ndarray:
    """The formula in numpy, source by source."""
    x = states / np.sqrt((states**2).mean(-1, keepdims=True) + eps)
    total = 0
    weights = {name: p.detach().numpy() for name, p in link.named_parameters()}
    for place, row in enumerate(link.rows):
        d, r = states.shape[-1], link.rank
        if r is None:
            matrix = weights["weight"][:, place * d : (place + 1) * d]
        else:
            matrix = weights["up"][:, place * r : (place + 1) * r] @ weights["down"][place * r : (place + 1) * r]
        alpha = 1.0
        if link.kind == "scalar":
            alpha = weights["gate"][place]
        elif link.kind == "input":
            alpha = (
                1 / (1 + np.exp(-(x[row] @ weights["gate_weight"][place] + weights["gate_bias"][place])))[..., None]
            )
        total = total + alpha * (x[row] @ matrix.T)
    return total


@pytest.mark.parametrize("gate", ["none", "scalar", "input"])
@pytest.mark.parametrize("rank", [None, 2])
def test_links_equal_the_formula_in_float64_and_their_gradients_finite_differences(rank, gate):
    torch.manual_seed(0)
    pairs = [(2, 0), (3, 0), (4, 0), (4, 1), (2, 2 - 1)]
    links = TurboLinks(sorted(pairs, key=lambda p: (p[1], p[0])), 6, rank, gate, eps=1e-6).double()
    for parameter in links.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    states = torch.randn(3, 2, 4, 6, dtype=torch.float64) * torch.tensor([0.02, 1.0, 300.0])[:, None, None, None]
    found = links(states)
    assert len(found) == 2 and all(part.dtype == torch.float64 for part in found)
    for into, part in zip((links.into_0, links.into_1), found, strict=True):
        np.testing.assert_allclose(
            part.detach().numpy(), reference(into, states.numpy(), 1e-6), rtol=1e-12, atol=1e-12
        )
    leaves = [states.clone().requires_grad_(), *links.parameters()]
    assert torch.autograd.gradcheck(lambda x, *_: torch.cat(links(x), dim=-1), leaves, eps=1e-7, atol=1e-4)


def test_a_state_of_zeros_adds_nothing_and_normalising_is_done_in_float32():
    x = torch.tensor([[3e4, -3e4, 0.0, 0.0], [0, 0, 0, 0]], dtype=torch.float16)
    found = normalise(x, 1e-6)
    assert found.dtype == torch.float32 and torch.isfinite(found).all()  # the square overflows float16
    assert found[0].square().mean().item() == pytest.approx(1) and found[1].abs().max() == 0


def test_links_start_at_zero_and_their_first_gradient_is_not():
    for rank, trained in ((None, ["weight"]), (3, ["up"])):
        links = TurboLinks([(2, 0)], 8, rank, "input", eps=1e-6)
        links.into_0.reset_parameters()
        (added,) = links(torch.randn(1, 2, 4, 8))
        assert added.abs().max() == 0
        added.sum().backward()
        assert [name for name, p in links.into_0.named_parameters() if p.grad.abs().max() > 0] == trained
    assert torch.sigmoid(links.into_0.gate_bias).item() == pytest.approx(0.8808, abs=1e-4)
    assert links.into_0.down.std().item() == pytest.approx(8**-0.5, rel=0.5)


def test_shift_moves_states_to_later_tokens():
    states = torch.arange(1.0, 6)[None, None, :, None]
    assert shift(states, 2)[0, 0, :, 0].tolist() == [0, 0, 1, 2, 3]
    assert shift(states, 9)[0, 0, :, 0].tolist() == [0] * 5


# --- through time --------------------------------------------------------------------------------------------------


def test_the_gradient_through_time_equals_finite_differences(linked, ids):
    # The library computes norms in float32 even for a float64 model, so the step is coarse and so is the tolerance.
    model, tokens = linked(scale=0.3).double(), ids(2)

    def loss() -> torch.Tensor:
        logits = model(tokens, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    weight = model.model.turbo_links.into_0.weight
    loss().backward()
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = (weight.grad * direction).sum().item()
    step = 1e-3 / direction.norm().item()
    with torch.no_grad():
        weight.add_(step * direction)
        above = loss().item()
        weight.sub_(2 * step * direction)
        below = loss().item()
    assert (above - below) / (2 * step) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("kind", ["Qwen3", "Mistral"])
def test_jacobi_is_exact_with_as_many_passes_as_chunks_and_not_before(group_size, kind, linked, ids):
    exact, tokens = linked(kind, scale=0.3, group_size=group_size), ids()
    _, expected = gradients(exact, input_ids=tokens, labels=tokens)
    right, chunks, errors = exact(tokens).logits, -(-12 // group_size), {}
    for passes in sorted({1, 2, chunks - 1, chunks, chunks + 1}):
        model = linked(kind, scale=0.3, group_size=group_size, train_mode="jacobi", n_iters=passes, gap_tol=1e9)
        _, found = gradients(model, input_ids=tokens, labels=tokens)
        errors[passes] = (model(tokens).logits - right).abs().max().item()
        if passes == 1:
            assert not any("turbo_links" in name for name in found)  # nothing has been written yet
        elif passes >= chunks:
            assert furthest(found, expected) < 1e-4
    assert all(error < ROUNDING if passes >= chunks else error > 1e-3 for passes, error in errors.items())


def test_evaluation_and_generation_are_exact_whatever_the_training(linked, ids):
    model, exact, tokens = linked(scale=0.3, train_mode="jacobi", n_iters=2), linked(scale=0.3), ids()
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "attention_mask": tokens * 0 + 1}
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, exact(tokens).logits)
        assert torch.equal(model.train().generate(tokens, **options), exact.generate(tokens, **options))


def test_jacobi_handles_padding_and_packed_documents(linked, ids):
    tokens, mask = ids(), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    labels = tokens.where(mask == 1, -100)
    packed = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(12)[None].expand(2, -1) % 5}
    padded = {"input_ids": tokens, "labels": labels, "attention_mask": mask, "position_ids": positions}
    for inputs in (packed, padded):
        for group_size in (1, 3):
            exact = linked(scale=0.3, group_size=group_size)
            model = linked(scale=0.3, group_size=group_size, train_mode="jacobi", n_iters=12)
            expected_loss, expected = gradients(exact, use_cache=False, **inputs)
            loss, found = gradients(model, **inputs)
            assert abs(loss - expected_loss) < ROUNDING and furthest(found, expected) < 1e-4


def test_auto_uses_jacobi_while_its_error_is_small(linked, ids):
    tokens = ids()
    for scale, parallel in ((1e-5, True), (0.3, False)):
        settings = {"train_mode": "auto", "n_iters": 3, "gap_every": 2}
        model, exact = linked(scale=scale, **settings), linked(scale=scale)
        calls = []
        model.model.layers[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        loss, found = gradients(model, input_ids=tokens, labels=tokens)
        assert model.model.jacobi_gap < 1e-2 if parallel else model.model.jacobi_gap > 1e-2
        assert len(calls) == 12 + 3 + (3 if parallel else 12)  # the measurement, then the pass itself
        calls.clear()
        gradients(model, input_ids=tokens, labels=tokens)
        assert len(calls) == (3 if parallel else 12)
        if not parallel:
            expected_loss, expected = gradients(exact, input_ids=tokens, labels=tokens)
            assert torch.equal(loss, expected_loss) and furthest(found, expected) == 0


def test_the_gap_is_the_error_of_the_last_hidden_states(linked, ids):
    tokens = ids()
    exact = linked(scale=0.1)
    model = linked(scale=0.1, train_mode="jacobi", n_iters=2)
    gradients(model, input_ids=tokens, labels=tokens)
    with torch.no_grad():
        right = exact.model(tokens).last_hidden_state
        wrong = model.train().model(tokens).last_hidden_state
    expected = (right - wrong).abs().max() / right.square().mean().sqrt()
    assert model.model.jacobi_gap == pytest.approx(expected.item(), rel=1e-5)
    assert model.training and model.model.layers[0].training


def test_a_window_cuts_the_carried_state_from_the_gradient_but_not_the_attention(linked, ids):
    tokens = ids(1)
    for window, reach in ((None, list(range(12))), (4, [8, 9, 10, 11])):
        model = linked(scale=0.3, bptt_window=window)
        with torch.no_grad():
            expected = linked(scale=0.3)(tokens).logits
            assert torch.equal(model(tokens).logits, expected)
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
        embeds = model.get_input_embeddings()(tokens).detach().requires_grad_()
        model.train()(inputs_embeds=embeds, use_cache=False).logits[0, 11].sum().backward()
        assert (embeds.grad[0].abs().amax(-1) > 0).nonzero().flatten().tolist() == reach
    model = linked(scale=0.3, bptt_window=4)
    embeds = model.get_input_embeddings()(tokens).detach().requires_grad_()
    model.train()(inputs_embeds=embeds, use_cache=False).logits[0, 11].sum().backward()
    assert (embeds.grad[0].abs().amax(-1) > 0).all()  # keys and values keep theirs


# --- checkpointing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"bptt_window": 2}, {"train_mode": "jacobi", "n_iters": 12}])
@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(group_size, settings, kind, linked, ids):
    model, tokens = linked(kind, scale=0.2, group_size=group_size, rank=4, **settings), ids()
    mask = torch.ones_like(tokens)
    mask[0, 9:] = 0
    inputs = {"input_ids": tokens, "labels": tokens.where(mask == 1, -100), "attention_mask": mask, "use_cache": False}
    expected_loss, expected = gradients(model, **inputs)
    model.activation_checkpointing_enable()
    flags = [(m, m.gradient_checkpointing) for m in model.modules() if hasattr(m, "gradient_checkpointing")]
    loss, found = gradients(model, **inputs)
    assert torch.equal(loss, expected_loss)
    assert furthest(found, expected) < 2e-5
    assert [(m, m.gradient_checkpointing) for m, _ in flags] == flags and len(flags) > 4


def test_checkpointing_keeps_less_than_the_plain_pass(linked, ids):
    # Bytes that autograd saves for the backward pass.
    def saved(model) -> int:
        seen = {}

        def pack(tensor):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        del loss
        return sum(seen.values())

    tokens = ids(2, 49)
    model = linked().train()
    plain = saved(model)
    model.activation_checkpointing_enable()
    assert saved(model) < 0.25 * plain


# --- trainers and adapters -----------------------------------------------------------------------------------------


def arguments(folder, **changes) -> TrainingArguments:
    common = {"report_to": [], "use_cpu": True, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    return TrainingArguments(output_dir=str(folder), **{**common, "max_steps": 2, "learning_rate": 1e-3, **changes})


def test_trainer_moves_the_links_and_logs_jacobis_error(linked, ids, tmp_path):
    model = linked(scale=0.0, train_mode="jacobi", n_iters=3)
    rows = [{"input_ids": row, "labels": row} for row in ids(8)]
    trainer = Trainer(model, arguments(tmp_path), train_dataset=rows, callbacks=[JacobiGapCallback()])
    before = copy.deepcopy(model.state_dict())
    trainer.train()
    assert not torch.equal(model.model.turbo_links.into_0.weight, before["model.turbo_links.into_0.weight"])
    assert "turbo/jacobi_gap" in trainer.state.log_history[0]


def test_links_have_a_learning_rate_of_their_own(linked, ids):
    model = linked(gate="scalar")
    groups = parameter_groups(model, 1e-2, link_lr_scale=0.1, weight_decay=0.3)
    of = {id(p): group for group in groups for p in group["params"]}
    assert len(of) == sum(1 for _ in model.parameters())
    links = model.model.turbo_links.into_0
    assert (of[id(links.weight)]["lr"], of[id(links.weight)]["weight_decay"]) == (pytest.approx(1e-3), 0.3)
    assert (of[id(links.gate)]["lr"], of[id(links.gate)]["weight_decay"]) == (pytest.approx(1e-3), 0.0)
    assert of[id(model.lm_head.weight)]["lr"] == 1e-2 and of[id(model.model.norm.weight)]["weight_decay"] == 0
    torch.optim.AdamW(groups)
    with pytest.raises(ValueError, match="link_lr_scale is 0"):
        parameter_groups(model, 1e-2, link_lr_scale=0)
    with pytest.raises(ValueError, match="no trainable links.*modules_to_save"):
        parameter_groups(model.lm_head, 1e-2)


def test_lora_and_links_train_save_and_load(linked, fill, ids, tmp_path):
    peft = pytest.importorskip("peft")
    base = linked("Qwen3", scale=0.0)
    frozen = copy.deepcopy(base)
    with pytest.raises(ValueError, match="target_modules"):  # peft does not know our model_type
        peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(task_type="CAUSAL_LM"))
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["turbo_links"]
    )
    model, tokens = peft.get_peft_model(base, lora), ids()
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-2))
    model.train()
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        expected = model(tokens).logits
    assert (expected - frozen(tokens).logits).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(frozen, tmp_path).eval()
    links = loaded.base_model.model.model.turbo_links.modules_to_save["default"]
    assert links.into_0.weight.abs().max() > 0
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, expected)
        merged = loaded.merge_and_unload()
        assert type(merged).__name__ == "TurboConnQwen3ForCausalLM"
        assert (merged(tokens).logits - expected).abs().max() < ROUNDING
    with pytest.raises(ValueError, match="adapters"):
        patch(model, TurboConnConfig())
