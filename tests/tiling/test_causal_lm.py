"""tile_loss_ on causal language models of transformers. Trusted: the untouched model and its loss
function."""

import copy

import pytest
import torch
import transformers

from infinity.tiling import LogitsUsedError, tile_, tile_loss_, tile_loss_where
from infinity.tiling.causal_lm import Logits
from models import MODELS, SIZES, batch

pytestmark = pytest.mark.usefixtures("repeatable")


@pytest.fixture(params=["llama", "gpt2", "mixtral"])
def model(request, seed):
    torch.manual_seed(seed)
    return MODELS[request.param]()


def labels_of(ids):
    labels = ids.clone()
    labels[0, :9] = -100
    return labels


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("count", [None, 100, torch.tensor(100)])
def test_loss_and_gradients_are_those_of_the_models_own_loss(model, tiled, count):
    other = tile_loss_(copy.deepcopy(model))
    if tiled:
        tile_(other.model if hasattr(other, "model") else other.transformer, 3000)
    ids = batch(1)
    options = {} if count is None else {"num_items_in_batch": count}
    losses = [one(ids, labels=labels_of(ids), **options).loss for one in (model, other)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    mine = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        if name in mine:
            torch.testing.assert_close(mine[name].grad, parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_tiled_output_layer_gives_the_same_loss(model):
    other = copy.deepcopy(model)
    tile_(other, 3000)
    tile_loss_(other)
    ids = batch(1)
    torch.testing.assert_close(other(ids, labels=ids).loss, model(ids, labels=ids).loss, rtol=1e-6, atol=0)


def test_logits_are_computed_when_used_and_not_before(model):
    tile_loss_(model)
    calls = []
    head = model.get_output_embeddings()
    original = head.forward.forward
    head.forward.forward = lambda hidden: calls.append(1) or original(hidden)
    ids = batch(1)
    output = model(ids, labels=ids)
    assert isinstance(output.logits, Logits)
    assert output.logits.float().shape == (2, 16, 64)
    assert output.logits.float().dtype == torch.float32
    output.loss.backward()
    assert not calls
    assert torch.equal(output.logits.argmax(-1), model(ids).logits.argmax(-1))
    assert len(calls) == 2


def test_logits_of_an_earlier_step_and_changes_in_place_are_refused_and_not_made_up(model):
    optimizer = torch.optim.SGD(tile_loss_(model).parameters(), lr=0.1)
    ids = batch(1)
    output = model(ids, labels=ids)
    for change in (lambda: output.logits.mul_(2), lambda: output.logits.__setitem__(0, 0.0)):
        with pytest.raises(LogitsUsedError, match="the change would be lost"):
            change()
    output.loss.backward()
    optimizer.step()
    for use in (lambda: output.logits.argmax(-1), lambda: output.logits.float() + 1):
        with pytest.raises(LogitsUsedError, match="weights have changed since"):
            use()


def test_without_labels_logits_are_logits(model):
    expected = model(batch(1)).logits
    actual = tile_loss_(model)(batch(1)).logits
    assert type(actual) is torch.Tensor
    assert torch.equal(actual, expected)


def test_a_forward_that_raises_leaves_nothing_behind(model):
    tile_loss_(model)
    ids = batch(1)
    with pytest.raises(IndexError):
        model(torch.full_like(ids, 9999), labels=ids)
    assert type(model.get_output_embeddings()(torch.zeros(1, 32))) is torch.Tensor


def test_a_copy_has_a_tiled_loss_of_its_own(model):
    other = copy.deepcopy(tile_loss_(model))
    ids = batch(1)
    output = other(ids, labels=ids)
    assert isinstance(output.logits, Logits)
    output.loss.backward()
    assert other.get_output_embeddings().weight.grad is not None
    assert model.get_output_embeddings().weight.grad is None


def test_shifted_labels_and_z_loss_are_honoured(model):
    ids = batch(1)
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    expected = model(ids, labels=ids).loss
    logits = model(ids).logits[:, :-1].float()
    tile_loss_(model)
    torch.testing.assert_close(model(ids, labels=ids, shift_labels=shifted).loss, expected, rtol=1e-6, atol=0)
    tile_loss_(model, z_loss=0.1)
    expected = expected + 0.1 * torch.logsumexp(logits, -1).square().mean()
    torch.testing.assert_close(model(ids, labels=ids).loss, expected, rtol=1e-6, atol=0)


def test_a_model_that_caps_its_logits_is_refused_when_it_does():
    small = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "head_dim": 8,
    }
    model = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**small, num_attention_heads=4, num_key_value_heads=2)
    )
    tile_loss_(model)
    with pytest.raises(RuntimeError, match="before the loss"):
        model(batch(1), labels=batch(1))


class ChangesLogits(transformers.LlamaForCausalLM):
    """Changes its logits in place before the loss, as Chameleon does, and by a view of them in fp32."""

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.model(input_ids=input_ids, use_cache=False)[0])
        logits[:, :, [3, 4]] = -100.0
        logits = logits.float()
        logits[:, :, 5].fill_(-100.0)
        return self.loss_function(logits=logits, labels=labels, vocab_size=64), logits


def test_a_model_that_changes_its_logits_in_place_makes_them_and_keeps_the_change(seed):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1})
    plain = ChangesLogits(config)
    other = copy.deepcopy(plain)
    tile_loss_where(other, lambda _: True)
    ids = batch(1)
    expected = plain(ids, labels=ids)
    for _ in range(2):
        loss, logits = other(ids, labels=ids)
        assert torch.equal(loss, expected[0])
        assert torch.equal(logits + 0, expected[1])
        other.zero_grad()
        loss.backward()
    expected[0].backward()
    assert torch.equal(other.lm_head.weight.grad, plain.lm_head.weight.grad)
    with pytest.raises(LogitsUsedError, match="before the loss"):
        tile_loss_(copy.deepcopy(other))(ids, labels=ids)


def test_models_without_a_causal_loss_are_refused():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(ValueError, match="output layer"):
        tile_loss_(transformers.LlamaForSequenceClassification(config))
    model = transformers.LlamaForCausalLM(config)
    model.loss_function = lambda **_: None
    with pytest.raises(ValueError, match="only ForCausalLMLoss"):
        tile_loss_(model)


def test_the_trainer_trains_with_it(tmp_path, model):
    """transformers' Trainer passes num_items_in_batch, accumulates, and detaches outputs when it
    evaluates."""
    pytest.importorskip("accelerate")
    other = tile_loss_(copy.deepcopy(model))
    data = [{"input_ids": row, "labels": row} for number in range(4) for row in batch(number)]
    losses = []
    for one in (model, other):
        one.config.use_cache = False
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=2,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            seed=1,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model=one, args=arguments, train_dataset=data, eval_dataset=data)
        losses.append((trainer.train().training_loss, trainer.evaluate()["eval_loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
